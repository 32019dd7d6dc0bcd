"""What a step of the model is given."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Sentence pairs as ids, filled up with the pad token.

    Attributes:
        source: tokens and the end token, [batch, source length], int64.
        target: the begin token, tokens and the end token, [batch, target length + 1], int64.
        index: line number of each pair in its split, counted from 0, [batch], int64.
        source_text: raw source lines in evaluation, empty in training.
        references: raw references of each row in evaluation, the first the one that `target` is; empty in training.
        real: places of tokens and end tokens in `target[:, 1:].flatten()`, [tokens], int64; none: they are looked for
            where they are needed, for which the host waits for a device.
    """

    source: Tensor
    target: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody misses
    source_text: tuple[str, ...] = ()
    references: tuple[tuple[str, ...], ...] = ()
    real: Tensor | None = None

    def first(self, rows: int) -> Batch:
        """The first pairs by themselves."""
        tensors = self.source[:rows], self.target[:rows], self.index[:rows]
        real = None if self.real is None else self.real[self.real < rows * (self.target.size(1) - 1)]
        return Batch(*tensors, self.source_text[:rows], self.references[:rows], real)
