"""A signal ends a run without losing an update."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption(pl.Callback):
    """After the first SIGINT or SIGTERM the update is finished, the state saved, and the run ends; a second one ends it
    at once.

    A validation that runs or is due is finished first. What is saved is `checkpoints/last.ckpt` of the run folder, from
    which a run goes on as if nothing had happened. Several processes end together, whichever of them gets the signal.
    Under a SLURM that requeues, SIGTERM is left to Lightning.

    Raises:
        KeyboardInterrupt: after SIGINT.
        SIGTERMException: after SIGTERM, as Lightning does.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may say what a signal does
        environment = trainer._accelerator_connector.cluster_environment
        requeued = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        for number in SIGNALS[:1] if requeued else SIGNALS:
            self._before[number] = signal.signal(number, self._receive)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        loop = trainer.fit_loop
        if loop._should_accumulate() or loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            return
        self._end_if_asked(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._end_if_asked(trainer, pl_module)

    def _end_if_asked(self, trainer: pl.Trainer, pl_module: pl.LightningModule | None = None) -> None:
        if not trainer.strategy.reduce_boolean_decision(self.received is not None, all=False):
            return
        for saves in trainer.checkpoint_callbacks if pl_module is not None else ():
            saves.on_validation_end(trainer, pl_module)  # its turn would have been after this one
        path = Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        if trainer.checkpoint_callback is not None:
            trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            saved = f"; it goes on with --ckpt_path {path}" if trainer.checkpoint_callback is not None else ""
            print(f"ended after update {trainer.global_step:,}{saved}", flush=True)
        raise _ending(self.received)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise _ending(signal.Signals(number))
        self.received = signal.Signals(number)
        print(f"{self.received.name}: the update is finished and saved first; once more ends at once", flush=True)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def _ending(received: signal.Signals | None) -> BaseException:
    return SIGTERMException() if received == signal.SIGTERM else KeyboardInterrupt()
