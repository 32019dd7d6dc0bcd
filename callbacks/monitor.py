"""What all callbacks that log numbers share: at which updates, and where the numbers go."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from stabilize.errors import UserError


class Monitor(pl.Callback):
    """Base of the callbacks that log at every n-th update.

    Numbers go straight to the loggers, at the step of Lightning's own training metrics (0 for the first update)
    whatever `log_every_n_steps` is, and never to the progress bar. Automatic optimisation with one optimiser is
    assumed.

    Args:
        every: updates between two records, the n-th being the first; 0 switches the callback off.

    Raises:
        UserError: if `every` is negative, or the strategy hides what is to be read.
    """

    headlines: ClassVar[tuple[str, ...]] = ("/first_to_last", "/mean")
    """Endings of the keys that stand for a whole run."""
    reads_weights: ClassVar[bool] = False
    """True where weights or their gradients are read: those of FSDP2 can be (`stabilize.sharding.FullySharded`)."""

    def __init__(self, every: int) -> None:
        if every < 0:
            raise UserError(f"every: {every} is no number of updates; give 1 or more, or 0 to switch the callback off")
        self.every = every
        self.latest: dict[str, float] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.every and self.reads_weights and isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
            raise UserError(
                f"{type(self).__name__}: {type(trainer.strategy).__name__} shards weights and gradients, whose norm "
                "would be that of one shard; set every: 0, or use strategy: ddp or stabilize.sharding.FullySharded"
            )

    def summary(self) -> dict[str, float]:
        """Return the headline numbers, metric key -> last value."""
        return {key: value for key, value in self.latest.items() if key.endswith(self.headlines)}

    def state_dict(self) -> dict[str, Any]:
        return {"latest": dict(self.latest)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.latest = dict(state_dict["latest"])

    def is_due(self, trainer: pl.Trainer) -> bool:
        """Say whether the update being made is one to record; the same for all micro-batches of its window."""
        return self.every > 0 and (step_of(trainer) + 1) % self.every == 0

    def send(self, trainer: pl.Trainer, metrics: dict[str, float], step: int | None = None) -> None:
        """Give the numbers of this update, if any, to every logger (`log` would be overwritten by Lightning)."""
        self.latest.update(metrics)
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=step_of(trainer) if step is None else step)


def step_of(trainer: pl.Trainer) -> int:
    """Return the number of updates made before this one, which is the step loggers know it by."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
