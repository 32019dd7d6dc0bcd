"""What the callbacks share that look at the training forward: sums that add over micro-batches and ranks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from stabilize.callbacks.layer_monitor import LayerMonitor


class ForwardMonitor(LayerMonitor):
    """Base of the callbacks that gather sums in the forward of a due update.

    One record an update: sums are added over the window's micro-batches and over ranks, and divided once. Hooks are on
    from the start of a micro-batch until its backward begins, in which activation checkpointing runs layers again.
    """

    def __init__(self, every: int, layers: dict[str, str] | None, figures: bool) -> None:
        super().__init__(every, layers, figures)
        self._total: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"total": self._total}  # none but in the middle of an update

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._total = state_dict.get("total")

    @abstractmethod
    def look(self) -> None:
        """Put the hooks on."""

    @abstractmethod
    def gather(self, trainer: pl.Trainer, device: torch.device) -> Tensor:
        """Return the sums of the micro-batch whose forward has ended."""

    @abstractmethod
    def report(self, trainer: pl.Trainer, sums: Tensor) -> None:
        """Send what the sums of the whole update, on the host, amount to."""

    def add(self, total: Tensor, new: Tensor) -> Tensor:
        """Return the sums of two micro-batches together."""
        return total + new

    def over_ranks(self, trainer: pl.Trainer, total: Tensor) -> Tensor:
        """Return the sums of all ranks together."""
        return trainer.strategy.reduce(total, reduce_op="sum")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.is_due(trainer):
            self.look()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self.watching:
            sums = self.gather(trainer, pl_module.device)
            self._total = sums if self._total is None else self.add(self._total.to(sums.device), sums)
        self.unwatch()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if not self.is_due(trainer) or self._total is None:
            return  # without sums at a due update, `training_step` returned None
        total, self._total = self.over_ranks(trainer, self._total).cpu(), None  # the one transfer to the host
        self.report(trainer, total)

    def forget(self) -> None:
        super().forget()
        self._total = None
