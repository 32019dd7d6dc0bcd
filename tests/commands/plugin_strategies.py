"""Strategies that only tests know: arguments with the names of others, and strategies within strategies."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stabilize.strategies import Epsilon, PreNorm, Residual, ScaledSum, Site, Sum, Warmup


class Halved(Residual):
    """Shares `sum_scale` with ScaledSum, under another default.

    Paper: none, arXiv:0000.00000
    """

    def __init__(self, sum_scale: float = 0.5, streams: int = 3) -> None:
        super().__init__()
        self.sum_scale = sum_scale
        self.streams = streams

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return self.sum_scale * (stream + branch)


class Around(Residual):
    """Wraps another residual."""

    def __init__(self, around: Residual = Sum(), rate: float = 0.1) -> None:  # noqa: B008
        super().__init__()
        self.around = around
        self.rate = rate

    def write(self, stream: Any, branch: Tensor) -> Any:
        return self.around.write(stream, branch)


class AroundToo(Around):
    """Wraps another one by default, at another rate."""

    def __init__(self, around: Residual = ScaledSum(sum_scale=0.9), rate: float = 0.2, sum_scale: float = 0.7) -> None:  # noqa: B008
        super().__init__(around, rate)
        self.sum_scale = sum_scale


class SameEverywhere(Epsilon):
    """Shares `value` with FixedEpsilon, under another default."""

    def __init__(self, value: float = 1e-7) -> None:
        self.value = value

    def at(self, site: Site, precision: str) -> float:
        return self.value


class Stairs(Warmup):
    """Shares `updates` and `scale` with the schedules of the menu."""

    def __init__(self, updates: int = 10, scale: float = 3.0, total: int | None = 5) -> None:
        self.updates = updates
        self.scale = scale
        self.total = total

    def factor(self, update: int) -> float:
        return self.scale


class Beside(PreNorm):
    """A placement that has an argument."""

    def __init__(self, value: float = 2.0) -> None:
        super().__init__()
        self.value = value
