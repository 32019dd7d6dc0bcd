"""How large what each layer puts out is."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from stabilize import stats
from stabilize.callbacks.figures import scale_map
from stabilize.callbacks.history import History
from stabilize.callbacks.layers import observe
from stabilize.callbacks.place_monitor import PlaceMonitor


class ActivationScale(PlaceMonitor):
    """Log the size of each layer's output, and how fast it grows from layer to layer.

    | key                                    | what                                                               |
    |----------------------------------------|--------------------------------------------------------------------|
    | `activation_rms/{stack}/layer_001` ... | root mean square of the layer's output                             |
    | `activation_rms/{stack}/slope`         | growth of the logarithm of its variance a layer, by least squares  |

    Slope: zero after post-norm, small and falling with depth where the variance grows linearly as under pre-norm, the
    same at any depth where it grows exponentially. Taken in the training forward over real tokens only, where the layer
    says which are (`layer.observe(inputs, output)`) or the masks that it is called with do, else over all positions, of
    the first tensor that it returns. Above 24 layers a stack has at most 25 `layer_` keys; pictures show all layers.

    Args:
        every: updates between two records; 0 switches the callback off.
        layers: stack name -> pattern over module names; none: the encoder and decoder of `TranslationTask`.
        figures: draw `activation_rms_{stack}.png`, layer by update.

    Raises:
        UserError: if `every` is negative, or a pattern matches no module.
    """

    headlines = ("/slope",)
    numbers = 3

    def __init__(self, every: int = 50, layers: dict[str, str] | None = None, figures: bool = True) -> None:
        super().__init__(every, layers, figures)

    def see(self, place: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        return observe(place, inputs, keywords, output)

    def measure(self, seen: Any) -> Tensor:
        return stats.moments(*seen)

    def report_places(self, trainer: pl.Trainer, sums: dict[nn.Module, Tensor]) -> None:
        metrics: dict[str, float] = {}
        for stack, layers in self.stacks.items():
            moments = torch.stack([sums[layer] for layer in layers])
            metrics |= self.log_row(trainer, "activation_rms", stack, stats.rms(moments).tolist())
            slope = stats.growth_slope(stats.variance(moments)).item()
            if math.isfinite(slope):
                metrics[f"activation_rms/{stack}/slope"] = slope
        self.send(trainer, metrics)

    def picture(self, kind: str, history: History, title: str) -> Figure:
        return scale_map(history, title)
