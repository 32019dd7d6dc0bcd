"""Axis `warmup`: the learning rate as a factor of the optimiser's own, one function of the update number."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Literal, Self

from stabilize.errors import UserError
from stabilize.strategies.site import Site
from stabilize.strategies.strategy import Strategy

if TYPE_CHECKING:
    from stabilize.strategies.stabilizer import Stabilizer


def _counted(key: str, updates: int) -> int:
    if updates < 1:
        raise UserError(f"model.stabilizer.warmup.{key} is {updates}; it counts updates, so use 1 or more")
    return updates


def _second_moment(beta2: float) -> float:
    if not 0 <= beta2 < 1:
        raise UserError(f"model.stabilizer.warmup.beta2 is {beta2}; the optimiser's, from 0 to below 1, would do")
    return beta2


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
        if not 0 < scale < math.inf:
            raise UserError(f"model.stabilizer.warmup.scale is {scale}; it must be above zero, 1 is usual")
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


class Untuned(Warmup):
    """Rise linearly for as long as Adam's second moment needs to settle.

        factor(t) = min(1, t / w),  w = 2 / (1 - beta2): 100 updates for 0.98, 2000 for 0.999

    Paper: Ma and Yarats 2019, arXiv:1910.04209

    Args:
        beta2: the optimiser's.
    """

    def __init__(self, beta2: float = 0.98) -> None:
        self.beta2 = _second_moment(beta2)

    def factor(self, update: int) -> float:
        return min(1.0, (1 - self.beta2) * update / 2)


class Exponential(Untuned):
    """Rise ever more slowly, at the pace at which Adam's second moment settles.

        factor(t) = 1 - exp(-(1 - beta2) t)

    Paper: Ma and Yarats 2019, arXiv:1910.04209

    Args:
        beta2: the optimiser's.
    """

    def factor(self, update: int) -> float:
        return -math.expm1(-(1 - self.beta2) * update)


class Planned(Warmup):
    """Base of those that rise linearly to the peak and reach their end with the run."""

    def __init__(self, updates: int, total: int | None) -> None:
        self.updates = _counted("updates", updates)
        self.total = total
        if total is not None:
            self.check(total)

    def at(self, width: int, planned: int | None = None) -> Self:
        """As for all schedules.

        Raises:
            UserError: neither this schedule nor the run has an end, or it is too early.
        """
        placed = super().at(width, planned)
        placed.total = planned if self.total is None else self.total
        if placed.total is None:
            raise UserError(
                f"model.stabilizer.warmup.total is not set and the run has no last update that {type(self).__name__} "
                "could end with; set it, or trainer.max_steps"
            )
        placed.check(placed.total)
        return placed

    def check(self, total: int) -> None:
        """Refuse an end that is too early."""
        if total < self.updates:
            raise UserError(
                f"model.stabilizer.warmup.total is {total}; it must not be below updates, {self.updates} "
                "(where it is not set, it is trainer.max_steps)"
            )

    def factor(self, update: int) -> float:
        if update <= self.updates:
            return update / self.updates
        return 1.0 if self.total is None else self.fall(update, self.total)

    @abstractmethod
    def fall(self, update: int, total: int) -> float:
        """The factor after the peak."""


class Cosine(Planned):
    """Rise linearly to the peak, then fall along half a cosine to the floor, reached at the last update.

        factor(t) = t / w  up to w;  then floor + (1 - floor) (1 + cos(pi (t - w) / (T - w))) / 2;  from T on floor

    Also: at floor 0 the last update moves nothing.
    Paper: Loshchilov and Hutter 2016, arXiv:1608.03983, without restarts

    Args:
        updates: w, the update that has the full learning rate.
        total: T, the last update; none: the run's, trainer.max_steps.
        floor: the factor at the end; 0.1 is usual for language models.
    """

    def __init__(self, updates: int = 4000, total: int | None = None, floor: float = 0.0) -> None:
        if not 0 <= floor <= 1:
            raise UserError(f"model.stabilizer.warmup.floor is {floor}; a share of the peak from 0 to 1 would do")
        self.floor = floor
        super().__init__(updates, total)

    def fall(self, update: int, total: int) -> float:
        done = min(1.0, (update - self.updates) / max(1, total - self.updates))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2


class WarmupStableDecay(Planned):
    """Rise linearly to the peak, stay there, and fall at the end of the run alone.

        factor(t) = t / w  up to w;  then 1;  over the last D = decay_share T updates  fall((t - (T - D)) / D)

        fall(x) = 1 - sqrt(x), 1 - x, (1 + cos(pi x)) / 2 or 2^(-5 x)

    Also: all but the exponential fall reach zero at the last update. The exponential one halves five times, to 1/32:
    the paper halves every 5000 updates, however long the fall, which would hardly act in a short run.
    Paper: Hu et al. 2024, arXiv:2404.06395; the root Haegele et al. 2024, arXiv:2405.18392

    Args:
        updates: w, the update that first has the full learning rate.
        total: T, the last update; none: the run's, trainer.max_steps.
        decay_share: how much of T is for the fall; a tenth is the paper's, where 0.025 was too little.
        shape: `sqrt` (the best of Haegele et al.), `linear`, `cosine` or `exponential` (the paper's).
    """

    def __init__(
        self,
        updates: int = 4000,
        total: int | None = None,
        decay_share: float = 0.1,
        shape: Literal["sqrt", "linear", "cosine", "exponential"] = "sqrt",
    ) -> None:
        if not 0 < decay_share < 1:
            raise UserError(f"model.stabilizer.warmup.decay_share is {decay_share}; between 0 and 1, 0.1 is usual")
        self.decay_share = decay_share
        self.shape = shape
        super().__init__(updates, total)

    def check(self, total: int) -> None:
        super().check(total)
        if self.updates > round((1 - self.decay_share) * total):
            raise UserError(
                f"model.stabilizer.warmup.updates is {self.updates}, but before that the fall over the last "
                f"{self.decay_share:g} of {total} updates begins; lower it or decay_share, or raise total or "
                "trainer.max_steps"
            )

    def fall(self, update: int, total: int) -> float:
        length = self.decay_share * total
        x = min(1.0, max(0.0, (update - (total - length)) / length))
        return {
            "sqrt": 1 - math.sqrt(x),
            "linear": 1 - x,
            "cosine": (1 + math.cos(math.pi * x)) / 2,
            "exponential": 2 ** (-5 * x),
        }[self.shape]


class NoWarmup(Warmup):
    """The full learning rate from the first update on.

        factor(t) = 1

    Also: post-norm needs a warm-up; pre-norm and methods without norms may do without.
    """

    def factor(self, update: int) -> float:
        return 1.0

    def warnings(self, stabilizer: Stabilizer, site: Site, precision: str) -> list[str]:
        if not stabilizer.placement.normalizes_stream:
            return []
        here, name = type(self).__name__, type(stabilizer.placement).__name__
        return [
            f"{here} under {name}: on IWSLT14 post-norm without warm-up reached 8.45 BLEU against 34 with 4000 "
            "updates of it (Xiong et al. 2020, arXiv:2002.04745); model.stabilizer.warmup: InverseSqrt would do"
        ]


class InverseSqrtDecay(NoWarmup):
    """The full learning rate at the first update, then a slow fall.

        factor(t) = sqrt(P / (P + t - 1))

    Also: T-Fixup's schedule, at a learning rate of 5e-4.
    Paper: Huang et al. 2020, proceedings.mlr.press/v119/huang20f

    Args:
        period: P, the updates after which the factor is 1 / sqrt(2).
    """

    def __init__(self, period: int = 4000) -> None:
        self.period = _counted("period", period)

    def factor(self, update: int) -> float:
        return (self.period / (self.period + update - 1)) ** 0.5
