"""The two translations without a model."""

from __future__ import annotations

from stabilize.data.baselines import nearest_neighbour, word_by_word
from stabilize.data.pairs import Pairs

TRAIN = Pairs(
    ["the house", "the book", "a house", "a book", "the red book.", "a red house."],
    ["das Haus", "das Buch", "ein Haus", "ein Buch", "das rote Buch.", "ein rotes Haus."],
)


def test_words_are_looked_up_one_by_one() -> None:
    assert word_by_word(TRAIN, ["book the a house", "the zebra.", ""]) == ["Buch das ein Haus", "das zebra.", ""]


def test_blank_training_lines_do_no_harm() -> None:
    train = Pairs(["", *TRAIN.source, "x"], ["leer", *TRAIN.target, ""])
    assert word_by_word(train, ["the book"]) == ["das Buch"]
    assert nearest_neighbour(train, ["the book"]) == ["das Buch"]


def test_the_nearest_line_is_copied() -> None:
    assert nearest_neighbour(TRAIN, ["the red book", "a house"]) == ["das rote Buch.", "ein Haus"]
    assert nearest_neighbour(TRAIN, ["book house the"])[0] in {"das Haus", "das Buch"}
