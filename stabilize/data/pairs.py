"""Sentence pairs of one split, as text and as ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from torch.utils.data import Dataset

from stabilize.data.batch import Batch
from stabilize.data.flat import Sentences, Shared
from stabilize.data.noise import Noise
from stabilize.tokens import BEGIN, PAD

Row = Sequence[str]
"""A line, its translation, and perhaps further references."""


@dataclass(frozen=True)
class Pairs:
    """Raw lines: `target[k]` is the translation of `source[k]`.

    Args:
        source: what is translated.
        target: its translation, which is learnt, and the first reference in evaluation.
        more: further references of an evaluation text, a list of all its lines each.
    """

    source: list[str]
    target: list[str]
    more: tuple[list[str], ...] = ()

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Self:
        """Some rows, all of the same length."""
        source, target, *more = [*map(list, zip(*rows, strict=True))] or [[], []]
        return cls(source, target, tuple(more))

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Row]:
        return zip(*self.sides, strict=True)

    @property
    def sides(self) -> tuple[list[str], ...]:
        """All sources, and all lines of each reference."""
        return (self.source, self.target, *self.more)

    def first(self, count: int | None) -> Pairs:
        """The first `count` pairs; all of them for none."""
        return Pairs(self.source[:count], self.target[:count], tuple(lines[:count] for lines in self.more))

    def references(self, line: int) -> tuple[str, ...]:
        """All translations of a line, `target` first."""
        return (self.target[line], *(lines[line] for lines in self.more))


class TokenizedPairs(Shared, Dataset[Batch]):
    """The pairs of a split as ids; indexing with row numbers gives their batch.

    Args:
        source: ids of each row's source.
        target: ids of each row's target.
        lines: each row's line number in the split, counted from 0, [rows].
        text: the raw lines, where batches shall carry them (evaluation).
        noise: what rows are read through (training).

    Attributes:
        epoch: for which noise is drawn.
    """

    def __init__(
        self,
        source: Sentences,
        target: Sentences,
        lines: NDArray[np.int64],
        *,
        text: Pairs | None = None,
        noise: Noise | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._lines = lines
        self._text = text
        self._noise = noise
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, rows: NDArray[np.int64]) -> Batch:
        lines = np.array(self._lines[rows])
        source, target = self._source.padded(rows), self._target.padded(rows)
        if self._noise is not None:
            source, target = self._noise.drawn(lines, source, target, self.epoch)
        return Batch(
            source=source,
            target=F.pad(target, (1, 0), value=BEGIN),
            index=torch.from_numpy(lines),
            source_text=tuple(self._text.source[line] for line in lines) if self._text else (),
            references=tuple(map(self._text.references, lines)) if self._text else (),
            real=(target != PAD).flatten().nonzero().squeeze(1),
        )

    @property
    def source_lengths(self) -> NDArray[np.int64]:
        """Tokens of each row's source with the end token, [rows]."""
        return self._source.lengths

    @property
    def target_lengths(self) -> NDArray[np.int64]:
        """Tokens of each row's target with the end token, [rows]."""
        return self._target.lengths
