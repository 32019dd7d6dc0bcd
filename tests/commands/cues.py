"""A callback that sends the process a signal, as a user or a batch system does."""

from __future__ import annotations

import os
import signal
from typing import Any

from lightning.pytorch import Callback


class SendSignal(Callback):
    """Sends `name` to this process after the first update."""

    def __init__(self, name: str) -> None:
        self.number = signal.Signals[name]

    def on_train_batch_end(self, *arguments: Any) -> None:
        os.kill(os.getpid(), self.number)
