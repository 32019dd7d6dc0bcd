"""Training without Lightning."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stabilize.commands.bench.contenders import Contender
from stabilize.data.batch import Batch
from stabilize.gradients import Gradients
from stabilize.strategies import Part
from stabilize.task import LOSS_UNIT


class PlainLoop:
    """New weights of a contender, trained in a plain loop of PyTorch: no Lightning, no callbacks, no records.

    The same model, precision, loss, clipping, optimiser and schedule as in `fit`.
    """

    def __init__(self, contender: Contender) -> None:
        task, self.data, self.trainer = contender.built()
        self.task = task.train()
        configured = self.task.configure_optimizers()
        self.optimizer, self.schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
        self._parts = [part for part in self.task.model.modules() if isinstance(part, Part)]
        self._made = 0

    def update(self, batches: Sequence[Batch]) -> None:
        """Make one update from some batches."""
        if self._made == 0:
            for part in self._parts:
                part.prepare(self.task.model, batches[0])
        self._made += 1
        tokens = 0
        for batch in batches:
            with self.trainer.precision_plugin.forward_context():
                loss, _, count = self.task.loss(batch)
            (loss / LOSS_UNIT).backward()
            tokens += count
        gradients = Gradients.of(self.optimizer, self.task.model.classifier)
        torch._foreach_mul_(gradients.there, LOSS_UNIT / tokens)
        self.task.clipping.clip(gradients)
        if self.trainer.gradient_clip_val:
            by_value = self.trainer.gradient_clip_algorithm == "value"
            clip = torch.nn.utils.clip_grad_value_ if by_value else torch.nn.utils.clip_grad_norm_
            clip(gradients.parameters, self.trainer.gradient_clip_val)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        for part in self._parts:
            part.after_update(self._made)
