"""From token ids to the stream, and back to logits."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize import kernels
from stabilize.errors import UserError
from stabilize.strategies import Site, Stabilizer

Positions: TypeAlias = Literal["sinusoidal", "learned"]


def sinusoids(start: int, length: int, width: int, device: torch.device) -> Tensor:
    """sin and cos of position / 10000^(2i / width), interleaved: `[length, width]` (arXiv:1706.03762, section 3.5)."""
    position = torch.arange(start, start + length, device=device, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, width, 2, device=device, dtype=torch.float32) * (-math.log(10000.0) / width))
    return torch.stack((torch.sin(position * rate), torch.cos(position * rate)), dim=-1).flatten(1)[:, :width]


class Embedding(nn.Module):
    """sqrt(width) E[token] + position, then dropout; `logits` uses E again where weights are tied.

    Args:
        site: of role `embedding`.
        vocabulary: number of tokens.
        stabilizer: draws E, and may read it in another form.
        positions: `sinusoidal` (any length) or `learned` (up to `maximum_length`).
        maximum_length: number of learned positions.
        dropout: rate on the sum.
    """

    def __init__(
        self,
        site: Site,
        vocabulary: int,
        stabilizer: Stabilizer,
        positions: Positions,
        maximum_length: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.scale = math.sqrt(site.width)
        self.dropout = dropout
        self.weight = nn.Parameter(torch.empty(vocabulary, site.width))
        stabilizer.initialization.fill(self.weight.detach(), site, "embedding")
        self.form = stabilizer.forms(self.weight.detach(), site, "embedding")
        self.position: nn.Parameter | None = None
        self.longest = maximum_length if positions == "learned" else None
        """The most tokens that a sentence may have; none where positions have no end."""
        if positions == "learned":
            self.position = nn.Parameter(torch.empty(maximum_length, site.width))
            nn.init.normal_(self.position.detach(), std=site.width**-0.5)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """The stream's first state `[batch, length, width]` for `tokens` `[batch, length]`, the first at `start`.

        Raises:
            UserError: more tokens than learned positions.
        """
        length, width = tokens.size(1), self.weight.size(1)
        if self.position is None:
            position = sinusoids(start, length, width, tokens.device)
        elif start + length <= self.position.size(0):
            position = self.position[start : start + length]
        else:
            raise UserError(
                f"a sentence of {start + length} tokens is longer than model.maximum_length, {self.position.size(0)}; "
                "raise it, lower data.maximum_length, or use model.positions: sinusoidal"
            )
        x = F.embedding(tokens, self.matrix()) * self.scale + position.to(self.weight.dtype)
        return kernels.dropout(x, self.dropout) if self.training else x

    def matrix(self) -> Tensor:
        """E in the form that it is computed with."""
        return cast(Tensor, self.form(self.weight))
