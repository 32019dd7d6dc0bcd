"""From where a run goes on, and what it takes along into its new folder."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
"""In place of a path, the newest good checkpoint of a run with these settings; where there is none, `auto` starts from
nothing."""

DECISIVE = ("seed_everything", "weights", "model", "data")
"""The keys of a config that decide what a run's weights become; others, such as `trainer.max_steps`, may change where
it goes on."""

INDECISIVE = (
    *(f"model.{key}" for key in ("search", "validation_search", "scores", "validation_scores", "bleu_tokenizer")),
    *(f"model.{key}" for key in ("samples", "compile_layers", "checkpoint_layers")),
    *(f"data.{key}" for key in ("test", "test_references", "workers", "baselines", "cache")),
    *(f"data.evaluation_{key}" for key in ("batch_tokens", "maximum_length")),
)
"""What may change below those."""


@dataclass(frozen=True)
class Asked:
    """What a command asks for.

    Attributes:
        checkpoint: a path, one of `NEWEST`, or none.
        folder: of all runs.
        beside: where checkpoints lie too.
        configs: the files that it names; the config of a run asks for that run.
        settings: as `decisive` has them.
        words: the command line of a `fit`; none: another verb, which does not go on.
    """

    checkpoint: str | None
    folder: Path
    beside: Path | None
    configs: Sequence[Path]
    settings: Mapping[str, Any]
    words: Sequence[str] | None

    def folders(self, runs: str = "*") -> list[Path]:
        """Where checkpoints of some of the runs lie."""
        return [*self.folder.glob(f"{runs}/checkpoints"), *filter(None, [self.beside])]


def decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a config that decide what a run's weights become, by key."""
    chosen = checkpoint.flat({key: config.get(key) for key in DECISIVE})
    return {key: value for key, value in chosen.items() if not f"{key}.".startswith(tuple(f"{k}." for k in INDECISIVE))}


def start(asked: Asked) -> Path | None:
    """The checkpoint from which to go on, if any.

    A SLURM job that was started again goes on from where the same command ended in it, whatever it was asked first.

    Raises:
        UserError: `last` was asked for, and there is none.
    """
    if CHECKPOINT in os.environ and rank_zero_only.rank > 0:  # type: ignore[attr-defined]
        return Path(known) if (known := os.environ[CHECKPOINT]) else None
    path, given = _of_this_job(asked), asked.checkpoint
    if path is None and given is not None:
        path = _of_these_settings(asked) if given in NEWEST else Path(given)
    os.environ[CHECKPOINT] = str(path or "")
    if path is not None and asked.words is not None:
        checkpoint.clear(path.parent)
    if path is None and given == "last":
        raise UserError(f"ckpt_path is last, but {_why_none(asked)}; auto would start from nothing")
    if rank_zero_only.rank == 0 and (given in NEWEST or path != (given and Path(given))):  # type: ignore[attr-defined]
        print(f"a fresh start: {_why_none(asked)}" if path is None else f"goes on from {path}", flush=True)
    return path


def _of_this_job(asked: Asked) -> Path | None:
    """Where the same command ended in a SLURM job that was started again."""
    job = slurm.job()
    if job is None or asked.words is None or not slurm.is_started_again():
        return None

    def fits(saved: State) -> bool:
        run = _run(saved)
        return (run.get("job"), run.get("words")) == (job, list(asked.words or ()))

    return checkpoint.newest(asked.folders(f"*_{of_job(job)}*"), fits)


def _of_these_settings(asked: Asked) -> Path | None:
    """The newest state of the run whose config is named, else of any run with the same settings."""

    def fits(saved: State, name: str | None = None) -> bool:
        return name in (None, _run(saved).get("name")) and not _unlike(saved, asked)

    for config in asked.configs:
        folder = config.parent / "checkpoints"
        if own := checkpoint.newest([folder]):
            name = _run(checkpoint.read(own)).get("name")
            if path := checkpoint.newest([*asked.folders(), folder], functools.partial(fits, name=name)):
                return path
    return checkpoint.newest(asked.folders(), fits)


