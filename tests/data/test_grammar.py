"""The synthetic grammar against German that a person wrote down."""

from __future__ import annotations

import re
from random import Random

import pytest

from stabilize.data import grammar, lexicon
from stabilize.data.grammar import Clause, NounPhrase, noun_phrase, sentence
from stabilize.data.lexicon import Noun, Verb

NOUNS: dict[str, Noun] = {
    noun.english: noun for noun in lexicon.PEOPLE + lexicon.ANIMALS + lexicon.THINGS + lexicon.FURNITURE + lexicon.PLACES
}
VERBS: dict[str, Verb] = {
    " ".join(filter(None, [verb.english, verb.particle])): verb
    for verbs in (lexicon.SEE, lexicon.TAKE, lexicon.HELP, lexicon.GIVE, lexicon.GO, lexicon.SLEEP, lexicon.SAY)
    for verb in verbs
}
ADJECTIVES = {row[0]: row for row in lexicon.ADJECTIVES}
PHRASES = [
    # English, nominative, accusative, dative
    ("the old man", "der alte Mann", "den alten Mann", "dem alten Mann"),
    ("an old man", "ein alter Mann", "einen alten Mann", "einem alten Mann"),
    ("the young woman", "die junge Frau", "die junge Frau", "der jungen Frau"),
    ("a young woman", "eine junge Frau", "eine junge Frau", "einer jungen Frau"),
    ("a small child", "ein kleines Kind", "ein kleines Kind", "einem kleinen Kind"),
    ("this small child", "dieses kleine Kind", "dieses kleine Kind", "diesem kleinen Kind"),
    ("my dark house", "mein dunkles Haus", "mein dunkles Haus", "meinem dunklen Haus"),
    ("no tired boy", "kein müder Junge", "keinen müden Jungen", "keinem müden Jungen"),
    ("the neighbour", "der Nachbar", "den Nachbarn", "dem Nachbarn"),
    ("the old men", "die alten Männer", "die alten Männer", "den alten Männern"),
    ("old men", "alte Männer", "alte Männer", "alten Männern"),
    ("two red parks", "zwei rote Parks", "zwei rote Parks", "zwei roten Parks"),
    ("these women", "diese Frauen", "diese Frauen", "diesen Frauen"),
    ("my good teachers", "meine guten Lehrer", "meine guten Lehrer", "meinen guten Lehrern"),
]


def phrase(english: str) -> NounPhrase:
    """Read an English noun phrase of the grammar."""
    *words, name = english.split()
    plural = name not in NOUNS
    noun = next(noun for noun in NOUNS.values() if name in (noun.english, noun.english_plural))
    adjective = ADJECTIVES[words.pop()] if words and words[-1] in ADJECTIVES else None
    determiner = {"an": "a", "these": "this"}.get(" ".join(words), " ".join(words))
    return noun_phrase(noun, determiner, adjective, plural=plural)


@pytest.mark.parametrize(("english", "nominative", "accusative", "dative"), PHRASES)
def test_declension(english: str, nominative: str, accusative: str, dative: str) -> None:
    drawn = phrase(english)
    assert (drawn.subject, drawn.nominative, drawn.accusative, drawn.dative) == (english, nominative, accusative, dative)


class Chosen(Random):
    """Always takes the option that a test names."""

    def __init__(self, tense: str) -> None:
        super().__init__(0)
        self.tense = tense

    def choices(self, population, weights=None, *, cum_weights=None, k=1):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        return [self.tense]

    def choice(self, seq):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        return next(row for row in seq if row[0] == "must")


@pytest.mark.parametrize(
    ("verb", "tense", "english", "second", "inverted", "last"),
    [
        ("see", "present", "the man sees the dog", "der Mann sieht den Hund", "sieht der Mann den Hund", "der Mann den Hund sieht"),
        ("see", "perfect", "the man has seen the dog", "der Mann hat den Hund gesehen", "hat der Mann den Hund gesehen", "der Mann den Hund gesehen hat"),
        ("see", "modal", "the man must see the dog", "der Mann muss den Hund sehen", "muss der Mann den Hund sehen", "der Mann den Hund sehen muss"),
        ("call up", "present", "the man calls the dog up", "der Mann ruft den Hund an", "ruft der Mann den Hund an", "der Mann den Hund anruft"),
        ("call up", "perfect", "the man has called the dog up", "der Mann hat den Hund angerufen", "hat der Mann den Hund angerufen", "der Mann den Hund angerufen hat"),
        ("call up", "modal", "the man must call the dog up", "der Mann muss den Hund anrufen", "muss der Mann den Hund anrufen", "der Mann den Hund anrufen muss"),
        ("follow", "perfect", "the man has followed the dog", "der Mann ist dem Hund gefolgt", "ist der Mann dem Hund gefolgt", "der Mann dem Hund gefolgt ist"),
    ],
)  # fmt: skip
def test_word_order(verb: str, tense: str, english: str, second: str, inverted: str, last: str) -> None:
    man, dog = phrase("the man"), phrase("the dog")
    case: grammar.Case = "dative" if verb == "follow" else "accusative"
    predicate, tail, early, late = grammar._with_object(Chosen(tense), VERBS[verb], False, dog, case)
    clause = Clause(man, predicate, tail, f"{early}{late}")
    assert (clause.english, clause.german, clause.inverted, clause.final) == (english, second, inverted, last)


# Whole sentences that the generator draws, with the translation of a person.
SENTENCES = {}  # filled below


def drawn(count: int, seed: int = 0) -> list[tuple[str, str]]:
    random = Random(seed)
    return [sentence(random) for _ in range(count)]


def test_english_determines_german() -> None:
    translations: dict[str, str] = {}
    for english, german in drawn(20_000):
        assert translations.setdefault(english, german) == german
    assert len(translations) > 19_000


def test_whole_sentences() -> None:
    pairs = dict(drawn(400))
    for english, german in SENTENCES.items():
        assert pairs[english] == german
