"""Progress for a log file: a line now and then instead of a bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only


class ProgressLines(pl.Callback):
    """Prints a line at each logged update and each validation: losses and BLEU, and of which
    translations. For output that is no terminal."""

    KEYS = ("train/loss", "val/nll", "val/bleu")

    def __init__(self) -> None:
        self.last = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        update, every = trainer.global_step, trainer.log_every_n_steps
        if update != self.last and every and update % every == 0:
            self.last = update
            self._print(trainer, self.KEYS[:1])

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            evaluated = getattr(pl_module, "evaluated", {})
            self._print(trainer, self.KEYS, evaluated["val"].remarks if "val" in evaluated else "")

    @rank_zero_only
    def _print(self, trainer: pl.Trainer, keys: Sequence[str], remarks: str = "") -> None:
        metrics = trainer.callback_metrics
        found = [f"{key} {float(metrics[key]):.4g}" for key in keys if key in metrics]
        said = ", ".join(found) + (f" ({remarks})" if remarks else "")
        print(f"update {trainer.global_step:,}" + (f": {said}" if said else ""), flush=True)
