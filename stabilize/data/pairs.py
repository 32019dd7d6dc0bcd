"""Sentence pairs of one split, as text and as ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from stabilize.data.batch import Batch
from stabilize.data.sentences import Sentences
from stabilize.tokens import BEGIN


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

    def __len__(self) -> int:
        return len(self.source)

    def first(self, count: int | None) -> Pairs:
        """The first `count` pairs; all of them for none."""
        return Pairs(self.source[:count], self.target[:count], tuple(lines[:count] for lines in self.more))

    def references(self, line: int) -> tuple[str, ...]:
        """All translations of a line, `target` first."""
        return (self.target[line], *(lines[line] for lines in self.more))


class TokenizedPairs(Dataset[Batch]):
    """The pairs of a split as ids; indexing with row numbers gives their batch.

    Args:
        source: ids of every source line of the split.
        target: ids of every target line of the split.
        lines: the line numbers that are kept; row r is line `lines[r]`.
        text: the raw lines, where batches shall carry them (evaluation).
    """

    def __init__(self, source: Sentences, target: Sentences, lines: NDArray[np.int64], text: Pairs | None) -> None:
        self._source = source
        self._target = target
        self._lines = lines
        self._text = text

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, rows: NDArray[np.int64]) -> Batch:
        lines = self._lines[rows]
        return Batch(
            source=self._source.padded(lines),
            target=F.pad(self._target.padded(lines), (1, 0), value=BEGIN),
            index=torch.from_numpy(lines),
            source_text=tuple(self._text.source[line] for line in lines) if self._text else (),
            references=tuple(map(self._text.references, lines)) if self._text else (),
        )

    def tokens(self, lines: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Ids of the source and of the target of some lines, each `[lines, longest]` with its end tokens."""
        return self._source.padded(lines), self._target.padded(lines)

    @property
    def source_lengths(self) -> NDArray[np.int64]:
        """Tokens of each row's source with the end token, [rows]."""
        return self._source.lengths[self._lines]

    @property
    def target_lengths(self) -> NDArray[np.int64]:
        """Tokens of each row's target with the end token, [rows]."""
        return self._target.lengths[self._lines]

    @property
    def target_entropy(self) -> float:
        """Entropy of single target tokens, see `Sentences.entropy`; over all lines, those left out included."""
        return self._target.entropy()
