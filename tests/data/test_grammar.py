"""The synthetic grammar against German that a person wrote down."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from stabilize.data import lexicon
from stabilize.data.grammar import Clause, NounPhrase, Predicate, noun_phrase, perfect, present, sentence, with_modal
from stabilize.data.lexicon import Noun, Verb

Form = Callable[[Verb, bool], Predicate]
NOUNS: dict[str, Noun] = {
    noun.english: noun
    for nouns in (lexicon.PEOPLE, lexicon.ANIMALS, lexicon.THINGS, lexicon.FURNITURE, lexicon.PLACES)
    for noun in nouns
}
VERBS: dict[str, Verb] = {
    " ".join(filter(None, [verb.english, verb.particle])): verb
    for verbs in (lexicon.SEE, lexicon.TAKE, lexicon.HELP, lexicon.GIVE, lexicon.GO, lexicon.SLEEP, lexicon.SAY)
    for verb in verbs
}
ADJECTIVES = {row[0]: row for row in lexicon.PERSON_ADJECTIVES + lexicon.THING_ADJECTIVES}
PHRASES = [
    # English, nominative, accusative, dative
    ("the old man", "der alte Mann", "den alten Mann", "dem alten Mann"),
    ("an old man", "ein alter Mann", "einen alten Mann", "einem alten Mann"),
    ("the young woman", "die junge Frau", "die junge Frau", "der jungen Frau"),
    ("a young woman", "eine junge Frau", "eine junge Frau", "einer jungen Frau"),
    ("a small child", "ein kleines Kind", "ein kleines Kind", "einem kleinen Kind"),
    ("this small child", "dieses kleine Kind", "dieses kleine Kind", "diesem kleinen Kind"),
    ("my dark house", "mein dunkles Haus", "mein dunkles Haus", "meinem dunklen Haus"),
    ("every tired boy", "jeder müde Junge", "jeden müden Jungen", "jedem müden Jungen"),
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
    assert drawn.subject == drawn.object == english
    assert (drawn.nominative, drawn.accusative, drawn.dative) == (nominative, accusative, dative)


def must(verb: Verb, plural: bool) -> Predicate:
    return with_modal(next(row for row in lexicon.MODALS if row[0] == "must"), verb, plural)


@pytest.mark.parametrize(
    ("verb", "form", "english", "second", "inverted", "last"),
    [
        (
            "see",
            present,
            "the man sees the dog",
            "der Mann sieht den Hund",
            "sieht der Mann den Hund",
            "der Mann den Hund sieht",
        ),
        (
            "see",
            perfect,
            "the man has seen the dog",
            "der Mann hat den Hund gesehen",
            "hat der Mann den Hund gesehen",
            "der Mann den Hund gesehen hat",
        ),
        (
            "see",
            must,
            "the man must see the dog",
            "der Mann muss den Hund sehen",
            "muss der Mann den Hund sehen",
            "der Mann den Hund sehen muss",
        ),
        (
            "call up",
            present,
            "the man calls the dog up",
            "der Mann ruft den Hund an",
            "ruft der Mann den Hund an",
            "der Mann den Hund anruft",
        ),
        (
            "call up",
            perfect,
            "the man has called the dog up",
            "der Mann hat den Hund angerufen",
            "hat der Mann den Hund angerufen",
            "der Mann den Hund angerufen hat",
        ),
        (
            "call up",
            must,
            "the man must call the dog up",
            "der Mann muss den Hund anrufen",
            "muss der Mann den Hund anrufen",
            "der Mann den Hund anrufen muss",
        ),
        (
            "follow",
            perfect,
            "the man has followed the dog",
            "der Mann ist dem Hund gefolgt",
            "ist der Mann dem Hund gefolgt",
            "der Mann dem Hund gefolgt ist",
        ),
    ],
)
def test_word_order(verb: str, form: Form, english: str, second: str, inverted: str, last: str) -> None:
    dog = phrase("the dog")
    tail = f"{dog.object} {VERBS[verb].particle}".strip()
    clause = Clause(
        phrase("the man"), form(VERBS[verb], False), tail, dog.dative if verb == "follow" else dog.accusative
    )
    assert (clause.english, clause.german, clause.inverted, clause.final) == (english, second, inverted, last)


def test_plural_verbs() -> None:
    forms = [form(VERBS["call up"], True) for form in (present, perfect, must)]
    assert [form.english for form in forms] == ["call", "have called", "must call"]
    assert [form.final for form in forms] == ["anrufen", "angerufen haben", "anrufen müssen"]


# Sentences that the generator draws from seed 0, with the translation of a person.
SENTENCES = """
Now she wants to go into the big city.
    Jetzt will sie in die große Stadt gehen.
They can paint a wood chair.
    Sie können einen Holzstuhl malen.
He picks this picture up at night.
    Er hebt nachts dieses Bild auf.
A big neighbour goes to the city.
    Ein großer Nachbar geht zur Stadt.
In the evening the children thank the neighbour.
    Am Abend danken die Kinder dem Nachbarn.
This bird has given the woman the hat.
    Dieser Vogel hat der Frau den Hut gegeben.
The bird shows us this book now.
    Der Vogel zeigt uns jetzt dieses Buch.
Today the tired dog has got up in a kitchen.
    Heute ist der müde Hund in einer Küche aufgestanden.
My bird has said that a horse must run through a forest.
    Mein Vogel hat gesagt, dass ein Pferd durch einen Wald laufen muss.
Every young neighbour has got up behind a park before he has followed a boy.
    Jeder junge Nachbar ist hinter einem Park aufgestanden, bevor er einem Jungen gefolgt ist.
Although he invites them, the young teachers can go into a red house.
    Obwohl er sie einlädt, können die jungen Lehrer in ein rotes Haus gehen.
This good girl whom every bird looks for has helped the cat.
    Dieses gute Mädchen, das jeder Vogel sucht, hat der Katze geholfen.
He has seen my good dogs that find my wood table with the aunt.
    Er hat meine guten Hunde, die meinen Holztisch mit der Tante finden, gesehen.
A man visits this boy and we go out of the forest.
    Ein Mann besucht diesen Jungen und wir gehen aus dem Wald.
"""


def drawn(count: int) -> list[tuple[str, str]]:
    random = Random(0)
    return [sentence(random) for _ in range(count)]


def test_whole_sentences() -> None:
    lines = [line.strip() for line in SENTENCES.strip().splitlines()]
    expected = dict(zip(lines[::2], lines[1::2], strict=True))
    pairs = dict(drawn(100))
    assert {english: pairs.get(english) for english in expected} == expected


def test_english_determines_german(monkeypatch: pytest.MonkeyPatch) -> None:
    # Few words, so that the same English is drawn often, from whatever pieces.
    for name in (name for name in vars(lexicon) if name.isupper()):
        monkeypatch.setattr(lexicon, name, getattr(lexicon, name)[:1])
    translations: dict[str, str] = {}
    pairs = drawn(20_000)
    for english, german in pairs:
        assert translations.setdefault(english, german) == german
    assert len(translations) < 0.9 * len(pairs)


def test_most_sentences_are_new() -> None:
    assert len({english for english, _ in drawn(20_000)}) > 19_000
