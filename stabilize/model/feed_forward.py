"""The feed-forward branch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from stabilize import kernels
from stabilize.model.projection import Projection
from stabilize.strategies import Site, Stabilizer
from stabilize.strategies.initialization import Role

if TYPE_CHECKING:
    from stabilize.model.layer import Context

Activation: TypeAlias = Literal["relu", "gelu", "swiglu"]


class FeedForward(nn.Module):
    """W_out act(W_in x), with biases; `swiglu` is W_out (silu(W_gate x) W_in x) (Shazeer 2020, arXiv:2002.05202).

    Args:
        site: where it stands.
        stabilizer: draws the weights.
        slots: inner norms and gains: `hidden_in` before the activation, `hidden` after it, both of size `site.hidden`.
        activation: `relu`, `gelu` or `swiglu`.
        dropout: rate after the activation.
    """

    def __init__(
        self,
        site: Site,
        stabilizer: Stabilizer,
        slots: dict[str, nn.Module],
        activation: Activation,
        dropout: float,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.dropout = dropout
        self.slots = nn.ModuleDict(slots)
        roles: list[Role] = ["feed_forward_in"] * (2 if activation == "swiglu" else 1)
        self.input = Projection(site, roles, site.width, site.hidden, stabilizer)
        self.output = Projection(site, ("feed_forward_out",), site.hidden, site.width, stabilizer)

    def _slot(self, name: str, x: Tensor, real: Tensor) -> Tensor:
        return self.slots[name](x, real) if name in self.slots else x

    def forward(self, x: Tensor, context: Context, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The branch's output `[batch, length, width]`; nothing is handed to the layer above."""
        hidden = self.input(x)
        if self.activation == "swiglu":
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * self._slot("hidden_in", hidden, context.real)
        else:
            act = F.relu if self.activation == "relu" else F.gelu
            hidden = act(self._slot("hidden_in", hidden, context.real))
        hidden = self._slot("hidden", hidden, context.real)
        return self.output(kernels.dropout(hidden, self.dropout) if self.training else hidden), None
