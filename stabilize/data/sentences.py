"""Many tokenised sentences in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stabilize.data.tokenizer import Tokenizer
from stabilize.tokens import END, PAD


class Sentences:
    """The ids of some lines one after the other in a flat array, each line with the end token.

    Two arrays instead of a list of lists: worker processes then share the memory, since nothing in it is
    reference-counted.

    Args:
        lines: the texts to tokenise.
        tokenizer: what tokenises them.

    Attributes:
        lengths: tokens of each line, the end token included, [lines].
    """

    def __init__(self, lines: Iterable[str], tokenizer: Tokenizer) -> None:
        ids, lengths = array("i"), array("q")
        for line in lines:
            tokens = tokenizer.encode(line)
            ids.extend(tokens)
            ids.append(END)
            lengths.append(len(tokens) + 1)
        self._ids: NDArray[np.int32] = np.array(ids, dtype=np.int32)
        self.lengths: NDArray[np.int64] = np.array(lengths, dtype=np.int64)
        self._starts = np.cumsum(self.lengths) - self.lengths

    def padded(self, lines: NDArray[np.int64]) -> Tensor:
        """Some lines side by side, filled up with the pad token, [lines, longest], int64."""
        lengths = self.lengths[lines, None]
        places = np.arange(lengths.max(initial=0))
        # A place past the end of the flat array is padding anyway.
        ids = self._ids.take(self._starts[lines, None] + places, mode="clip")
        return torch.from_numpy(np.where(places < lengths, ids, PAD).astype(np.int64))

    def entropy(self) -> float:
        """Of single tokens, in nats: what a reader pays a token who knows nothing but how frequent each one is."""
        shares = np.bincount(self._ids) / max(len(self._ids), 1)
        shares = shares[shares > 0]
        return float(-(shares * np.log(shares)).sum())
