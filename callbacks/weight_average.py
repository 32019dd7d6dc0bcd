"""An exponential moving average of the weights beside those that are trained."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from stabilize.errors import UserError


class WeightAverage(EMAWeightAveraging):
    """mean <- decay mean + (1 - decay) weights, after every n-th update; running statistics are averaged too.

    Validations have the mean, and so have the model after training and `state_dict` in checkpoints. Training goes on
    with the weights, in checkpoints `current_model_state`, also from one that was written at its end, where Lightning's
    own callback has the mean in both places.

    Args:
        decay: how much of the mean stays.
        every: updates between two steps of the mean.

    Raises:
        UserError: a setting that will not do; in `setup` where processes share the weights out.
    """

    def __init__(self, decay: float = 0.999, every: int = 1) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"decay of WeightAverage is {decay}; from 0 to below 1, such as 0.999, would do")
        if every < 1:
            raise UserError(f"every of WeightAverage is {every}; it counts updates, so use 1 or more")
        super().__init__(decay=decay, update_every_n_steps=every)
        self._exchanged = False
        """Whether the model has the mean, and the callback the weights."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy):
            name = type(trainer.strategy).__name__
            raise UserError(f"WeightAverage needs all weights in every process, {name} shares them out; ddp would do")
        if stage == "fit":
            self._exchanged = False
        with warnings.catch_warnings(action="ignore"):  # of what has just been looked at
            super().setup(trainer, pl_module, stage)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap_models(pl_module)
        self._exchanged = True

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._exchanged:
            super().on_validation_epoch_start(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._exchanged:
            super().on_validation_epoch_end(trainer, pl_module)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # else the model has what is evaluated, the mean
            super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._exchanged:
            mean, weights = checkpoint["current_model_state"], checkpoint["state_dict"]
            checkpoint |= {"state_dict": mean, "current_model_state": weights}
