"""Where epsilon has a say in what a norm puts out."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from stabilize import stats
from stabilize.callbacks.figures import share_map
from stabilize.callbacks.history import History
from stabilize.callbacks.place_monitor import PlaceMonitor


class EpsilonAudit(PlaceMonitor):
    """Log at what share of positions a norm's epsilon has a say: zero is healthy, one is a norm that no longer norms.

    | key                                   | what                                                                     |
    |---------------------------------------|--------------------------------------------------------------------------|
    | `epsilon_audit/{stack}/layer_001` ... | share of positions whose variance is at most ten times epsilon, of that  |
    |                                       | norm of the layer where it is largest                                    |

    In place of the variance stands whatever the norm adds its epsilon to: the mean square of RMSNorm, the length of
    ScaleNorm. Norms are ours (those with one such number a position, `norm.guarded(x)`), nn.LayerNorm and nn.RMSNorm.
    Positions are those that the norm is told are real, or its layer by the masks that it is called with, else all.
    Compiled layers run uncompiled at the updates that are recorded. Above 24 layers a stack has at most 25 keys; the
    pictures show all layers.

    Args:
        every: updates between two records; 0 switches the callback off.
        layers: stack name -> pattern over module names; none: the encoder and decoder of `TranslationTask`.
        figures: draw `epsilon_audit_{stack}.png`, layer by update.

    Raises:
        UserError: if `every` is negative, or a pattern matches no module.
    """

    absent = "have no norm that it knows"
    numbers = 2
    inside = True

    def __init__(self, every: int = 50, layers: dict[str, str] | None = None, figures: bool = True) -> None:
        super().__init__(every, layers, figures)

    def find_places(self, layer: nn.Module) -> list[nn.Module]:
        return [part for part in layer.modules() if isinstance(part, TORCH_NORMS) or hasattr(part, "guarded")]

    def see(self, place: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        x, *others = (*inputs, *keywords.values())
        guarded, epsilon = _guarded(place, x, output)
        if guarded is None:
            return x.new_empty(0), epsilon, None  # no position
        real = others[0] if others else self.real
        if not others and real is not None and real.shape != guarded.shape:
            real = None  # a norm of something else than the stream
        if real is not None and guarded.dim() > real.dim():
            real = real[:, None]  # the same in every head
        return guarded, epsilon, real

    def measure(self, seen: Any) -> Tensor:
        return stats.near_epsilon(*seen)

    def report_places(self, trainer: pl.Trainer, sums: dict[nn.Module, Tensor]) -> None:
        metrics: dict[str, float] = {}
        for stack, layers in self.stacks.items():
            row = [math.nan] * len(layers)
            for place, (its_stack, number) in self.places.items():
                near, count = sums[place].tolist()
                if its_stack == stack and count:
                    row[number] = max(near / count, row[number]) if math.isfinite(row[number]) else near / count
            metrics |= self.log_row(trainer, "epsilon_audit", stack, row)
        self.send(trainer, metrics)

    def picture(self, kind: str, history: History, title: str) -> Figure:
        return share_map(history, title)


TORCH_NORMS = (nn.LayerNorm, nn.RMSNorm)


def _guarded(norm: Any, x: Tensor, output: Tensor) -> tuple[Tensor | None, float]:
    """Return the number, one a position, that a norm's epsilon keeps away from zero, and the epsilon."""
    if not isinstance(norm, TORCH_NORMS):
        return norm.guarded(x, output), norm.epsilon
    last = tuple(range(-len(norm.normalized_shape), 0))
    epsilon = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    kept = stats.layer_norm_variance(output, epsilon)
    if kept is not None:
        return kept.squeeze(last), epsilon
    x = x.float()
    if isinstance(norm, nn.LayerNorm):
        x = x - x.mean(last, keepdim=True)
    return torch.linalg.vector_norm(x, dim=last).square() / math.prod(norm.normalized_shape), epsilon
