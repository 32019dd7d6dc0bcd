"""A signal ends a run without losing an update."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from stabilize import slurm
from stabilize.callbacks.checkpoints import Checkpoints

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption(pl.Callback):
    """After the first SIGINT or SIGTERM the update is finished, the state saved, and the run ends; a second one ends it
    at once.

    A validation that runs or is due is finished first. What is saved is `last.ckpt` of `Checkpoints`, from which a run
    goes on as if nothing had happened. Several processes end together, whichever of them gets the signal. An evaluation
    has nothing to save, and ends at once.

    In a SLURM job Lightning's signal for it (SIGUSR1, or what `trainer.plugins` gives SLURMEnvironment) does the same
    and queues the job again; the SIGTERM that SLURM sends after it changes nothing.

    Raises:
        KeyboardInterrupt: after SIGINT, in a run of one process.
        SIGTERMException: after another signal, with the exit code 128 + its number; in all but the first of several
            processes, which end as they all agreed to, with 0.
    """

    def __init__(self) -> None:
        self.received = 0
        """The signal's number."""
        self._requeues: int | None = None
        """The signal after which the job is queued again."""
        self._before: Any = None
        """What SIGINT did before; Lightning puts back all others."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.received = signal.SIGTERM if trainer.received_sigterm else 0  # Lightning takes note while all is prepared
        environment = trainer._accelerator_connector.cluster_environment
        slurm_asks = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self._requeues = environment.requeue_signal if slurm_asks else None
        self._listen(self._receive)

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
        # After the last update all is done and saved, but what would follow is not wanted.
        if received := self._over_ranks(trainer):
            raise _ending_together(trainer, received)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self._listen(self._end_at_once)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._listen(self._end_at_once)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._listen(self._end_at_once)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and self._before is not None:
            # Lightning ignores it from now on.
            signal.signal(signal.SIGINT, self._before)

    def _listen(self, handler: Callable[[int, FrameType | None], None]) -> None:
        """Until the trainer is done, which then puts back what was there before it."""
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may say what a signal does
        self._before = signal.getsignal(signal.SIGINT)
        for number in SIGNALS if self._requeues is None else (*SIGNALS, self._requeues):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as in a job in the background of a script
                signal.signal(number, handler)

    def _over_ranks(self, trainer: pl.Trainer) -> int:
        """The signal that any of the processes has received, or zero."""
        if trainer.world_size == 1:
            return self.received
        number = torch.tensor(float(self.received), device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(number, reduce_op="max"))

    def _end(self, trainer: pl.Trainer, received: int) -> NoReturn:
        places = [saves.keep_state(trainer) for saves in trainer.checkpoint_callbacks if isinstance(saves, Checkpoints)]
        if trainer.is_global_zero:
            saved = f"; it goes on with --ckpt_path {places[0]}" if places else ""
            _say(f"ended after update {trainer.global_step:,}{saved}")
            if received == self._requeues:
                _say(slurm.requeue())
        raise _ending_together(trainer, received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and self.received == self._requeues and number != signal.SIGINT:
            return
        if self.received:
            raise _ending(number)
        self.received = number
        _say(f"{signal.Signals(number).name}: the update is finished and saved first; once more ends at once")

    def _end_at_once(self, number: int, frame: FrameType | None) -> NoReturn:
        raise _ending(number)


def _say(words: str) -> None:
    # Ctrl-C ends a reader behind a pipe too, and may come while something else is being printed.
    with contextlib.suppress(OSError, RuntimeError):
        print(words, flush=True)


def _ending(received: int) -> BaseException:
    return KeyboardInterrupt() if received == signal.SIGINT else SIGTERMException(128 + received)


def _ending_together(trainer: pl.Trainer, received: int) -> BaseException:
    """The first process has the exit code of the run; any other's, but 0, looks as if it had died."""
    if trainer.world_size == 1:
        return _ending(received)
    return SIGTERMException(128 + received if trainer.is_global_zero else 0)
