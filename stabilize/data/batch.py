"""What a step of the model is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stabilize.data.tokenizer import BEGIN, PAD

if TYPE_CHECKING:
    from stabilize.data.pairs import Pairs, Sentences


class Batch(NamedTuple):
    """Sentence pairs as padded ids.

    Attributes:
        source: tokens and the end token, [batch, source length], int64.
        target: the begin token, tokens and the end token, [batch, target length + 1], int64.
        index: line number of each pair in its split, counted from 0, [batch], int64.
        source_text: raw source lines in evaluation, empty in training.
        target_text: raw target lines in evaluation, empty in training.
    """

    source: Tensor
    target: Tensor
    index: Tensor
    source_text: tuple[str, ...] = ()
    target_text: tuple[str, ...] = ()


def collate(source: Sentences, target: Sentences, lines: NDArray[np.int64], text: Pairs | None) -> Batch:
    """The batch of some lines of a split, with their text where there is one."""
    target_ids = pad(target, lines)
    begin = target_ids.new_full((len(lines), 1), BEGIN)
    return Batch(
        source=pad(source, lines),
        target=torch.cat([begin, target_ids], dim=1),
        index=torch.from_numpy(lines),
        source_text=tuple(text.source[line] for line in lines) if text else (),
        target_text=tuple(text.target[line] for line in lines) if text else (),
    )


def pad(sentences: Sentences, lines: NDArray[np.int64]) -> Tensor:
    """Some sentences side by side, filled up with the pad token, [lines, longest], int64."""
    lengths = sentences.lengths[lines, None]
    places = np.arange(lengths.max())
    # A place past the end of the flat array is padding anyway.
    ids = sentences.ids.take(sentences.starts[lines, None] + places, mode="clip")
    return torch.from_numpy(np.where(places < lengths, ids, PAD).astype(np.int64))
