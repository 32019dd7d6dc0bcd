"""How far every measure is off on every path, next to float32, eager, one process: python -m tests.callbacks.parity."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision

from stabilize.model.layer import compiled_run
from tests.callbacks.monitors import MONITORS, Report, Shares, batch, padded, parts, watch, watched_task
from tests.tasks import fit, small_trainer

Numbers = dict[str, float]


def scaled(folder: Path) -> Numbers:
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    return watch(folder, watched_task(), [batch()], plugins=[plugin])


def compiled(folder: Path) -> Numbers:
    plain, torch.compile = torch.compile, functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    compiled_run.cache_clear()
    try:
        return watch(folder, watched_task(compile_layers=True), [batch()])
    finally:
        torch.compile = plain
        compiled_run.cache_clear()


def two_ranks(folder: Path) -> Numbers:
    """Each has sentences of its own; both say the same."""
    monitors = [make() for make in MONITORS.values()]
    trainer = small_trainer(folder, *monitors, Report(), max_steps=1, devices=2, strategy="ddp_spawn")
    fit(trainer, watched_task(kind=Shares), [batch()])
    first, second = (json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    return first


PATHS: dict[str, Callable[[Path], Numbers]] = {
    "bf16-mixed": lambda folder: watch(folder, watched_task(), [batch()], precision="bf16-mixed"),
    "16-mixed": scaled,
    "3 batches": lambda folder: watch(folder, watched_task(), parts(), accumulate_grad_batches=3, max_steps=1),
    "padded": lambda folder: watch(folder, watched_task(), [padded(batch())]),
    "checkpointed": lambda folder: watch(folder, watched_task(checkpoint_layers=True), [batch()]),
    "compiled": compiled,
    "2 ranks": two_ranks,
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
    head = f"{'':34}" + "".join(f"{path:>14}" for path in found)
    rows = [f"{kind:34}" + "".join(f"{column[kind]:14.1e}" for column in found.values()) for kind in kinds]
    return "\n".join([head, *rows])


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        run: Any = {name: Path(place) / name.replace(" ", "_") for name in ("plain", *PATHS)}
        expected = watch(run["plain"], watched_task(), [batch()])
        found = {name: differences(path(run[name]), expected) for name, path in PATHS.items()}
    print(table(found))


if __name__ == "__main__":
    main()
