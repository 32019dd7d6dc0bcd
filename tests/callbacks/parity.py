"""How far every measure is off on every path, next to float32, eager, one process: python -m tests.callbacks.parity."""

from __future__ import annotations

import copy
import functools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from stabilize.data.batch import Batch
from stabilize.model.layer import compiled_run
from stabilize.task import TranslationTask
from tests.callbacks.monitors import MONITORS, Report, Shares, batch, padded, parts, watch, watched_task
from tests.checkout import ROOT
from tests.tasks import fit, small_trainer

Numbers = dict[str, float]


def scaled(folder: Path) -> Numbers:
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    return watch(folder, watched_task(), [batch()], plugins=[plugin])


def scaled_fused(folder: Path) -> Numbers:
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    fused = functools.partial(torch.optim.SGD, lr=0.5, fused=True)
    return watch(folder, watched_task(optimizer=fused), [batch()], plugins=[plugin])


def frozen(folder: Path) -> Numbers:
    """What the first layer of the encoder, which learns nothing, has nothing to do with."""
    task = watched_task()
    task.model.encoder.layers[0].requires_grad_(False)
    found = watch(folder, task, [batch()])
    found.pop("gradient_norm/total")
    return found


class Nothing(TranslationTask):
    """Has nothing to learn from its first batch."""

    def training_step(self, given: Batch, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx == 0 else super().training_step(given, batch_idx)


class Copies(TranslationTask):
    """Trains a copy of the model too, in every forward."""

    def training_step(self, given: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(given, batch_idx)
        twin = copy.deepcopy(self.model)
        twin(given.source, given.target + 1)
        return loss


def averaged(folder: Path) -> Numbers:
    monitors = [make() for make in MONITORS.values()]
    trainer = small_trainer(folder, EMAWeightAveraging(decay=0.75), *monitors, max_steps=1)
    fit(trainer, watched_task(), [batch()])
    return {key: value for monitor in monitors for key, value in monitor.latest.items()}


def compiled(folder: Path) -> Numbers:
    plain, torch.compile = torch.compile, functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    compiled_run.cache_clear()
    try:
        return watch(folder, watched_task(compile_layers=True), [batch()])
    finally:
        torch.compile = plain
        compiled_run.cache_clear()


def said_by_both(folder: Path) -> Numbers:
    first, second = (json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    return first


def two_shards(folder: Path) -> Numbers:
    """The same, where weights are sharded (FSDP2)."""
    command = [sys.executable, "-m", "tests.callbacks.sharded", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return said_by_both(folder)


def two_ranks(folder: Path) -> Numbers:
    """Each has sentences of its own; both say the same."""
    monitors = [make() for make in MONITORS.values()]
    trainer = small_trainer(folder, *monitors, Report(), max_steps=1, devices=2, strategy="ddp_spawn")
    fit(trainer, watched_task(kind=Shares), [batch()])
    return said_by_both(folder)


PATHS: dict[str, Callable[[Path], Numbers]] = {
    "bf16-mixed": lambda folder: watch(folder, watched_task(), [batch()], precision="bf16-mixed"),
    "16-mixed": scaled,
    "16-mixed fused": scaled_fused,
    "3 batches": lambda folder: watch(folder, watched_task(), parts(), accumulate_grad_batches=3, max_steps=1),
    "padded": lambda folder: watch(folder, watched_task(), [padded(batch())]),
    "checkpointed": lambda folder: watch(folder, watched_task(checkpoint_layers=True), [batch()]),
    "compiled": compiled,
    "frozen": frozen,
    "None first": lambda folder: watch(folder, watched_task(kind=Nothing), [batch(), batch()]),
    "deep copy": lambda folder: watch(folder, watched_task(kind=Copies), [batch()]),
    "averaged": averaged,
    "2 ranks": two_ranks,
    "2 shards": two_shards,
}


def differences(found: Numbers, expected: Numbers) -> dict[str, float]:
    """The largest relative difference of each kind of measure; absolute where the true value is zero, infinite where
    there is no number."""
    kinds: dict[str, float] = {}
    for key, value in expected.items():
        kind = key.split("/")[0]
        off = abs(found.get(key, math.nan) - value) / (abs(value) or 1.0)
        kinds[kind] = max(kinds.get(kind, 0.0), math.inf if math.isnan(off) else off)
    return kinds


def table(found: dict[str, dict[str, float]]) -> str:
    """A row a measure, a column a path."""
    kinds = dict.fromkeys(kind for column in found.values() for kind in column)
    head = f"{'':34}" + "".join(f"{path:>16}" for path in found)
    rows = [f"{kind:34}" + "".join(f"{column[kind]:16.1e}" for column in found.values()) for kind in kinds]
    return "\n".join([head, *rows])


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        run: Any = {name: Path(place) / name.replace(" ", "_") for name in ("plain", *PATHS)}
        expected = watch(run["plain"], watched_task(), [batch()])
        found = {}
        for name, path in PATHS.items():
            numbers = path(run[name])
            exist = {key: value for key, value in expected.items() if key in numbers or path is not frozen}
            exist.pop("gradient_norm/total" if path is frozen else "", None)
            found[name] = differences(numbers, exist)
    print(table(found))


if __name__ == "__main__":
    main()
