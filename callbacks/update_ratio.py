"""How far an update moves each layer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim import Optimizer

from stabilize import stats
from stabilize.callbacks.figures import scale_map
from stabilize.callbacks.history import History
from stabilize.callbacks.layer_monitor import LayerMonitor


class UpdateRatio(LayerMonitor):
    """Log the norm of each layer's update over that of its weights: about 1e-3 is a rule of thumb, 1e-6 stands still.

    | key                                  | what                                                                      |
    |--------------------------------------|---------------------------------------------------------------------------|
    | `update_ratio/{stack}/layer_001` ... | L2 norm of the change of the layer's parameters over that of the weights  |

    The change is the one that was applied: after clipping, with the learning rate, by the optimiser as it is. Frozen
    layers have no number, nor has an update that left all weights alone: `training_step` returned None, or the gradient
    scaler of `16-mixed` passed it over. A copy of the layers' weights is held during the optimiser's step of a recorded
    update, and at no other time. Above 24 layers a stack has at most 25 keys; the pictures show all layers.

    Args:
        every: updates between two records; 0 switches the callback off.
        layers: stack name -> pattern over module names; none: the encoder and decoder of `TranslationTask`.
        figures: draw `update_ratio_{stack}.png`, layer by update.

    Raises:
        UserError: if `every` is negative, or a pattern matches no module.
    """

    reads_weights = True

    def __init__(self, every: int = 50, layers: dict[str, str] | None = None, figures: bool = True) -> None:
        super().__init__(every, layers, figures)
        self._before: dict[Tensor, Tensor] = {}

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self.is_due(trainer) and any(parameter.grad is not None for parameter in pl_module.parameters()):
            learns = {p for layers in self.stacks.values() for layer in layers for p in layer.parameters()}
            self._before = {p: p.detach().clone() for p in learns if p.requires_grad}

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, *arguments)
        before, self._before = self._before, {}
        if not before:
            return
        layers = [layer for stack in self.stacks.values() for layer in stack]
        ratios = stats.update_ratios(layers, before).cpu()  # the one transfer to the host
        if not (ratios > 0).any():
            return  # the update was passed over
        metrics: dict[str, float] = {}
        sizes = [len(stack) for stack in self.stacks.values()]
        for stack, row in zip(self.stacks, ratios.split(sizes), strict=True):
            metrics |= self.log_row(trainer, "update_ratio", stack, row.tolist())
        self.send(trainer, metrics)

    def forget(self) -> None:
        super().forget()
        self._before = {}

    def picture(self, kind: str, history: History, title: str) -> Figure:
        return scale_map(history, title)
