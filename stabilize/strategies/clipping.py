"""Beside the axes, `model.clipping`: what bounds the gradient of an update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from stabilize.errors import UserError
from stabilize.strategies.strategy import Strategy


class Clipping(Strategy):
    """Base of all clippings."""

    def state(self) -> dict[str, float]:
        """What the next update depends on, in plain numbers; checkpoints hold it."""
        return {}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a `state`."""

    @abstractmethod
    def clip(self, parameters: Sequence[Tensor]) -> None:
        """Change the gradients of `parameters`, those of a whole update, in place."""


class NoClipping(Clipping):
    """Gradients are left as they are.

    g <- g
    """

    def clip(self, parameters: Sequence[Tensor]) -> None:
        pass


class GlobalNorm(Clipping):
    """Scale all gradients down together where their common norm is above a value.

        g <- g min(1, value / |g|)

    Paper: Pascanu et al. 2013, arXiv:1211.5063

    Args:
        value: the largest norm left.
    """

    def __init__(self, value: float = 1.0) -> None:
        if not value > 0:
            raise UserError(f"model.clipping.value is {value}; it must be above zero, 1.0 is usual")
        self.value = value

    @torch.no_grad()
    def clip(self, parameters: Sequence[Tensor]) -> None:
        total = get_total_norm([p.grad for p in parameters if p.grad is not None])
        clip_grads_with_norm_(parameters, self.value, total)
