"""A signal ends a run without losing an update."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption(pl.Callback):
    """After the first SIGINT or SIGTERM the update is finished, the state saved, and the run ends; a second one ends it
    at once.

    A validation that runs or is due is finished first. What is saved is `checkpoints/last.ckpt` of the run folder, from
    which a run goes on as if nothing had happened, but that its best checkpoint is counted anew. Several processes end
    together, whichever of them gets the signal. Under a SLURM that requeues, SIGTERM is left to Lightning.

    Raises:
        KeyboardInterrupt: after SIGINT.
        SIGTERMException: after SIGTERM, as Lightning does.
    """

    def __init__(self) -> None:
        self.received = 0
        """The signal's number."""
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.received = 0
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may say what a signal does
        environment = trainer._accelerator_connector.cluster_environment
        requeued = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        for number in SIGNALS[:1] if requeued else SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as in a job in the background of a script
                self._before[number] = signal.signal(number, self._receive)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any) -> None:
        loop = trainer.fit_loop
        if loop._should_accumulate() or not (received := self._over_ranks(trainer)):
            return
        if not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            for saves in trainer.checkpoint_callbacks:
                saves.on_train_batch_end(trainer, pl_module, *batch)
            trainer._logger_connector.on_batch_end()  # the update's numbers reach the loggers, as they would have
            trainer._logger_connector.update_train_step_metrics()
            self._end(trainer, received)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if received := self._over_ranks(trainer):
            for saves in trainer.checkpoint_callbacks:
                saves.on_validation_end(trainer, pl_module)
            self._end(trainer, received)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.received:  # after the last update: all is done and saved, but what would follow is not wanted
            raise _ending(self.received)
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _over_ranks(self, trainer: pl.Trainer) -> int:
        """The signal that any of the processes has received, or zero."""
        if trainer.world_size == 1:
            return self.received
        number = torch.tensor(float(self.received), device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(number, reduce_op="max"))

    def _end(self, trainer: pl.Trainer, received: int) -> NoReturn:
        path, saved = Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt", ""
        if trainer.checkpoint_callback is not None:
            trainer.save_checkpoint(path)
            saved = f"; it goes on with --ckpt_path {path}"
        if trainer.is_global_zero:
            _say(f"ended after update {trainer.global_step:,}{saved}")
        raise _ending(received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise _ending(number)
        self.received = number
        _say(f"{signal.Signals(number).name}: the update is finished and saved first; once more ends at once")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def _say(words: str) -> None:
    # Ctrl-C ends a reader behind a pipe too, and may come while something else is being printed.
    with contextlib.suppress(OSError, RuntimeError):
        print(words, flush=True)


def _ending(received: int) -> BaseException:
    return SIGTERMException() if received == signal.SIGTERM else KeyboardInterrupt()
