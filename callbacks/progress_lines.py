"""Progress for a log file: a line at each validation instead of a bar."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only


class ProgressLines(pl.Callback):
    """Prints one line at each validation: updates, training and validation metrics. For output that is no terminal."""

    KEYS = ("train/loss", "val/nll", "val/bleu")

    @rank_zero_only
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        found = [f"{key} {float(metrics[key]):.4g}" for key in self.KEYS if key in metrics]
        print(f"update {trainer.global_step:,}: {', '.join(found)}", flush=True)
