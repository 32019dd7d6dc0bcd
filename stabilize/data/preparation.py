"""From training text to ids on the disk, in three steps, each done once: clean the lines, learn the pieces, tokenise.

    {key of text and rules}/text/                                  the lines as the model reads them, and which stay
    {key of text and rules}/tokenizer-{key of its settings}.model
    {key of text and rules}/ids-{key of tokenizer and limits}/     the pairs that stay, as ids

Memory stays bounded: lines are held chunk by chunk, and of a pair what is compared, some 30 bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stabilize.data.account import in_words
from stabilize.data.cache import Cache, cleared, key, write
from stabilize.data.cleaning import Marks, Met, Policy
from stabilize.data.flat import FlatWriter, Lines, Sentences, mapped, write_lines
from stabilize.data.pairs import Pairs, Row
from stabilize.data.progress import progress
from stabilize.data.tokenizer import TRAINING_LINES, Subwords, Tokenizer
from stabilize.errors import UserError

FORMAT: Final = 2
"""Another number where the same text and settings give other files than before."""

CHUNK: Final = 20_000
"""Lines that are held at a time; a process that is killed while it tokenises loses no more work than this. With another
number here, FORMAT is another too: what is half done is counted in chunks."""

SIDES: Final = ("source", "target")


@dataclass(frozen=True)
class Recipe:
    """What decides what becomes of a training text.

    Attributes:
        policy: of cleaning.
        held_out: last lines of the text that become the validation text.
        vocabulary, subwords, byte_fallback: of the tokenizer, see `Tokenizer.train`.
    """

    policy: Policy
    held_out: int
    vocabulary: int
    subwords: Subwords
    byte_fallback: bool


@dataclass(frozen=True)
class CleanText:
    """The training lines as the model reads them.

    Attributes:
        source, target: of every pair.
        kept: numbers of the pairs that stay, counted from 0.
        met: what the rules met.
        held_out: the raw lines that were held out.
    """

    source: Lines
    target: Lines
    kept: NDArray[np.int64]
    met: dict[str, Met]
    held_out: Pairs

    def chunks(self, every: int = 1) -> Iterator[tuple[NDArray[np.int64], list[str], list[str]]]:
        """Numbers, sources and targets of the pairs that stay, or of every k-th of them."""
        chosen = self.kept[::every]
        for first in range(0, len(self.source), CHUNK):
            last = min(first + CHUNK, len(self.source))
            here = chosen[slice(*np.searchsorted(chosen, (first, last)))]
            sources, targets = self.source.between(first, last), self.target.between(first, last)
            yield here, [sources[k] for k in here - first], [targets[k] for k in here - first]


@dataclass(frozen=True)
class TrainingIds:
    """The training pairs that stay, as ids.

    Attributes:
        source, target: of each pair.
        lines: their numbers in the text, counted from 0.
        met: what the rules that count tokens met.
        longest: tokens of the longest side.
        entropy: of single target tokens, in nats.
        sha256: of the ids.
    """

    source: Sentences
    target: Sentences
    lines: NDArray[np.int64]
    met: dict[str, Met]
    longest: int
    entropy: float
    sha256: str


class Preparation:
    """A training text, prepared as far as it is asked for.

    Args:
        cache: where everything is kept.
        recipe: what is done.
        identity: what tells this text from others, in JSON's types.
        rows: gives the raw pairs.
        test: the test text, in which training lines are looked for.

    Attributes:
        name: of its folder in the cache.
    """

    def __init__(
        self, cache: Cache, recipe: Recipe, identity: Any, rows: Callable[[], Iterable[Row]], test: Pairs
    ) -> None:
        self._cache = cache
        self._recipe = recipe
        self._rows = rows
        self._test = test.sides
        policy = [recipe.policy.unescape, sorted(recipe.policy.drop)]
        self.name = key([FORMAT, identity, policy, recipe.held_out, self._test])

    # ------------------------------------------------------------------ lines

    def text(self) -> CleanText:
        """The clean lines.

        Raises:
            UserError: the raw ones cannot be had, or are fewer than are to be held out.
        """
        folder = self._cache.made(f"{self.name}/text", self._clean)
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        return CleanText(
            source=Lines.open(folder / "source", "uint8"),
            target=Lines.open(folder / "target", "uint8"),
            kept=mapped(folder / "kept", "int64"),
            met={rule: Met(*met) for rule, met in facts["met"].items()},
            held_out=Pairs.of(facts["held_out"]),
        )

    def _clean(self, folder: Path) -> None:
        marks = Marks(self._recipe.policy)
        cleared(folder)
        held_out: deque[Row] = deque()
        rows = _all_but_last(self._rows(), self._recipe.held_out, held_out)
        count = 0
        with (
            FlatWriter(folder / "source", "uint8") as source,
            FlatWriter(folder / "target", "uint8") as target,
            progress("read and clean", None) as advance,
        ):
            while chunk := list(itertools.islice(rows, CHUNK)):
                for writer, lines in zip((source, target), marks.add(chunk), strict=True):
                    write_lines(writer, lines)
                advance(len(chunk))
                count += len(chunk)
        if not count and held_out:
            raise UserError(
                f"the training text has {len(held_out):,} lines, of which the last {self._recipe.held_out:,} would be"
                " held out for validation: give data.validation, or a smaller data.validation_pairs"
            )
        kept, met = marks.account(self._test)
        if not len(kept):
            raise UserError(f"no training pair is left of {count:,}: {in_words(met)}")
        kept.tofile(folder / "kept")
        write(folder / "facts.json", {"met": met, "held_out": list(held_out)})

    # ------------------------------------------------------------------ pieces

    def tokenizer(self) -> Tokenizer:
        """Learnt from the clean lines, or evenly spaced ones where there are very many.

        Raises:
            UserError: there is nothing to learn from, or too little room for its characters.
        """
        recipe = self._recipe
        settings = (recipe.vocabulary, recipe.subwords, recipe.byte_fallback)
        return Tokenizer.load(self._cache.made(f"{self.name}/tokenizer-{key(settings)}.model", self._learn))

    def _learn(self, path: Path) -> None:
        text = self.text()
        every = -(-2 * len(text.kept) // TRAINING_LINES) or 1
        with progress("learn the tokenizer from", len(text.kept) // every) as advance:

            def lines() -> Iterator[str]:
                for numbers, sources, targets in text.chunks(every):
                    yield from itertools.chain.from_iterable(zip(sources, targets, strict=True))
                    advance(len(numbers))

            tokenizer = Tokenizer.train(
                lines(),
                vocabulary=self._recipe.vocabulary,
                subwords=self._recipe.subwords,
                byte_fallback=self._recipe.byte_fallback,
            )
        tokenizer.save(path)

    # ------------------------------------------------------------------ ids

    def ids(self, tokenizer: Tokenizer) -> TrainingIds:
        """The ids of the pairs that stay.

        Raises:
            UserError: none stays.
        """
        policy = self._recipe.policy
        limits = (tokenizer.hash, policy.maximum_length, policy.maximum_ratio)

        def make(folder: Path) -> None:
            self._tokenise(folder, tokenizer)

        folder = self._cache.made(f"{self.name}/ids-{key(limits)}", make)
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        return TrainingIds(
            source=Sentences.open(folder / "source", tokenizer.dtype),
            target=Sentences.open(folder / "target", tokenizer.dtype),
            lines=mapped(folder / "lines", "int64"),
            met={rule: Met(*met) for rule, met in facts["met"].items()},
            longest=facts["longest"],
            entropy=facts["entropy"],
            sha256=facts["sha256"],
        )

    def _tokenise(self, folder: Path, tokenizer: Tokenizer) -> None:
        text = self.text()
        folder.mkdir(exist_ok=True)
        # What a killed process had done; what it wrote after its last word is cut off.
        last_word = folder / "state.json"
        state: dict[str, Any] = {"chunks": 0, "pairs": 0, "ids": [0, 0], "met": {}, "longest": 0}
        state |= json.loads(last_word.read_text(encoding="utf-8")) if last_word.exists() else {}
        met = {rule: Met(*one) for rule, one in state["met"].items()}
        written = zip(SIDES, state["ids"], strict=True)
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(FlatWriter(folder / side, tokenizer.dtype, state["pairs"], ids))
                for side, ids in written
            ]
            lines_file = stack.enter_context(open(folder / "lines", "ab"))
            advance = stack.enter_context(progress("tokenise", len(text.kept)))
            lines_file.truncate(state["pairs"] * 8)
            for number, (lines, *sides) in enumerate(text.chunks(), start=1):
                advance(len(lines))
                if number <= state["chunks"]:
                    continue
                encoded = [tokenizer.encode_all(texts, threads()) for texts in sides]
                lengths = np.stack([side_lengths for _, side_lengths in encoded])
                stays = self._recipe.policy.by_length(met, lines, lengths)
                for writer, (ids, side_lengths) in zip(writers, encoded, strict=True):
                    writer.add(ids[np.repeat(stays, side_lengths)], side_lengths[stays])
                    writer.flush()
                lines[stays].tofile(lines_file)
                lines_file.flush()
                state = {
                    "chunks": number,
                    "pairs": writers[0].sequences,
                    "ids": [writer.count for writer in writers],
                    "met": met,
                    "longest": max(state["longest"], int(lengths[:, stays].max(initial=0))),
                }
                write(last_word, state)
            os.fsync(lines_file.fileno())
        last_word.unlink(missing_ok=True)
        facts = {
            "met": met,
            "longest": state["longest"],
            "entropy": Sentences.open(folder / "target", tokenizer.dtype).entropy(),
            "sha256": _hash(folder / name for name in ("source.values", "source.ends", "target.values", "target.ends")),
        }
        if not state["pairs"]:
            raise UserError(f"no training pair is left of {len(text.source):,}: {in_words(text.met | met)}")
        write(folder / "facts.json", facts)


def threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _hash(files: Iterable[Path]) -> str:
    together = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            together.update(hashlib.file_digest(file, "sha256").digest())
    return together.hexdigest()


def _all_but_last(rows: Iterable[Row], count: int, last: deque[Row]) -> Iterator[Row]:
    """Rows as they come, without the last ones, which are left in `last`."""
    for row in rows:
        last.append(row)
        if len(last) > count:
            yield last.popleft()
