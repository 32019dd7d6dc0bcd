"""Progress in a terminal."""

from __future__ import annotations

from lightning.pytorch.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Lightning's bar, for runs that are measured in updates: it would say `Epoch 0/-2` where no epoch is the last."""

    def _get_train_description(self, current_epoch: int) -> str:
        return f"Epoch {current_epoch + 1}".ljust(len(self.validation_description))
