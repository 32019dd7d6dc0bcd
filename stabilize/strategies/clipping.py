"""Beside the axes, `model.clipping`: what bounds the gradient of an update."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from stabilize import stats
from stabilize.errors import UserError
from stabilize.gradients import Gradients
from stabilize.strategies.strategy import Strategy


class Clipping(Strategy):
    """Base of all clippings."""

    def state(self) -> dict[str, float]:
        """What the next update depends on, in plain numbers; checkpoints hold it."""
        return {}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a `state`."""

    @abstractmethod
    def clip(self, gradients: Gradients) -> None:
        """Change the gradients in place."""


class NoClipping(Clipping):
    """Gradients are left as they are.

        g <- g

    Also: the trainer's own clipping still acts where it is set.
    """

    def clip(self, gradients: Gradients) -> None:
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
    def clip(self, gradients: Gradients) -> None:
        _shorten(gradients, self.value)


def _shorten(gradients: Gradients, most: float) -> None:
    """Scale all down together where their norm is above a value, as `torch.nn.utils.clip_grads_with_norm_`."""
    if gradients.there:
        torch._foreach_mul_(gradients.here, (most / (gradients.norm + 1e-6)).clamp_max(1.0))


class AdaptiveClipping(Clipping):
    """AGC: scale the gradient of each unit down where it is large beside the unit's weights.

        g_i <- g_i min(1, ratio max(|W_i|, epsilon) / |g_i|),  i the rows of a matrix, one for each output

    Also: a vector or number (gain, bias) is one unit. The matrix that makes the logits is left alone, a tied embedding
    with it. |g_i| is taken as 1e-6 or more, as in the released code.
    Paper: Brock et al. 2021, arXiv:2102.06171

    Args:
        ratio: of gradient to weight, at most.
        epsilon: units count as at least this long, so that what starts at zero can move.
    """

    def __init__(self, ratio: float = 0.01, epsilon: float = 1e-3) -> None:
        if not ratio > 0:
            raise UserError(f"model.clipping.ratio is {ratio}; it must be above zero, 0.01 is usual")
        if not epsilon > 0:
            raise UserError(f"model.clipping.epsilon is {epsilon}; it must be above zero, 1e-3 is usual")
        self.ratio = ratio
        self.epsilon = epsilon

    @torch.no_grad()
    def clip(self, gradients: Gradients) -> None:
        weights = [p for p in gradients.parameters if p.grad is not None and p is not gradients.classifier]
        if not weights:
            return
        changed = [p.grad for p in weights if p.grad is not None]
        here = [stats.local(gradient) for gradient in changed]
        most = self.ratio * torch.cat(_units(weights)).clamp_min(self.epsilon)
        lengths = _units(changed)
        scale = (most / torch.cat(lengths).clamp_min(1e-6)).clamp_max(1.0)
        factors = torch.split(scale, [len(unit) for unit in lengths])
        shaped = [f.view(-1, *[1] * (g.ndim - 1)) if g.ndim else f[0] for f, g in zip(factors, here, strict=True)]
        torch._foreach_mul_(here, shaped)


def _units(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The length of each row of a matrix, or of the whole of anything smaller, in float32 or better.

    Of a sharded matrix those of the rows that this process has; any row is in one place.
    """
    return [_lengths(stats.local(t).flatten(1)) if t.ndim > 1 else _lengths(t).reshape(1) for t in tensors]


def _lengths(x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return stats.whole(torch.linalg.vector_norm(x, dim=-1 if x.ndim else None, dtype=dtype))


class ZClip(Clipping):
    """Scale all gradients down together where their common norm stands out from those before.

        z = (|g| - mean) / (sqrt(variance) + 1e-6);  where z > threshold, |g| <- mean + threshold^2 sqrt(variance) / z

    Then the averages take in that norm g*: mean <- decay mean + (1 - decay) g*, and the same for (g* - new mean)^2.

    Also: the first updates only fill the averages. The released code further keeps all norms, those too, to `maximum`
    1.0, of which the averages know nothing: where gradients are usually longer, z then does nothing. Where |g| is not
    finite, nothing is changed.
    Paper: Kumar et al. 2025, arXiv:2504.02507

    Args:
        threshold: deviations above the mean from where on a norm stands out.
        decay: how slowly the averages forget.
        warmup: updates until the averages are used.
        maximum: the largest norm left in any case; none, as in the paper: there is no such bound.
    """

    def __init__(
        self, threshold: float = 2.5, decay: float = 0.97, warmup: int = 25, maximum: float | None = None
    ) -> None:
        if not threshold > 0:
            raise UserError(f"model.clipping.threshold is {threshold}; it must be above zero, 2.5 is usual")
        if not 0 <= decay < 1:
            raise UserError(f"model.clipping.decay is {decay}; from 0 to below 1 would do, 0.97 is usual")
        if warmup < 2:
            raise UserError(f"model.clipping.warmup is {warmup}; a variance needs 2 updates or more, 25 is usual")
        if maximum is not None and not maximum > 0:
            raise UserError(f"model.clipping.maximum is {maximum}; it must be above zero or none")
        self.threshold = threshold
        self.decay = decay
        self.warmup = warmup
        self.maximum = maximum
        self.restore({"seen": 0, "mean": 0.0, "variance": 0.0})

    def state(self) -> dict[str, float]:
        return {"seen": self._seen, "mean": self._mean, "variance": self._variance}

    def restore(self, state: dict[str, float]) -> None:
        self._seen, self._mean, self._variance = state["seen"], state["mean"], state["variance"]

    @torch.no_grad()
    def clip(self, gradients: Gradients) -> None:
        norm = float(gradients.norm)  # for which the host waits for the device
        if not gradients.there or not math.isfinite(norm):
            return
        usual = self._usual(norm)
        self._take_in(usual)
        most = usual if self.maximum is None else min(usual, self.maximum)
        if most < norm:
            _shorten(gradients, most)

    def _usual(self, norm: float) -> float:
        """`norm`, or what is made of it where it stands out."""
        deviation = math.sqrt(self._variance)
        z = (norm - self._mean) / (deviation + 1e-6)
        if self._seen < self.warmup or z <= self.threshold:
            return norm
        return self._mean + self.threshold**2 * deviation / z

    def _take_in(self, norm: float) -> None:
        """Into plain averages over all norms during the warm-up, into exponential ones after it."""
        warming, before = self._seen < self.warmup, self._mean
        self._seen += 1
        kept = 1 - 1 / self._seen if warming else self.decay
        self._mean = kept * self._mean + (1 - kept) * norm
        square = (norm - self._mean) * (norm - (before if warming else self._mean))
        self._variance = kept * self._variance + (1 - kept) * square
