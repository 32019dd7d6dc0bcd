"""Callbacks that do to a run what happens to it in life, and one that writes down all it does."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch


class SendSignal(pl.Callback):
    """Sends `name` to this process, one of several, at the start of an update, so many times, and of a test."""

    def __init__(self, name: str, update: int = 1, times: int = 1, rank: int = 0) -> None:
        self.number = signal.Signals[name]
        self.update, self.times, self.rank = update, times, rank

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.update - 1 and trainer.global_rank == self.rank:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
            self.times = 0

    def on_test_batch_start(self, *_: Any) -> None:
        os.kill(os.getpid(), self.number)


class CloseLast(pl.Callback):
    """Lets the first process close when all others have ended, and leaves their exit codes in `codes`."""

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            Path("codes").write_text(json.dumps([process.wait() for process in trainer.strategy.launcher.procs]))


class Record(pl.Callback):
    """Writes a line for each update and each validation, every number to the last bit."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.lines: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"lines": self.lines[:]}  # some, where a validation has cut an update in two

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lines = state_dict["lines"]

    def write(self, **numbers: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(numbers) + "\n")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, number: int) -> None:
        self.lines += batch.index.tolist()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        if trainer.is_global_zero:
            rates = [group["lr"].hex() for group in optimizer.param_groups]
            loss = float(pl_module.update_loss).hex()
            self.write(update=trainer.global_step + 1, loss=loss, rates=rates, lines=self.lines)
        self.lines = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            scores = {key: value.item().hex() for key, value in trainer.callback_metrics.items() if key[:4] == "val/"}
            self.write(validated=trainer.global_step, batch=trainer.fit_loop.total_batch_idx, scores=scores)


FILES = ("half_written", "unnamed", "named", "unlinked", "stepped_back", "in_place")
"""The moments of a checkpoint."""


class Die(pl.Callback):
    """Kills this process, as `kill -9` does, when something happens in it for the n-th time.

    Args:
        when: `set_up`, `restored`, `batch_start`, `backward`, `step`, `batch_end`, `validation_batch`; of the n-th
            checkpoint `half_written`, `unnamed` (it is written, and has no name yet) or `named`; of the n-th last state
            `unlinked` (the one before the last is gone), `stepped_back` (the last one is there twice) or `in_place`;
            `meanwhile`: after the n-th batch, whatever the process does when another thread gets its turn; or `clock`:
            n milliseconds after this is made, whatever it does then.
        number: n.
        rank: of the process, where there are several.
    """

    def __init__(self, when: str, number: int, rank: int = 0) -> None:
        self.when, self.left, self.rank = when, number, rank
        if when in FILES:
            self.watch_files()
        if when == "clock":
            alarm = threading.Timer(number / 1000, os.kill, (os.getpid(), signal.SIGKILL))
            alarm.daemon = True  # a run that ends before it has ended
            alarm.start()

    def count(self, trainer: pl.Trainer | None, when: str) -> None:
        self.left -= when == self.when and (trainer is None or trainer.global_rank == self.rank)
        if when == self.when and self.left == 0:
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_files(self) -> None:
        save, replace, link = torch.save, Path.replace, os.link

        def half(checkpoint: Any, file: Any) -> None:
            if self.when == "half_written" and self.left == 1:
                file.write(b"PK\x03\x04" * 10_000)
                file.flush()
            self.count(None, "half_written")
            save(checkpoint, file)

        def name(path: Path, target: Any) -> Any:
            before, after = {".partial": ("unnamed", "named"), ".ckpt": ("stepped_back", "in_place")}.get(
                path.suffix, ("", "")
            )
            self.count(None, before)
            replace(path, target)
            self.count(None, after)

        def second_name(path: Path, target: Path) -> None:
            self.count(None, "unlinked")
            link(path, target)

        torch.save, Path.replace, os.link = half, name, second_name  # type: ignore[assignment]

    def setup(self, trainer: pl.Trainer, *_: Any, **stage: Any) -> None:
        self.count(trainer, "set_up")

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.count(trainer, "restored")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.count(trainer, "batch_start")

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.count(trainer, "backward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self.count(trainer, "step")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.count(trainer, "batch_end")
        if self.when == "meanwhile" and trainer.global_rank == self.rank:
            self.left -= 1
            if self.left == 0:
                threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGKILL), daemon=True).start()

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.count(trainer, "validation_batch")


class FillDisk(pl.Callback):
    """From the start of an update on, no file of this process may grow beyond so many bytes."""

    def __init__(self, update: int, size: int) -> None:
        self.update, self.size = update, size

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.update - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))
