"""A callback that sends the process a signal, as a user or a batch system does."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning.pytorch as pl


class SendSignal(pl.Callback):
    """Sends `name` to this process at the start of an update, so many times."""

    def __init__(self, name: str, update: int = 1, times: int = 1) -> None:
        self.number = signal.Signals[name]
        self.update, self.times = update, times

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.update - 1:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
            self.times = 0
