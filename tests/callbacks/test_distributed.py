"""Two processes say what one says of the same data, and both say it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor

from stabilize.callbacks import GradientRatio, LayerSimilarity, SpikeGuard, UpdateRatio
from stabilize.callbacks.monitor import Monitor
from stabilize.errors import UserError
from tests.callbacks.tiny import TinyTask, batches, loader, trainer


class Halves(TinyTask):
    """Every rank takes its own unequal part of the batch; the loss is scaled against DDP's mean over ranks."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.world_size > 1:
            part = slice(0, 1) if self.global_rank == 0 else slice(1, None)
            batch = (batch[0][part], batch[1][part])
        return self.loss(batch) * self.trainer.world_size


class Report(pl.Callback):
    """Writes what the other callbacks of this rank last had to say."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        latest = [getattr(callback, "latest", {}) for callback in trainer.callbacks]
        path = Path(trainer.default_root_dir) / f"rank_{trainer.global_rank}_of_{trainer.world_size}.json"
        path.write_text(json.dumps({key: value for one in latest for key, value in one.items()}))


def test_two_ranks_report_what_one_process_reports(tmp_path: Path):
    task = Halves()
    for options in ({"devices": 1}, {"devices": 2, "strategy": "ddp_spawn", "use_distributed_sampler": False}):
        callbacks: list[Any] = [GradientRatio(every=2, activations=True), LayerSimilarity(every=2), Report()]
        trainer(tmp_path, *callbacks, max_steps=2, **options).fit(copy.deepcopy(task), loader(batches(2, size=6)))
    expected = json.loads((tmp_path / "rank_0_of_1.json").read_text())
    for rank in (0, 1):
        got = json.loads((tmp_path / f"rank_{rank}_of_2.json").read_text())
        assert set(got) == set(expected)
        for key, value in got.items():
            assert value == pytest.approx(expected[key], rel=1e-5), key


@pytest.mark.parametrize("make", [GradientRatio, UpdateRatio, SpikeGuard])
def test_strategies_that_hide_their_shards_are_refused(make: type[Monitor]):
    hides: Any = SimpleNamespace(strategy=FSDPStrategy())
    with pytest.raises(UserError, match=f"{make.__name__}: FSDPStrategy shards"):
        make().setup(hides, pl.LightningModule(), "fit")
    make(every=0).setup(hides, pl.LightningModule(), "fit")
