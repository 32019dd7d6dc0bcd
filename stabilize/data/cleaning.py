"""Dirt in text: the rules, what each does, and the account of what they met.

Repairs change a line and lose nothing that can be seen. A training pair that is not UTF-8, blank or too long is
dropped; pairs of the rules in `OPTIONAL` are counted, and dropped where `data.drop` names the rule. In evaluation
nothing is dropped ever: repairs are for the model's eyes, references stay as they are (`as_written`). Only those that
were held out of training text are unescaped where that is, for the model writes no entities then.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

Droppable = Literal["copied", "duplicate", "in_test", "length_ratio"]
OPTIONAL: Final = get_args(Droppable)
"""Rules whose pairs are dropped only where `data.drop` names them."""

RULES: Final = {
    "byte_order_mark": "a byte-order mark before the line",
    "windows_line_end": "a carriage return before the newline",
    "carriage_return": "a carriage return inside the line; a space takes its place",
    "line_separator": "U+2028 or U+2029 inside the line; a space takes its place",
    "control_character": "NUL or another control character but the tab; a space takes its place",
    "escaped_entity": "an entity that Moses writes, as &apos;",
    "invalid_utf8": "bytes that are not UTF-8",
    "blank": "nothing to be seen on a side: white space of any script, invisible characters",
    "copied": "the target is the source, white space aside, as in the two rules below",
    "duplicate": "the pair has come before",
    "in_test": "source or target is a line of the test text",
    "too_long": "more tokens than maximum_length on a side",
    "length_ratio": "one side has more than maximum_ratio times the tokens of the other",
    "cut": "more tokens than evaluation_maximum_length on a side, of which the first are read; in evaluation alone",
}
"""What each rule looks for, in the order of the account. A pair that is dropped counts under one reason, the first."""

BIT: Final = {rule: 1 << number for number, rule in enumerate(RULES)}
REPAIRS: Final = ("byte_order_mark", "windows_line_end", "carriage_return", "line_separator", "control_character")
DROPPING: Final = ("invalid_utf8", "blank", "too_long")
"""Rules whose training pairs are dropped always."""

_REPLACED: Final = tuple(
    (BIT[rule], re.compile(pattern), replacement)
    for rule, pattern, replacement in (
        ("byte_order_mark", "^\ufeff+", ""),
        ("windows_line_end", "\r$", ""),
        ("carriage_return", "\r", " "),
        ("line_separator", "[\u2028\u2029]", " "),
        ("control_character", "[\0-\x08\n-\x1f\x7f-\x9f]", " "),
        ("invalid_utf8", "[\ud800-\udfff]", "\ufffd"),
    )
)
_ENTITIES: Final = {
    **{"&apos;": "'", "&quot;": '"', "&lt;": "<", "&gt;": ">", "&#124;": "|", "&#91;": "[", "&#93;": "]"},
    **{"&bar;": "|", "&bra;": "[", "&ket;": "]", "&amp;": "&"},
}
_ENTITY: Final = re.compile("|".join(map(re.escape, _ENTITIES)))
_SUSPECT: Final = re.compile(f"[\0-\x08\n-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]|{_ENTITY.pattern}")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_INVISIBLE: Final = frozenset(("Zs", "Zl", "Zp", "Cc", "Cf"))
_FILLERS: Final = "\u115f\u1160\u2800\u3164\uffa0"
"""Hangul fillers and the Braille pattern without dots, which Unicode counts as letters and symbols."""


def clean(line: str, *, unescape: bool) -> tuple[str, int]:
    """A line as the model reads it, and the bits of the rules that it met.

    Args:
        unescape: write Moses' entities as the characters they stand for; false only notes them.
    """
    if not _SUSPECT.search(line):
        return line, 0
    met = 0
    for bit, pattern, replacement in _REPLACED:
        line, count = pattern.subn(replacement, line)
        met |= bit if count else 0
    if _ENTITY.search(line):
        met |= BIT["escaped_entity"]
        line = unescaped(line) if unescape else line
    return line, met


def unescaped(line: str) -> str:
    """Moses' entities as the characters they stand for, each read once."""
    return _ENTITY.sub(lambda found: _ENTITIES[found[0]], line)


def as_written(line: str) -> str:
    """A line of evaluation text as it is shown and scored: without the marks of files, and on one line."""
    return _SURROGATE.sub("\ufffd", line.removeprefix("\ufeff").removesuffix("\r").replace("\n", " "))


def is_blank(line: str) -> bool:
    """Whether there is nothing to be seen on a line."""
    return all(character in _FILLERS or unicodedata.category(character) in _INVISIBLE for character in line)


