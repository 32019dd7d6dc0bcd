"""From where a run goes on, and what it takes along into its new folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from stabilize import checkpoint, slurm
from stabilize.commands.narrator import Narrator
from stabilize.errors import UserError

State: TypeAlias = dict[str, Any]
"""A checkpoint."""

CHECKPOINT = "STABILIZE_CHECKPOINT"
"""Environment variable by which the process that starts a run names the checkpoint that was found to the others."""

NEWEST = ("last", "auto")
"""In place of a path, the newest good checkpoint of all runs; where there is none, `auto` starts from nothing."""


def start(asked: str | None, folder: Path, beside: Path | None, words: Sequence[str] | None) -> Path | None:
    """The checkpoint from which to go on, if any.

    A SLURM job that was started again goes on from where the same command ended in it, whatever it was asked first.

    Args:
        asked: a path, or one of `NEWEST`.
        folder: of all runs.
        beside: where checkpoints lie too.
        words: the command line of a `fit`; none: another verb, which does not go on.

    Raises:
        UserError: `last` was asked for, and there is none.
    """
    job = slurm.job() if words else None
    if CHECKPOINT in os.environ and rank_zero_only.rank > 0:  # type: ignore[attr-defined]
        return Path(known) if (known := os.environ[CHECKPOINT]) else None
    path = None
    if job:
        path = checkpoint.newest(folder, beside, f"*_{of_job(job)}*", {"job": job, "words": words})
    if path is None and asked in NEWEST:
        path = checkpoint.newest(folder, beside)
    elif path is None and asked is not None:
        path = Path(asked)
    os.environ[CHECKPOINT] = str(path or "")
    if path is None and asked == "last":
        raise UserError(f"ckpt_path is last, but no run in {folder} has a checkpoint; auto would start from nothing")
    if rank_zero_only.rank == 0 and (asked in NEWEST or path != (asked and Path(asked))):  # type: ignore[attr-defined]
        print("a fresh start: there is no checkpoint yet" if path is None else f"goes on from {path}", flush=True)
    return path


def of_job(job: str | None) -> str:
    """What the name of a run folder has of its SLURM job."""
    return f"job{job}_" if job else ""


class Continuity(pl.Callback):
    """What a run that goes on takes along: its name in Weights & Biases, what the narrator knows, and the numbers of
    its last update, which the loggers get only after the checkpoint is written.

    Args:
        name: of the run, the same in all its folders.
        words: the command line.
    """

    def __init__(self, name: str, words: Sequence[str]) -> None:
        self.name = name
        self.words = list(words)
        self._unheard: dict[str, float] = {}

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: State) -> None:
        narrators = _narrators(trainer)
        checkpoint["run"] = {
            "name": self.name,
            "job": slurm.job(),
            "words": self.words,
            "diaries": [narrator.diary.state_dict() for narrator in narrators],
            "unheard": _unheard(trainer) if narrators else {},
        }

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: State) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        run = checkpoint.get("run", {})
        self._unheard = run.get("unheard", {})
        for narrator, known in zip(_narrators(trainer), run.get("diaries", ()), strict=False):
            narrator.diary.load_state_dict(known)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        numbers, self._unheard = self._unheard, {}
        for logger in trainer.loggers if numbers else ():
            logger.log_metrics(dict(numbers), step=trainer.global_step - 1)


def _narrators(trainer: pl.Trainer) -> list[Narrator]:
    return [logger for logger in trainer.loggers if isinstance(logger, Narrator)]


def _unheard(trainer: pl.Trainer) -> dict[str, float]:
    """The numbers of an update that is being ended."""
    batches, connector = trainer.fit_loop.epoch_loop.batch_progress.current, trainer._logger_connector
    is_ending = trainer.training and batches.processed > batches.completed and not trainer.fit_loop._should_accumulate()
    heard = [narrator.diary.losses[-1:] for narrator in _narrators(trainer)]
    if (
        not is_ending
        or not connector.should_update_logs
        or any(last[0][0] == trainer.global_step for last in heard if last)
    ):
        return {}
    return {"epoch": float(trainer.current_epoch)} | {
        key: float(value) for key, value in connector.metrics["log"].items()
    }
