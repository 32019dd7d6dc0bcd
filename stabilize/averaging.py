"""The mean of several checkpoints, as a checkpoint of weights alone."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from stabilize import checkpoint
from stabilize.errors import UserError, at_least

STATE_OF_TRAINING = ("optimizer_states", "lr_schedulers", "callbacks", "current_model_state", "averaging_state")
"""What belongs to one moment of one run. A mean has none of it, so that no run goes on from there by mistake."""


@dataclass(frozen=True, kw_only=True)
class Which:
    """Which checkpoints are averaged.

    Args:
        last: the newest n; 0: not these.
        best: the n with the best value of what checkpoints are ranked by, `checkpoint.monitor`; 0: not these.
    """

    last: int = 0
    best: int = 0

    def __post_init__(self) -> None:
        at_least("average", last=(self.last, 0), best=(self.best, 0))
        if self.last and self.best:
            raise UserError(f"average is last {self.last} and best {self.best}; one of them would do")

    def __str__(self) -> str:
        return f"last {self.last}" if self.last else f"best {self.best}" if self.best else "all"

    @property
    def kept_by(self) -> str:
        """The key of `checkpoint` that says how many of these a run keeps."""
        return "keep_last" if self.last else "save_top_k"

    @property
    def count(self) -> int:
        """How many; 0 for all that were named."""
        return self.last or self.best

    def of(self, count: int) -> Which:
        """The same choice of another number."""
        return Which(last=count) if self.last else Which(best=count)


@dataclass(frozen=True)
class Saved:
    """A checkpoint on the disk, without its weights.

    Args:
        path: of the file.
        update: at which it was written.
        run: the name of the folder of the run that wrote it, where it says so.
        monitor: the metric that its run ranks checkpoints by; none where it was not ranked.
        score: its own value of that metric.
        higher: whether more is better.
    """

    path: Path
    update: int
    run: str | None
    monitor: str | None
    score: float
    higher: bool


def found(places: Sequence[Path]) -> list[Saved]:
    """The checkpoints in files, folders, and run folders, averages left out; of two of a run's same update the first.

    Raises:
        UserError: there is none, or one is damaged.
    """
    paths: list[Path] = []
    for place in places:
        folder = place / "checkpoints" if (place / "checkpoints").is_dir() else place
        paths += sorted(folder.glob("*.ckpt")) if folder.is_dir() else [place]
    everything = [one for path in paths if (one := _looked_at(path)) is not None]
    everything.sort(key=lambda one: (one.update, one.monitor is None))  # of one update, what was ranked before `last`
    named = ", ".join(map(str, places))
    if not everything:
        raise UserError(f"{named} has no checkpoint{checkpoint.such_as()}")
    return list({(one.path.parent, one.run, one.update): one for one in reversed(everything)}.values())


def _looked_at(path: Path) -> Saved | None:
    saved = checkpoint.read(path, "checkpoint")
    if "averaged" in saved:
        return None
    update, run = saved["global_step"], saved.get("run", {}).get("folder")
    for key, state in saved.get("callbacks", {}).items():
        # A file's own score is the last one under its own name; `last.ckpt` has none.
        ranked = state.get("best_k_models", {}) if isinstance(state, dict) else {}
        own = {Path(name).name: float(score) for name, score in ranked.items()}
        if path.name in own:
            settings = ast.literal_eval(key[key.index("{") :])
            return Saved(path, update, run, state["monitor"], own[path.name], settings["mode"] == "max")
    return Saved(path, update, run, None, math.nan, False)


def choose(candidates: Sequence[Saved], which: Which) -> list[Saved]:
    """The checkpoints to average, the newest first; fewer than asked for where there are not so many.

    Raises:
        UserError: no checkpoint says its own score, or they are ranked by different metrics.
    """
    newest = sorted(candidates, key=lambda one: -one.update)
    if not which.best:
        return newest[: which.count or None]
    ranked = [one for one in newest if one.monitor is not None and not math.isnan(one.score)]
    monitors = sorted({f"{one.monitor} ({'highest' if one.higher else 'lowest'} best)" for one in ranked})
    if len(monitors) != 1:
        why = f"are ranked by {' and '.join(monitors)}" if ranked else "have no scores: checkpoint.monitor ranks them"
        raise UserError(f"average is {which}, but the checkpoints {why}; last {which.best} would do")
    ranked.sort(key=lambda one: -one.score if one.higher else one.score)
    return sorted(ranked[: which.best], key=lambda one: -one.update)


def average(paths: Sequence[Path], which: Which) -> dict[str, Any]:
    """The mean of checkpoints, as the first of them, the newest, but for its weights and its state of training.

    Floating numbers, running statistics and clocks among them, are averaged in float64 and have the format of the
    first; whole numbers are the first's. `averaged` says of which files.

    Args:
        paths: of the files, the newest first.
        which: how they were chosen.

    Raises:
        UserError: they are of different models or tokenizers, or one has weights that are not finite.
    """
    first: dict[str, Any] = {}
    sums: dict[str, Tensor] = {}
    files: list[dict[str, Any]] = []
    for path in paths:
        saved = checkpoint.read(path, "checkpoint")
        first = first or saved
        _check(paths[0], first, path, saved)
        for name, value in saved["state_dict"].items():
            if value.is_floating_point():
                sums[name] = sums[name] + value.double() if name in sums else value.double()
        files.append({"file": str(path), "update": saved["global_step"], "sha256": checkpoint.sha256(path)})
    means = {name: (total / len(paths)).to(first["state_dict"][name].dtype) for name, total in sums.items()}
    kept = {key: value for key, value in first.items() if key not in STATE_OF_TRAINING}
    return kept | {"state_dict": first["state_dict"] | means, "averaged": {"which": str(which), "files": files}}


def _check(first_path: Path, first: dict[str, Any], path: Path, saved: dict[str, Any]) -> None:
    try:
        checkpoint.check_model(saved["task"], first["task"])
    except UserError as error:
        why = str(error).partition(": ")[2].rpartition("; ")[0].replace("in the checkpoint", "there")
        raise UserError(f"{path} is of another model than {first_path}: {why}; average checkpoints of one") from None
    if saved["tokenizer"] != first["tokenizer"]:
        raise UserError(f"{path} has another tokenizer than {first_path}; average checkpoints of one")
    shapes, others = ({name: value.shape for name, value in one["state_dict"].items()} for one in (saved, first))
    if shapes != others:
        unlike = sorted(dict(shapes.items() ^ others.items()))
        raise UserError(f"{path} has other weights than {first_path}: {unlike[0]}; average checkpoints of one model")
    broken = not_finite(saved["state_dict"].items())
    if broken:
        raise UserError(f"{path} has weights that are not finite, {broken[0]}; leave it out")


def not_finite(weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of weights that hold NaN or infinity."""
    return [name for name, value in weights if value.is_floating_point() and not value.isfinite().all()]


def write(chosen: Sequence[Saved], which: Which, output: Path) -> None:
    """Average checkpoints into a file.

    Raises:
        UserError: as `average`; or the file cannot be written.
    """
    checkpoint.DurableFiles().save_checkpoint(average([one.path for one in chosen], which), output)
