"""A training as it was some updates ago, in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(frozen=True)
class Snapshot:
    """What learns, and what says how fast, after an update: copies in the memory of the host.

    With Adam three times the size of the weights. `vars` of it can be put into a checkpoint.
    """

    update: int
    weights: dict[str, Tensor]
    """Parameters and buffers by name, also those that no checkpoint holds, and those of averages of the weights."""
    optimizers: list[dict[str, Any]]
    schedules: list[dict[str, Any]]
    precision: dict[str, Any]
    """Loss scale of float16."""
    clipping: dict[str, float]
    """What the module's clipping knows of gradients before, where it has a `state`."""
    watched: dict[str, Any]
    """What the one who takes it wants to know again."""

    @classmethod
    def take(cls, trainer: pl.Trainer, pl_module: pl.LightningModule, update: int, watched: dict[str, Any]) -> Snapshot:
        """The training between two updates."""
        clipping: Any = getattr(pl_module, "clipping", None)
        return cls(
            update=update,
            weights={name: _on_the_host(tensor) for name, tensor in _tensors(trainer, pl_module)},
            optimizers=[_copied(optimizer.state_dict()) for optimizer in trainer.optimizers],
            schedules=[_copied(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
            precision=_copied(trainer.precision_plugin.state_dict()),
            clipping=clipping.state() if hasattr(clipping, "state") else {},
            watched=copy.deepcopy(watched),
        )

    @torch.no_grad()
    def restore(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the training back to where it was; the place in the data and the count of updates go on."""
        for name, tensor in _tensors(trainer, pl_module):
            tensor.copy_(self.weights[name])
        for optimizer, state in zip(trainer.optimizers, self.optimizers, strict=True):
            optimizer.load_state_dict(_copied(state))  # which would train on with the very tensors it is given
        for config, state in zip(trainer.lr_scheduler_configs, self.schedules, strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(state))
        trainer.precision_plugin.load_state_dict(copy.deepcopy(self.precision))
        if self.clipping:
            clipping: Any = pl_module.clipping
            clipping.restore(self.clipping)


def slow_down(trainer: pl.Trainer, factor: float) -> None:
    """Multiply all learning rates, that of now and those that schedules start from."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group |= {key: group[key] * factor for key in ("lr", "initial_lr", "max_lr", "min_lr") if key in group}
    for config in trainer.lr_scheduler_configs:
        for schedule in (config.scheduler, *getattr(config.scheduler, "_schedulers", ())):
            for rates in ("base_lrs", "_last_lr"):
                if hasattr(schedule, rates):
                    setattr(schedule, rates, [rate * factor for rate in getattr(schedule, rates)])


def _tensors(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Iterator[tuple[str, Tensor]]:
    averages = [callback._average_model for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
    for number, module in enumerate((pl_module, *filter(None, averages))):
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            yield f"{number}.{name}", tensor.detach()


def _on_the_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _copied(state: Any) -> Any:
    return tree_map(_on_the_host, copy.copy(state))
