"""A run whose weights are sharded over two processes (FSDP2): python -m tests.callbacks.sharded FOLDER [skip].

`skip`: three updates, the second of which is poisoned in the second process, and skipped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from stabilize.callbacks import SpikeGuard
from stabilize.sharding import FullySharded
from stabilize.task import TranslationTask
from tests.callbacks.monitors import MONITORS, Report, Shares, batch, watched_task
from tests.callbacks.poison import Poison
from tests.tasks import fit, small_trainer


class Moved(pl.Callback):
    """Writes whether each update moved a weight that this process has, all of which stay finite."""

    def __init__(self) -> None:
        self.moved: list[bool] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.before = [weight.detach().to_local().clone() for weight in pl_module.parameters()]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        now = [weight.detach().to_local() for weight in pl_module.parameters()]
        assert all(weight.isfinite().all() for weight in now)
        self.moved.append(not all(one.equal(other) for one, other in zip(now, self.before, strict=True)))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        path = Path(trainer.default_root_dir) / f"moved_{trainer.global_rank}.json"
        path.write_text(json.dumps(self.moved))


if __name__ == "__main__":
    folder, *skip = sys.argv[1:]
    strategy = FullySharded()
    watching: list[pl.Callback] = [*(make() for make in MONITORS.values()), Report()]
    if skip:
        watching = [SpikeGuard(every=1, policy="skip"), Poison({2: "nan"}, rank=1), Moved()]
    batches = [batch()] * (3 if skip else 1)
    trainer = small_trainer(Path(folder), *watching, max_steps=len(batches), devices=2, strategy=strategy)
    fit(trainer, watched_task(kind=TranslationTask if skip else Shares), batches)
