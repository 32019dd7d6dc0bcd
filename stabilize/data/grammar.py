"""English sentences and their German translations from one small grammar.

Each function draws a piece of a sentence in both languages at once. The English side determines the German one:
pieces that could be attached in two places, with different German, are never drawn together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from stabilize.data import lexicon
from stabilize.data.lexicon import Noun, Verb

Case = Literal["nominative", "accusative", "dative"]
Kind = Literal["definite", "ein", "plural"]
Cell = dict[str, str]

# Columns: masculine, feminine, neuter, plural.
ARTICLE: Final[dict[Case, Cell]] = {
    "nominative": {"m": "der", "f": "die", "n": "das", "p": "die"},
    "accusative": {"m": "den", "f": "die", "n": "das", "p": "die"},
    "dative": {"m": "dem", "f": "der", "n": "dem", "p": "den"},
}
DIES_ENDING: Final[Cell] = {"der": "er", "die": "e", "das": "es", "den": "en", "dem": "em"}
EIN_ENDING: Final[dict[Case, Cell]] = {
    "nominative": {"m": "", "f": "e", "n": "", "p": "e"},
    "accusative": {"m": "en", "f": "e", "n": "", "p": "e"},
    "dative": {"m": "em", "f": "er", "n": "em", "p": "en"},
}
ADJECTIVE_ENDING: Final[dict[Kind, dict[Case, Cell]]] = {
    "definite": {
        "nominative": {"m": "e", "f": "e", "n": "e", "p": "en"},
        "accusative": {"m": "en", "f": "e", "n": "e", "p": "en"},
        "dative": {"m": "en", "f": "en", "n": "en", "p": "en"},
    },
    "ein": {
        "nominative": {"m": "er", "f": "e", "n": "es", "p": "en"},
        "accusative": {"m": "en", "f": "e", "n": "es", "p": "en"},
        "dative": {"m": "en", "f": "en", "n": "en", "p": "en"},
    },
    "plural": {"nominative": {"p": "e"}, "accusative": {"p": "e"}, "dative": {"p": "en"}},
}
CONTRACTIONS: Final = {"in dem": "im", "in das": "ins", "zu dem": "zum", "zu der": "zur"}
AUXILIARY: Final = {"haben": ("hat", "haben"), "sein": ("ist", "sind")}


@dataclass(frozen=True)
class NounPhrase:
    """English as subject and as object, and the German cases."""

    subject: str
    object: str
    nominative: str
    accusative: str
    dative: str
    plural: bool
    pronoun: bool = False

    def german(self, case: Case) -> str:
        """The phrase in a case."""
        return {"nominative": self.nominative, "accusative": self.accusative, "dative": self.dative}[case]


@dataclass(frozen=True)
class Predicate:
    """The verbal parts: English before the objects; German finite verb, what closes the clause, and both at its end.

    `sieht`, ``, `sieht`; `ruft`, `an`, `anruft`; `hat`, `gesehen`, `gesehen hat`; `muss`, `anrufen`, `anrufen muss`.
    """

    english: str
    finite: str
    close: str
    final: str


@dataclass(frozen=True)
class Clause:
    """Both languages of a clause before the German word order is chosen; empty parts are left out.

    Attributes:
        subject: the subject, nominative in German.
        predicate: the verb.
        tail: English after the verb.
        middle: German between subject and closing verb, in order.
    """

    subject: NounPhrase
    predicate: Predicate
    tail: str
    middle: str

    @property
    def english(self) -> str:
        """The English clause, the same wherever it stands."""
        return _join(self.subject.subject, self.predicate.english, self.tail)

    @property
    def german(self) -> str:
        """Verb second: `der Mann hat den Hund gesehen`."""
        return _join(self.subject.nominative, self.predicate.finite, self.middle, self.predicate.close)

    @property
    def inverted(self) -> str:
        """After something in front: `[heute] hat der Mann den Hund gesehen`."""
        return _join(self.predicate.finite, self.subject.nominative, self.middle, self.predicate.close)

    @property
    def final(self) -> str:
        """Verb last: `[weil] der Mann den Hund gesehen hat`."""
        return _join(self.subject.nominative, self.middle, self.predicate.final)


def sentence(random: Random) -> tuple[str, str]:
    """Draw an English sentence and its German translation."""
    english, german = random.choices(
        [_plain, _fronted, _with_relative, _with_that, _with_conjunction, _after_conjunction, _coordinated],
        weights=[42, 28, 8, 12, 4, 4, 2],
    )[0](random)
    return _finish(english), _finish(german)


def _plain(random: Random) -> tuple[str, str]:
    clause = _clause(random)
    return clause.english, clause.german


def _fronted(random: Random) -> tuple[str, str]:
    english, german = random.choice(lexicon.TIMES)
    clause = _clause(random, timed=False)
    return f"{english} {clause.english}", f"{german} {clause.inverted}"


def _with_relative(random: Random) -> tuple[str, str]:
    # Anywhere but at the end of the English sentence or before its verb, a relative clause has no clear end.
    noun = random.choice(lexicon.PEOPLE + lexicon.ANIMALS)
    if random.random() < 0.5:
        clause = _clause(random, subject=_relative(random, noun))
    else:
        verb = random.choice([verb for verb in lexicon.SEE if not verb.particle])
        person = _relative(random, noun)
        subject = _subject(random)
        clause = Clause(subject, _predicate(random, verb, subject.plural), person.object, person.accusative)
    return clause.english, clause.german


def _with_that(random: Random) -> tuple[str, str]:
    subject = _subject(random)
    main = Clause(subject, _predicate(random, random.choice(lexicon.SAY), subject.plural), "", "")
    clause = _clause(random)
    return f"{main.english} that {clause.english}", f"{main.german}, dass {clause.final}"


def _with_conjunction(random: Random) -> tuple[str, str]:
    english, german = random.choice(lexicon.CONJUNCTIONS)
    main, clause = _clause(random), _clause(random)
    return f"{main.english} {english} {clause.english}", f"{main.german}, {german} {clause.final}"


def _after_conjunction(random: Random) -> tuple[str, str]:
    english, german = random.choice(lexicon.CONJUNCTIONS)
    clause, main = _clause(random), _clause(random)
    return f"{english} {clause.english}, {main.english}", f"{german} {clause.final}, {main.inverted}"


def _coordinated(random: Random) -> tuple[str, str]:
    first, second = _clause(random), _clause(random)
    return f"{first.english} and {second.english}", f"{first.german} und {second.german}"


def _clause(random: Random, *, subject: NounPhrase | None = None, timed: bool = True) -> Clause:
    subject = subject or _subject(random)
    pattern = random.choices(
        [_see, _take, _help, _give, _go, _sleep, _be],
        weights=[20, 24, 8, 12, 12, 14, 10],
    )[0]
    predicate, tail, early, late = pattern(random, subject.plural)
    time, zeit = random.choice(lexicon.TIMES) if timed and random.random() < 0.2 else ("", "")
    return Clause(subject, predicate, _join(tail, time), _join(early, zeit, late))


# What follows the subject, by kind of verb: predicate, English tail, German before and after an adverb of time.
# Pronouns stand before it, other objects and places after it.
Pattern = tuple[Predicate, str, str, str]


def _see(random: Random, plural: bool) -> Pattern:
    return _with_object(random, random.choice(lexicon.SEE), plural, _person(random), "accusative")


def _help(random: Random, plural: bool) -> Pattern:
    return _with_object(random, random.choice(lexicon.HELP), plural, _person(random), "dative")


def _take(random: Random, plural: bool) -> Pattern:
    verb = random.choice(lexicon.TAKE)
    predicate, tail, early, late = _with_object(random, verb, plural, _thing(random), "accusative")
    if random.random() < 0.2:
        english, german = _prepositional(random, random.choice(lexicon.COMPANIES), lexicon.PEOPLE)
        tail, late = _join(tail, english), _join(late, german)
    return predicate, tail, early, late


def _with_object(random: Random, verb: Verb, plural: bool, phrase: NounPhrase, case: Case) -> Pattern:
    german = phrase.german(case)
    early, late = (german, "") if phrase.pronoun else ("", german)
    return _predicate(random, verb, plural), _join(phrase.object, verb.particle), early, late


def _give(random: Random, plural: bool) -> Pattern:
    person, thing = _person(random), _thing(random)
    predicate = _predicate(random, random.choice(lexicon.GIVE), plural)
    tail = _join(person.object, thing.object)
    if person.pronoun:
        return predicate, tail, person.dative, thing.accusative
    return predicate, tail, "", _join(person.dative, thing.accusative)


def _go(random: Random, plural: bool) -> Pattern:
    english, german = _prepositional(random, random.choice(lexicon.DIRECTIONS), lexicon.PLACES)
    return _predicate(random, random.choice(lexicon.GO), plural), english, "", german


def _sleep(random: Random, plural: bool) -> Pattern:
    predicate = _predicate(random, random.choice(lexicon.SLEEP), plural)
    english, german = _prepositional(random, random.choice(lexicon.LOCATIONS), lexicon.PLACES)
    return predicate, english, "", german


def _be(random: Random, plural: bool) -> Pattern:
    english, german, _ = random.choice(lexicon.PERSON_ADJECTIVES)
    finite = "sind" if plural else "ist"
    return Predicate("are" if plural else "is", finite, "", finite), english, "", german


def _predicate(random: Random, verb: Verb, plural: bool) -> Predicate:
    form = random.choices([present, perfect, None], weights=[5, 3, 2])[0]
    return form(verb, plural) if form else with_modal(random.choice(lexicon.MODALS), verb, plural)


def present(verb: Verb, plural: bool) -> Predicate:
    """`calls ... up`: `ruft ... an`, `... anruft`."""
    finite = verb.german if plural else verb.german_third
    return Predicate(verb.english if plural else verb.english_third, finite, verb.prefix, verb.prefix + finite)


def perfect(verb: Verb, plural: bool) -> Predicate:
    """`has called ... up`: `hat ... angerufen`, `... angerufen hat`."""
    participle, finite = verb.prefix + verb.german_participle, AUXILIARY[verb.auxiliary][plural]
    english = f"{'have' if plural else 'has'} {verb.english_participle}"
    return Predicate(english, finite, participle, f"{participle} {finite}")


def with_modal(modal: Sequence[str], verb: Verb, plural: bool) -> Predicate:
    """`must call ... up`: `muss ... anrufen`, `... anrufen muss`; the modal is a row of the lexicon."""
    english_third, english_plural, german_third, german_plural = modal
    infinitive, finite = verb.prefix + verb.german, german_plural if plural else german_third
    english = f"{english_plural if plural else english_third} {verb.english}"
    return Predicate(english, finite, infinitive, f"{infinitive} {finite}")


def _subject(random: Random) -> NounPhrase:
    if random.random() < 0.2:
        return _pronoun(random)
    return _noun_phrase(random, random.choice(lexicon.PEOPLE + lexicon.ANIMALS))


def _person(random: Random) -> NounPhrase:
    if random.random() < 0.2:
        return _pronoun(random)
    return _noun_phrase(random, random.choice(lexicon.PEOPLE + lexicon.ANIMALS))


def _thing(random: Random) -> NounPhrase:
    noun = _compound(random) if random.random() < 0.3 else random.choice(lexicon.THINGS + lexicon.FURNITURE)
    return _noun_phrase(random, noun)


def _pronoun(random: Random) -> NounPhrase:
    subject, object_, nominative, accusative, dative, number = random.choice(lexicon.PRONOUNS)
    return NounPhrase(subject, object_, nominative, accusative, dative, number == "plural", pronoun=True)


def _compound(random: Random) -> Noun:
    english, german = random.choice(lexicon.MODIFIERS)
    head = random.choice(lexicon.FURNITURE)
    return Noun(
        f"{english} {head.english}",
        f"{english} {head.english_plural}",
        german + head.german.lower(),
        german + head.german_plural.lower(),
        head.gender,
    )


def _prepositional(random: Random, preposition: Sequence[str], nouns: Sequence[Noun]) -> tuple[str, str]:
    english, german, case = preposition
    phrase = _noun_phrase(random, random.choice(nouns))
    text = f"{german} {phrase.dative if case == 'dative' else phrase.accusative}"
    for long, short in CONTRACTIONS.items():
        text = re.sub(rf"^{long}\b", short, text)
    return f"{english} {phrase.object}", text


def _noun_phrase(random: Random, noun: Noun) -> NounPhrase:
    plural = random.random() < 0.2
    determiner = random.choice(["the", "the", "my", "this"] + (["", "two"] if plural else ["a", "a", "every"]))
    living = noun in lexicon.PEOPLE or noun in lexicon.ANIMALS
    adjectives = lexicon.PERSON_ADJECTIVES if living else lexicon.THING_ADJECTIVES
    adjective = random.choice(adjectives) if random.random() < 0.25 else None
    return noun_phrase(noun, determiner, adjective, plural=plural)


def noun_phrase(noun: Noun, determiner: str, adjective: Sequence[str] | None, *, plural: bool) -> NounPhrase:
    """Decline determiner, adjective and noun.

    Args:
        noun: the noun.
        determiner: English: the, this, my, a, every (singular), two, or nothing (plural).
        adjective: a row of the lexicon's adjectives.
        plural: number.
    """
    name = noun.english_plural if plural else noun.english
    adjective_english = adjective[0] if adjective else ""
    first = "these" if plural and determiner == "this" else determiner
    if first == "a" and (adjective_english or name)[0] in "aeiou":
        first = "an"
    english = _join(first, adjective_english, name)
    nominative, accusative, dative = (
        _decline(noun, determiner, adjective, "p" if plural else noun.gender, case) for case in ARTICLE
    )
    return NounPhrase(english, english, nominative, accusative, dative, plural)


def _decline(noun: Noun, determiner: str, adjective: Sequence[str] | None, column: str, case: Case) -> str:
    kind: Kind
    match determiner:
        case "the":
            kind, first = "definite", ARTICLE[case][column]
        case "this" | "every":
            kind, first = "definite", {"this": "dies", "every": "jed"}[determiner] + DIES_ENDING[ARTICLE[case][column]]
        case "a" | "my":
            kind, first = "ein", {"a": "ein", "my": "mein"}[determiner] + EIN_ENDING[case][column]
        case _:
            kind, first = "plural", {"two": "zwei", "": ""}[determiner]
    name = noun.german_plural if column == "p" else noun.german
    if column == "p" and case == "dative" and name[-1] not in "ns":
        name += "n"
    elif column != "p" and case != "nominative":
        name += noun.oblique
    return _join(first, adjective[2] + ADJECTIVE_ENDING[kind][case][column] if adjective else "", name)


def _relative(random: Random, noun: Noun) -> NounPhrase:
    """A noun with a relative clause: `the dog that sees him`, `der Hund, der ihn sieht,`."""
    phrase = _noun_phrase(random, noun)
    column = "p" if phrase.plural else noun.gender
    person = noun in lexicon.PEOPLE
    if random.random() < 0.6:
        inner = _clause(random, subject=phrase)
        english = _join("who" if person else "that", inner.predicate.english, inner.tail)
        german = _join(ARTICLE["nominative"][column], inner.middle, inner.predicate.final)
    else:
        subject = _subject(random)
        verb = random.choice(lexicon.SEE)
        predicate = _predicate(random, verb, subject.plural)
        english = _join("whom" if person else "that", subject.subject, predicate.english, verb.particle)
        german = _join(ARTICLE["accusative"][column], subject.nominative, predicate.final)
    return NounPhrase(
        f"{phrase.subject} {english}",
        f"{phrase.object} {english}",
        f"{phrase.nominative}, {german},",
        f"{phrase.accusative}, {german},",
        f"{phrase.dative}, {german},",
        phrase.plural,
    )


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _finish(text: str) -> str:
    """Capital first letter, full stop, no comma before another mark."""
    return re.sub(r",(?=[.,])", "", text[0].upper() + text[1:] + ".")
