"""Noise on training pairs: another reading of each in each epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stabilize.data.flat import Lines
from stabilize.data.tokenizer import Tokenizer
from stabilize.tokens import END, PAD, UNKNOWN


@dataclass(frozen=True)
class Noise:
    """Other pieces for the same text, and source tokens that cannot be read.

    What is drawn is a function of seed, epoch, line and side: whoever prepares a batch, in whatever order, draws the
    same.

    Args:
        source, target: the lines, by number.
        tokenizer: of both.
        sampling: see `Tokenizer.sample`; 0: the usual pieces.
        unread: share of source tokens in whose place the unknown token stands.
        maximum_length: a line whose other pieces are more than this keeps the usual ones.
        seed: of all draws.
    """

    source: Lines
    target: Lines
    tokenizer: Tokenizer
    sampling: float
    unread: float
    maximum_length: int
    seed: int

    def drawn(self, lines: NDArray[np.int64], source: Tensor, target: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Some pairs with the noise of an epoch.

        Args:
            lines: their numbers, [rows].
            source, target: their usual ids, [rows, longest].
        """
        sides = []
        for side, (text, usual) in enumerate(((self.source, source), (self.target, target))):
            rows = []
            for line, ids in zip(lines.tolist(), usual, strict=True):
                ids = ids[ids != PAD]
                seeds = np.random.SeedSequence((self.seed, epoch, line, side))
                if self.sampling:
                    pieces = [*self.tokenizer.sample(text[line], self.sampling, int(seeds.generate_state(1)[0])), END]
                    ids = torch.tensor(pieces) if len(pieces) <= self.maximum_length else ids
                if self.unread and side == 0:
                    hidden = torch.from_numpy(np.random.default_rng(seeds).random(len(ids)) < self.unread)
                    ids = ids.masked_fill(hidden & (ids != END), UNKNOWN)
                rows.append(ids)
            sides.append(pad_sequence(rows, batch_first=True, padding_value=PAD))
        return sides[0], sides[1]
