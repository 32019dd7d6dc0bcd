"""Axis `warmup`: the learning rate as a factor of the optimiser's own, one function of the update number."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import TYPE_CHECKING, Self

from stabilize.errors import UserError
from stabilize.strategies.site import Site
from stabilize.strategies.strategy import Strategy

if TYPE_CHECKING:
    from stabilize.strategies.stabilizer import Stabilizer


def _counted(key: str, updates: int) -> int:
    if updates < 1:
        raise UserError(f"model.stabilizer.warmup.{key} is {updates}; it counts updates, so use 1 or more")
    return updates


class Warmup(Strategy):
    """Base of all schedules. Updates count from 1, and the first has a factor above zero."""

    def at(self, width: int, planned: int | None = None) -> Self:
        """A copy for a model of this width, and a run of this many updates; none: it has no planned end."""
        return copy.copy(self)

    @abstractmethod
    def factor(self, update: int) -> float:
        """What the optimiser's learning rate is multiplied by at update number `update`."""


class InverseSqrt(Warmup):
    """Rise linearly to the peak, then fall with the root of the update number.

        factor(t) = min(t / w, sqrt(w / t))

    Paper: Vaswani et al. 2017, arXiv:1706.03762, with the peak set by the optimiser as in fairseq

    Args:
        updates: w, the update that has the full learning rate.
    """

    def __init__(self, updates: int = 4000) -> None:
        self.updates = _counted("updates", updates)

    def factor(self, update: int) -> float:
        return min(update / self.updates, (self.updates / update) ** 0.5)


class Noam(Warmup):
    """The original Transformer's schedule; set the optimiser's learning rate to 1.

        factor(t) = scale d^-1/2 min(t^-1/2, t w^-3/2),  peak scale (d w)^-1/2 at t = w

    Paper: Vaswani et al. 2017, arXiv:1706.03762

    Args:
        updates: w, the update with the peak.
        scale: multiplies the whole; tensor2tensor uses 2 with pre-norm and w = 8000.
    """

    def __init__(self, updates: int = 4000, scale: float = 1.0) -> None:
        self.updates = _counted("updates", updates)
        self.scale = scale
        self.width = 1

    def at(self, width: int, planned: int | None = None) -> Self:
        placed = super().at(width, planned)
        placed.width = width
        return placed

    def factor(self, update: int) -> float:
        return self.scale * self.width**-0.5 * min(update**-0.5, update * self.updates**-1.5)


class Linear(Warmup):
    """Rise linearly to the peak; then stay, or fall linearly to the last update.

        factor(t) = t / w  up to w;  then 1, or (T + 1 - t) / (T + 1 - w)

    Args:
        updates: w, the update that has the full learning rate.
        total: T, the last update with a learning rate above zero; none: the rate stays at its peak.
    """

    def __init__(self, updates: int = 4000, total: int | None = None) -> None:
        self.updates = _counted("updates", updates)
        if total is not None and total < updates:
            raise UserError(f"model.stabilizer.warmup.total is {total}; it must not be below updates, {updates}")
        self.total = total

    def factor(self, update: int) -> float:
        if update <= self.updates:
            return update / self.updates
        return 1.0 if self.total is None else max(0.0, (self.total + 1 - update) / (self.total + 1 - self.updates))


class NoWarmup(Warmup):
    """The full learning rate from the first update on.

    factor(t) = 1
    """

    def factor(self, update: int) -> float:
        return 1.0

    def warnings(self, stabilizer: Stabilizer, site: Site, precision: str) -> list[str]:
        if not stabilizer.placement.normalizes_stream:
            return []
        name = type(stabilizer.placement).__name__
        return [
            f"NoWarmup under {name}: on IWSLT14 post-norm without warm-up reached 8.45 BLEU against 34 with 4000 "
            "updates of it (Xiong et al. 2020, arXiv:2002.04745); model.stabilizer.warmup: InverseSqrt would do"
        ]