def _why_none(asked: Asked) -> str:
    """What stands in the way of the newest checkpoint of all."""
    with warnings.catch_warnings(action="ignore"):  # damaged ones have been told
        newest = checkpoint.newest(asked.folders())
    if newest is None:
        return f"no run in {asked.folder} has a checkpoint"
    first, *more = _unlike(checkpoint.read(newest), asked)
    others = f" and {len(more)} more" if more else ""
    return f"no run in {asked.folder} has these settings; in the newest, {newest}, {first}{others}"


def _unlike(saved: State, asked: Asked) -> list[str]:
    return checkpoint.differences(_run(saved).get("settings", {}), asked.settings)


def _run(saved: State) -> State:
    return saved.get("run", {})


def of_job(job: str | None) -> str:
    """What the name of a run folder has of its SLURM job."""
    return f"job{job}_" if job else ""


class Continuity(pl.Callback):
    """What a run that goes on takes along: its name in Weights & Biases, what the narrator knows, where the states of
    before lie, and the numbers of its last update, which the loggers get only after the checkpoint is written.

    Args:
        name: of the run, the same in all its folders.
        words: the command line.
        settings: as `decisive` has them.

    Attributes:
        line: the runs that it went on from, the first one first: the name of the run `folder`, where its `checkpoints`
            lie, the last `update` that this run has of it.
    """

    def __init__(self, name: str, words: Sequence[str], settings: Mapping[str, Any]) -> None:
        self.name = name
        self.words = list(words)
        self.settings = dict(settings)
        self.line: list[State] = []
        self._unheard: dict[str, float] = {}

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: State) -> None:
        narrators = _narrators(trainer)
        checkpoint["run"] = {
            "name": self.name,
            "folder": Path(trainer.default_root_dir).name,
            "line": self.line,
            "job": slurm.job(),
            "words": self.words,
            "settings": self.settings,
            "found": _found(trainer),
            "diaries": [narrator.diary.state_dict() for narrator in narrators],
            "unheard": _unheard(trainer) if narrators else {},
        }

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: State) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        run = checkpoint.get("run", {})
        self._unheard = run.get("unheard", {})
        place, update = str(Path(trainer.ckpt_path or "").parent), checkpoint["global_step"]
        self.line = [*run.get("line", []), {"folder": run.get("folder"), "checkpoints": place, "update": update}]
        for narrator, known in zip(_narrators(trainer), run.get("diaries", ()), strict=False):
            narrator.diary.load_state_dict(known)
        if "settings" in run:
            self._tell_changes(trainer, run)

    def _tell_changes(self, trainer: pl.Trainer, run: State) -> None:
        """Warn of what is not as it was, and yet no reason to refuse the checkpoint."""
        saved, here = (
            {key: value for key, value in settings.items() if not key.startswith(checkpoint.OPTIMIZER)}
            for settings in (run["settings"] | run["found"], self.settings | _found(trainer))
        )
        if unlike := checkpoint.differences(saved, here):
            warnings.warn(
                f"{'; '.join(unlike)}; the run goes on with what is here, and with the checkpoint's tokenizer",
                stacklevel=2,
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        numbers, self._unheard = self._unheard, {}
        for logger in trainer.loggers if numbers else ():
            logger.log_metrics(dict(numbers), step=trainer.global_step - 1)


def _found(trainer: pl.Trainer) -> State:
    """Settings that show when all is set up."""
    text = getattr(trainer.datamodule, "account", {}).get("train", {}).get("sha256")
    return {
        "trainer.precision": str(trainer.precision),
        "trainer.gradient_clip_val": trainer.gradient_clip_val,
        "trainer.gradient_clip_algorithm": trainer.gradient_clip_algorithm and trainer.gradient_clip_algorithm.value,
        "trainer.accumulate_grad_batches times processes": trainer.accumulate_grad_batches * trainer.world_size,
        "the SHA-256 of the training text": text and text[:12],
    }


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