def _words(text: str) -> str:
    """What of a text is compared: one space for all white space, of which the tokenizer leaves no more either."""
    return " ".join(text.split())


class Met(NamedTuple):
    """What a rule met in a split."""

    pairs: int
    first_line: int
    """Number of the first of them, counted from 1."""
    done: str
    """Repaired, dropped, kept or cut."""


class Policy(NamedTuple):
    """What becomes of a pair that met a rule."""

    unescape: bool = False
    """Write Moses' entities as the characters they stand for."""
    drop: Collection[str] = ()
    """The optional rules that drop."""
    maximum_length: int = 256
    """Tokens of a side, the end token included."""
    maximum_ratio: float = 3.0
    """Of the tokens of the longer side to those of the shorter, the end tokens included."""
    evaluation: bool = False
    """No rule drops."""

    def done(self, rule: str) -> str:
        """Repaired, dropped, kept or cut."""
        if rule in REPAIRS or (rule == "escaped_entity" and self.unescape):
            return "repaired"
        if self.evaluation:
            return {"invalid_utf8": "repaired", "cut": "cut"}.get(rule, "kept")
        return "dropped" if rule in DROPPING or rule in self.drop else "kept"

    def note(self, met: dict[str, Met], rule: str, lines: NDArray[np.int64]) -> None:
        """Write the pairs with these line numbers, counted from 0 and rising, into an account."""
        if len(lines):
            before = met.get(rule, Met(0, int(lines[0]) + 1, self.done(rule)))
            met[rule] = before._replace(pairs=before.pairs + len(lines))

    def by_length(self, met: dict[str, Met], lines: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Apply the rules that count tokens; which pairs stay.

        Args:
            met: the account.
            lines: numbers of the pairs, counted from 0.
            lengths: tokens of their sides, [2, pairs].
        """
        longest, shortest = lengths.max(0), lengths.min(0)
        stays = np.ones(len(lines), bool)
        for rule, found in (
            ("too_long", longest > self.maximum_length),
            ("length_ratio", longest > self.maximum_ratio * shortest),
        ):
            self.note(met, rule, lines[found & stays])
            if self.done(rule) == "dropped":
                stays &= ~found
        return stays


class Marks:
    """The rules that the pairs of a text met, pair by pair."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._bits, self._hashes = array("H"), array("q")  # 26 bytes a pair

    def add(self, rows: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
        """Take in some pairs; their sources and targets as the model reads them."""
        sources, targets = [], []
        for raw_source, raw_target, *references in rows:
            source, met = clean(raw_source, unescape=self.policy.unescape)
            target, met_too = clean(raw_target, unescape=self.policy.unescape)
            met |= met_too
            blank = is_blank(source) or is_blank(target)
            if blank:
                met |= BIT["blank"]
            if self.policy.evaluation:  # further references are scored, and not learnt
                for line in references:
                    met |= clean(line, unescape=False)[1] | (BIT["blank"] if is_blank(line) else 0)
            words = _words(source), _words(target)
            if words[0] == words[1] and not blank:
                met |= BIT["copied"]
            sources.append(source)
            targets.append(target)
            self._bits.append(met)
            # Python's own, of 64 bits and never kept: that among ten million pairs two that differ have the same one
            # has a probability of one in 400,000.
            self._hashes.extend((hash(words[0]), hash(words[1]), hash(words)))
        return sources, targets

    def account(self, test: Sequence[Iterable[str]] = ()) -> tuple[NDArray[np.int64], dict[str, Met]]:
        """Numbers of the pairs that stay, counted from 0, and what each rule met.

        Args:
            test: the test text: all its sources, and all its lines of each reference.
        """
        bits, hashes = np.array(self._bits, np.uint16), np.asarray(self._hashes, np.int64).reshape(-1, 3)
        for column, sides in enumerate((test[:1], test[1:])):
            known = [hash(_words(clean(line, unescape=self.policy.unescape)[0])) for side in sides for line in side]
            bits[np.isin(hashes[:, column], np.array(known, np.int64))] |= BIT["in_test"]
        kept = np.ones(len(bits), bool)
        met: dict[str, Met] = {}
        for rule in RULES:
            if rule == "duplicate":
                left = np.flatnonzero(kept)
                first = np.unique(hashes[left, 2], return_index=True)[1]
                bits[np.delete(left, first)] |= BIT[rule]
            done = self.policy.done(rule)
            # A pair that is dropped counts under one reason; what was repaired was there before.
            found = (bits & BIT[rule] > 0) & (kept | (done == "repaired"))
            self.policy.note(met, rule, np.flatnonzero(found))
            if done == "dropped":
                kept &= ~found
        return np.flatnonzero(kept), met
