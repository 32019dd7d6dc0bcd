"""The states of a run from which it can go on."""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from stabilize.errors import UserError


class Checkpoints(ModelCheckpoint):
    """Keep the best states of a run, as Lightning's `ModelCheckpoint` does, and its last ones, whatever their score.

    `last.ckpt` is the state after the last validation, after every n-th update, or at the end; the one before it is
    `last-1.ckpt`, and so on. No state is saved between an update and its validation, which a run that goes on from
    there would leave out. A run that goes on counts its best states on, also in another folder: those of before stay
    where they are. `save_weights_only` is for the best ones.

    Args:
        every: updates between two last states; 0: only after validations and at the end.
        keep_last: how many last states there are.

    Raises:
        UserError: if a number is too small, or (after the first validation) nothing is called like the monitor.
    """

    def __init__(self, every: int = 1000, keep_last: int = 2, **options: Any) -> None:
        super().__init__(save_last=False, **options)  # Lightning's would leave out what is not among the best
        if every < 0:
            raise UserError(f"checkpoint.every is {every}; a number of updates, or 0 for none, would do")
        if keep_last < 1:
            raise UserError(f"checkpoint.keep_last is {keep_last}; 1 or more would do")
        self.every = every
        self.keep_last = keep_last
        self._update_of_last = 0

    def keep_state(self, trainer: pl.Trainer) -> str:
        """Write the state as it is now, on all ranks together; the ones of earlier updates step back by one. Where it
        is."""
        place = self.last_model_path = f"{self.dirpath}/last.ckpt"
        here = "://" not in place
        new = f"{self.dirpath}/next.ckpt" if here else place
        trainer.save_checkpoint(new, weights_only=False)
        if here and trainer.is_global_zero:
            if self._update_of_last != trainer.global_step:
                self._step_back(Path(place))
            Path(new).replace(place)
        self._update_of_last = trainer.global_step
        return place

    def now(self, trainer: pl.Trainer) -> str | None:
        """The file with the state as it is now; none where it was not saved."""
        return self.last_model_path if self._update_of_last == trainer.global_step else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"dirpath": self.dirpath})  # of the run, wherever they lie

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *batch)
        loop, update = trainer.fit_loop, trainer.global_step
        if (
            self.every
            and update % self.every == 0
            and not trainer.fast_dev_run
            and not loop._should_accumulate()
            and not loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        ):
            self.keep_state(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or trainer.fast_dev_run:
            return
        known = self._monitor_candidates(trainer)
        if self.monitor not in (None, *known):
            given = ", ".join(key for key in known if key.startswith("val/"))
            raise UserError(f"checkpoint.monitor is {self.monitor}, which no validation gives; {given} would do")
        super().on_validation_end(trainer, pl_module)
        self.keep_state(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._update_of_last != trainer.global_step and not trainer.fast_dev_run:
            self.keep_state(trainer)

    def _step_back(self, newest: Path) -> None:
        """Make room for a new state; at every moment the newest of before has its name."""
        names = [newest, *(newest.with_name(f"{newest.stem}-{age}{newest.suffix}") for age in range(1, self.keep_last))]
        for younger, older in reversed(list(pairwise(names))):
            if not younger.exists():
                continue
            if younger != newest:
                younger.replace(older)
                continue
            between = older.with_name(f".{older.name}.copy")
            between.unlink(missing_ok=True)  # of a process that was killed
            try:
                os.link(younger, between)
            except OSError:  # a disk that knows no second names
                shutil.copy2(younger, between)
            between.replace(older)
