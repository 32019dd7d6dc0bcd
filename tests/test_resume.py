"""A run goes on from a checkpoint as if it had never stopped: every stabiliser, and every place in the data."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer

from stabilize.callbacks import Checkpoints, GradientRatio, LayerSimilarity, SpikeGuard
from stabilize.data.pairs import Pairs
from stabilize.decoding import BeamSearch
from stabilize.model.projection import Projection
from stabilize.strategies import (
    Cosine,
    DeepNormInit,
    Initialization,
    InverseSqrt,
    LayerNorm,
    Norm,
    PowerNorm,
    Stabilizer,
    StochasticDepth,
    Warmup,
    WarmupStableDecay,
    Xavier,
)
from tests.models import STABILIZERS, STARTS, every_start
from tests.tasks import ENGLISH, GERMAN, Sentences, curve, rows, small_task, small_trainer

ADAM = functools.partial(torch.optim.Adam, lr=1e-2)


def task(name: str) -> Any:
    """Two layers a stack, so that what a first and a last layer have of their own is there; with dropout."""
    encoder, decoder = (STABILIZERS | STARTS)[name]
    shape = {"encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}
    return small_task(encoder, decoder_stabilizer=decoder, optimizer=ADAM, **shape)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@every_start
def test_two_updates_and_one_more_are_three(name: str, tmp_path: Path) -> None:
    every_update = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"max_steps": 3, "logger": False}
    whole, resumed = task(name), task(name)
    small_trainer(tmp_path, every_update, enable_checkpointing=True, **options).fit(whole, datamodule=Sentences())
    small_trainer(tmp_path, **options).fit(resumed, datamodule=Sentences(), ckpt_path=tmp_path / "step=2.ckpt")

    two = torch.load(tmp_path / "step=2.ckpt", weights_only=True)["state_dict"]
    assert not all(value.equal(two[key]) for key, value in whole.state_dict().items())
    for key, value in whole.state_dict().items():
        assert resumed.state_dict()[key].equal(value), key


class Seen(pl.Callback):
    """What each update was made of: the lines, the learning rates, the loss."""

    def __init__(self) -> None:
        self.updates: list[tuple[list[int], list[float], float]] = []
        self.lines: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, number: int) -> None:
        self.lines += batch.index.tolist()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        self.updates.append((self.lines, rates, float(pl_module.update_loss)))
        self.lines = []


def text(**options: Any) -> Sentences:
    """24 pairs in some batches."""
    return Sentences({"train": Pairs([*ENGLISH] * 4, [*GERMAN] * 4)}, **{"batch_tokens": 70} | options)


def dropping_task(stabilizer: Stabilizer | None = None) -> Any:
    short = BeamSearch(beam=1, maximum_ratio=0.1, maximum_extra=2)
    chosen = stabilizer or Stabilizer(warmup=InverseSqrt(3))
    return small_task(chosen, optimizer=ADAM, dropout=0.2, validation_search=short)


def run(folder: Path, data: Sentences, *callbacks: pl.Callback, **options: Any) -> tuple[Seen, dict[str, Any]]:
    """Three epochs with two batches an update; what was seen, and the weights."""
    task, start = dropping_task(options.pop("stabilizer", None)), options.pop("ckpt_path", None)
    seen = Seen()
    settings = {"max_epochs": 3, "accumulate_grad_batches": 2, "enable_checkpointing": bool(callbacks)} | options
    small_trainer(folder, seen, *callbacks, **settings).fit(task, datamodule=data, ckpt_path=start)
    return seen, task.state_dict()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert all(found[key].equal(expected[key]) for key in expected)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("workers", [0, 2])
def test_no_line_is_read_twice_and_none_left_out(tmp_path: Path, workers: int) -> None:
    """Stopped at every third update of several epochs, shuffled and sorted by length (FIELD_REPORTS 2.8)."""
    states = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    whole, weights = run(tmp_path, text(), states, logger=False)
    epoch = len(whole.updates) // 3
    assert epoch % 3 != 0
    for k in range(3):
        assert sorted(line for update in whole.updates[k * epoch : (k + 1) * epoch] for line in update[0]) == [
            *range(24)
        ]
    assert whole.updates[:epoch] != whole.updates[epoch : 2 * epoch]
    stops = range(3, 3 * epoch, 3 if workers == 0 else 6)
    for stop in stops:
        path = tmp_path / f"step={stop}.ckpt"
        resumed, found = run(tmp_path, text(workers=workers), logger=False, ckpt_path=path)
        assert resumed.updates == whole.updates[stop:]
        assert_same(found, weights)
    assert len(stops) > 1


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_validation_after_each_epoch_changes_nothing(tmp_path: Path) -> None:
    """The default schedule, stopped within an epoch, just before its end, and after the validation at its end."""
    states = Checkpoints(every=1, keep_last=99, dirpath=tmp_path / "states")
    validated = {"limit_val_batches": 1.0}
    whole, weights = run(tmp_path / "whole", text(), states, **validated)
    epoch = len(whole.updates) // 3
    assert epoch > 2
    saved = {torch.load(p, weights_only=True)["global_step"]: p for p in (tmp_path / "states").glob("last*.ckpt")}
    assert {*saved} == {*range(1, 3 * epoch + 1)}
    scores = curve(tmp_path / "whole", "val/nll")
    assert [*scores] == [k * epoch - 1 for k in (1, 2, 3)]
    for stop in (epoch - 1, epoch, epoch + 1):
        resumed, found = run(tmp_path / f"{stop}", text(), **validated, ckpt_path=saved[stop])
        assert resumed.updates == whole.updates[stop:]
        assert_same(found, weights)
        assert curve(tmp_path / f"{stop}", "val/nll") == {k: score for k, score in scores.items() if k >= stop}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(("saved_by", "other"), [("batch", "seed"), ("validation", "text")])
def test_an_epoch_of_another_order_starts_again(tmp_path: Path, saved_by: str, other: str) -> None:
    """All of it, and each line once."""
    options: dict[str, Any] = {"logger": False}
    states: ModelCheckpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    if saved_by == "validation":
        states = Checkpoints(every=0, keep_last=99, dirpath=tmp_path)
        options |= {"val_check_interval": 4, "limit_val_batches": 1}
    whole, _ = run(tmp_path, text(), states, **options)
    epoch = len(whole.updates) // 3
    assert epoch > 2
    saved = {torch.load(path, weights_only=True)["global_step"]: path for path in tmp_path.glob("*.ckpt")}
    data = text(seed=7)
    if other == "text":
        data = Sentences({"train": Pairs([*ENGLISH] * 4, [*GERMAN[1:], GERMAN[0]] * 4)}, batch_tokens=70)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        resumed, _ = run(tmp_path, data, **options, ckpt_path=saved[2])
    (told,) = (str(warning.message) for warning in said if "the epoch starts again" in str(warning.message))
    assert re.search(rf"another order \(.*{other} .* then and .* now\)", told)
    epoch = len(resumed.updates) // 3
    for k in range(3):
        lines = sorted(line for update in resumed.updates[k * epoch : (k + 1) * epoch] for line in update[0])
        assert lines == [*range(24)]


@pytest.mark.parametrize("norm", [LayerNorm(), PowerNorm(warmup=0)], ids=lambda norm: type(norm).__name__)
def test_an_update_that_a_validation_has_cut_in_two(tmp_path: Path, norm: Norm) -> None:
    """Gradients, sums and diagnostics of its first batches are in the checkpoint, and what a norm gathers of them."""

    def monitors() -> list[pl.Callback]:
        options = {"every": 1, "figures": False}
        return [GradientRatio(activations=True, **options), LayerSimilarity(**options), SpikeGuard(every=1)]

    validated = {"val_check_interval": 3, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    validated["stabilizer"] = Stabilizer(norm=norm, warmup=InverseSqrt(3))
    states = Checkpoints(every=0, keep_last=99, dirpath=tmp_path / "states")
    whole, weights = run(tmp_path / "whole", text(), states, *monitors(), **validated)
    saved = {path: torch.load(path, weights_only=True) for path in sorted((tmp_path / "states").iterdir())}
    cut = [path for path in saved if saved[path]["window"] is not None]
    assert len(cut) > 1
    for path in cut[-2:]:
        done = saved[path]["global_step"]
        again, folder = Checkpoints(every=0, dirpath=tmp_path / path.stem), tmp_path / f"from_{path.stem}"
        resumed, found = run(folder, text(), again, *monitors(), **validated, ckpt_path=path)
        updates = whole.updates[done:]
        assert updates
        assert [(rates, loss) for _, rates, loss in resumed.updates] == [(rates, loss) for _, rates, loss in updates]
        assert resumed.updates[1:] == updates[1:]
        assert_same(found, weights)
        told, expected = ({row["step"]: row for row in rows(part)} for part in (folder, tmp_path / "whole"))
        for row in [*told.values(), *expected.values()]:
            row.pop("train/tokens_per_second", None)
        assert all(row == expected[step] for step, row in told.items() if step > done)
        assert len(told) >= len(updates)


SCHEDULES = [(InverseSqrt(2), False), (Cosine(2), True), (WarmupStableDecay(2, decay_share=0.5), True)]


@pytest.mark.parametrize(("warmup", "has_an_end"), SCHEDULES, ids=lambda value: type(value).__name__)
def test_a_longer_run_keeps_its_schedule(tmp_path: Path, warmup: Warmup, has_an_end: bool) -> None:
    """After going on with another max_steps the learning rate does not jump (FIELD_REPORTS 2.9)."""
    states = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    small_trainer(tmp_path / "first", states, max_steps=6, enable_checkpointing=True).fit(
        dropping_task(Stabilizer(warmup=warmup)), datamodule=text()
    )
    longer = small_trainer(tmp_path / "longer", max_steps=9)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        longer.fit(dropping_task(Stabilizer(warmup=warmup)), datamodule=text(), ckpt_path=tmp_path / "step=4.ckpt")
    told = [
        str(warning.message)
        for warning in said
        if "trainer.max_steps is 6 in the checkpoint and 9" in str(warning.message)
    ]
    assert len(told) == has_an_end
    planned = warmup.at(16, 6)
    expected = {update - 1: 0.01 * planned.factor(update) for update in range(5, 10)}
    assert curve(tmp_path / "longer", "lr") == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_no_bit(tmp_path: Path, workers: int) -> None:
    alone, weights = run(tmp_path, text(), logger=False, max_epochs=2)
    helped, found = run(tmp_path, text(workers=workers), logger=False, max_epochs=2)
    assert helped.updates == alone.updates
    assert_same(found, weights)


def test_strategies_under_comparison_see_the_same_data(tmp_path: Path) -> None:
    """Also where one draws random numbers of its own in every batch."""
    orders = []
    for stabilizer in (Stabilizer(), Stabilizer(residual=StochasticDepth(rate=0.5))):
        seen = Seen()
        trainer = small_trainer(tmp_path, seen, max_epochs=2, logger=False)
        trainer.fit(dropping_task(stabilizer), datamodule=text())
        orders.append([lines for lines, *_ in seen.updates])
    assert orders[0] == orders[1]


def matrices(initialization: Initialization, stabilizer: Stabilizer) -> list[torch.Tensor]:
    """The model's matrices over the gains that an initialisation gave them, and a number drawn after them."""
    task = small_task(Stabilizer(**vars(stabilizer) | {"initialization": initialization}))
    drawn = [m.weight.detach() for m in task.model.modules() if isinstance(m, Projection)]
    return [*drawn, task.model.target_embedding.weight.detach(), torch.rand(1)]


@pytest.mark.parametrize("name", STABILIZERS)
def test_strategies_under_comparison_begin_with_the_same_weights(name: str) -> None:
    """Those that are drawn; what a strategy adds draws nothing, so that all that comes after is the same too."""
    expected = matrices(Xavier(), Stabilizer())
    found = matrices(Xavier(), STABILIZERS[name][0])
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def test_initializations_under_comparison_stretch_the_same_weights() -> None:
    expected = matrices(Xavier("normal"), Stabilizer())
    found = matrices(DeepNormInit(), Stabilizer())
    for one, other in zip(found, expected, strict=True):
        for rows_of_one, rows_of_other in zip(one.split(16), other.split(16), strict=True):
            gain = rows_of_one.norm() / rows_of_other.norm()
            torch.testing.assert_close(rows_of_one, gain * rows_of_other)
