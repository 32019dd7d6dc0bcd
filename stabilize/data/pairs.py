"""Sentence pairs of one split, as text and as ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from stabilize.data.batch import Batch, collate
from stabilize.data.tokenizer import END, Tokenizer


@dataclass(frozen=True)
class Pairs:
    """Raw lines: `target[k]` is the translation of `source[k]`."""

    source: list[str]
    target: list[str]

    def __len__(self) -> int:
        return len(self.source)

    def first(self, count: int | None) -> Pairs:
        """The first `count` pairs; all of them for none."""
        return Pairs(self.source[:count], self.target[:count])


class Sentences:
    """Many sequences of ids in one flat array, each ending with the end token.

    Two arrays instead of a list of lists: worker processes then share the memory, since nothing in it is
    reference-counted.

    Args:
        lines: the texts to tokenise.
        tokenizer: what tokenises them.
    """

    def __init__(self, lines: Iterable[str], tokenizer: Tokenizer) -> None:
        ids, ends = array("i"), array("q")
        for line in lines:
            ids.extend(tokenizer.encode(line))
            ids.append(END)
            ends.append(len(ids))
        self.ids: NDArray[np.int32] = np.array(ids, dtype=np.int32)
        self.starts: NDArray[np.int64] = np.concatenate([[0], np.array(ends, dtype=np.int64)])[:-1]
        self.lengths: NDArray[np.int64] = np.diff(self.starts, append=len(self.ids))

    def __len__(self) -> int:
        return len(self.starts)


class TokenizedPairs(Dataset[Batch]):
    """The pairs of a split as ids; indexing with row numbers gives their batch.

    Args:
        source: ids of every source line of the split.
        target: ids of every target line of the split.
        lines: the line numbers that are kept; row r is line `lines[r]`.
        text: the raw lines, where batches shall carry them (evaluation).
    """

    def __init__(self, source: Sentences, target: Sentences, lines: NDArray[np.int64], text: Pairs | None) -> None:
        self.source = source
        self.target = target
        self.lines = lines
        self.text = text

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, rows: NDArray[np.int64]) -> Batch:
        return collate(self.source, self.target, self.lines[rows], self.text)

    @property
    def source_lengths(self) -> NDArray[np.int64]:
        """Tokens of each row's source with the end token, [rows]."""
        return self.source.lengths[self.lines]

    @property
    def target_lengths(self) -> NDArray[np.int64]:
        """Tokens of each row's target with the end token, [rows]."""
        return self.target.lengths[self.lines]
