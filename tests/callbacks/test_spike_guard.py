"""Jumps and divergence: planted, found, counted and said."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilize import stats
from stabilize.callbacks import SpikeGuard
from stabilize.errors import UserError
from tests.callbacks.monitors import batch, watched_task
from tests.callbacks.tiny import TinyTask, loader, records, trainer
from tests.tasks import fit, rows, small_trainer


class Scripted(TinyTask):
    """Its loss at each update is given; the gradient norm is that times ten."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__(encoder_layers=1, decoder_layers=1)
        self.losses = losses
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, given: Any, batch_idx: int) -> Tensor:
        loss = self.losses[batch_idx]
        slope = 10 * abs(loss) if math.isfinite(loss) else 1.0
        return loss + slope * (self.weight - self.weight.detach())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def run(folder: Path, losses: list[float], guard: SpikeGuard, **options: Any) -> list[dict[str, float]]:
    task = Scripted(losses)
    trainer(folder, guard, max_steps=len(losses), **options).fit(task, loader([0] * len(losses)))
    return records(folder, "stability")


def curve(count: int) -> list[float]:
    return (2 + 0.1 * torch.randn(count, generator=torch.Generator().manual_seed(1))).tolist()


def test_the_score_is_that_of_the_whole_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = curve(130)
    losses[60], losses[100] = 40.0, 90.0
    guard = SpikeGuard(every=10, window=40)
    run(tmp_path, losses, guard)
    expected = stats.spike_score(torch.tensor(losses), 7.0, window=40, fewest=4).item()
    last = guard.summary()
    assert last["stability/spike_score/loss"] == pytest.approx(expected) == pytest.approx(2 / 130)
    assert last["stability/spike_score/gradient_norm"] == pytest.approx(expected)
    assert last["stability/spikes"] == 2
    assert last["stability/diverged"] == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1, "two jumps within a hundred updates are one sentence"
    assert said.startswith("update 61: the loss jumped to 40, ")
    assert "ZClip" in said


def test_a_jump_is_in_the_record_of_its_look(tmp_path: Path) -> None:
    losses = curve(60)
    losses[34] = 40.0
    got = run(tmp_path, losses, SpikeGuard(every=10, window=40))
    assert [(row["step"], row["stability/spikes"]) for row in got] == [
        (9, 0),
        (19, 0),
        (29, 0),
        (39, 1),
        (49, 1),
        (59, 1),
    ]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_is_divergence(tmp_path: Path, broken: float, capsys: pytest.CaptureFixture[str]) -> None:
    losses = curve(30)
    losses[14] = broken
    guard = SpikeGuard()
    got = run(tmp_path, losses, guard)
    assert [row["stability/diverged"] for row in got] == [0, 1, 1]
    assert [row.get("stability/diverged_at") for row in got] == [None, 15, 15]
    assert guard.summary()["stability/diverged_at"] == 15
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"update 15: the loss is {broken}: training has diverged")
    assert "warm-up" in said[0]


def test_a_loss_that_ends_above_its_beginning_is_divergence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [5.0] + [4.0] * 50 + [5.0 + i / 25 for i in range(100)] + [4.0] * 100
    guard = SpikeGuard(deviations=1000)
    got = run(tmp_path, losses, guard)
    medians = [statistics.median(losses[max(0, update - 100) : update] or [0]) for update in range(252)]
    first = next(update for update in range(110, 252, 10) if medians[update] > 6)
    lost = {int(row["step"]) + 1: row["stability/diverged"] for row in got}
    assert lost == {update: float(update >= 110 and medians[update] > 6) for update in lost}
    assert {row["stability/diverged_at"] for row in got if row["stability/diverged"]} == {float(first)}
    assert "stability/diverged_at" not in guard.summary(), "it has come back"
    assert "above the first ones' 5" in capsys.readouterr().out


def test_a_run_that_goes_on_from_good_weights_has_not_diverged(tmp_path: Path) -> None:
    """Its first loss is one batch's, and its mean stays where it is."""
    losses = curve(300)
    losses[0] = min(losses)
    guard = SpikeGuard()
    assert not any(row["stability/diverged"] for row in run(tmp_path, losses, guard))


def test_updates_since_the_last_look_are_judged_at_the_end(tmp_path: Path) -> None:
    losses = curve(55)
    losses[53] = 40.0
    guard = SpikeGuard(every=50, window=40)
    got = run(tmp_path, losses, guard)
    assert [(row["step"], row["stability/spikes"]) for row in got] == [(49, 0), (54, 1)]
    assert guard.summary()["stability/spikes"] == 1


@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt])
def test_updates_since_the_last_look_are_judged_when_a_run_breaks(
    tmp_path: Path, exception: type[BaseException]
) -> None:
    class Breaks(Scripted):
        def training_step(self, given: Any, batch_idx: int) -> Tensor:
            if batch_idx == 15:
                raise exception("stop here")
            return super().training_step(given, batch_idx)

    losses = curve(20)
    losses[12] = math.nan
    made = trainer(tmp_path, SpikeGuard(every=10), max_steps=20)
    with pytest.raises(SystemExit if exception is KeyboardInterrupt else exception):
        made.fit(Breaks(losses), loader([0] * 20))
    got = records(tmp_path, "stability")
    assert [(row["step"], row["stability/diverged"]) for row in got] == [(9, 0), (14, 1)]
    assert got[-1]["stability/diverged_at"] == 13


def test_the_loss_of_a_window_is_the_mean_of_its_parts(tmp_path: Path) -> None:
    guard = SpikeGuard(every=1)
    task = Scripted([1.0, 2.0, 6.0, 3.0])
    trainer(tmp_path, guard, max_steps=2, accumulate_grad_batches=2).fit(task, loader([0] * 4))
    assert guard.progress["recent"]["loss"] == pytest.approx([1.5, 4.5])
    assert guard.progress["recent"]["gradient_norm"] == pytest.approx([15.0, 45.0])


def test_a_task_may_say_what_its_loss_is(tmp_path: Path) -> None:
    """TranslationTask: the loss a token of the update, which it logs as train/loss."""
    guard = SpikeGuard(every=1)
    fit(small_trainer(tmp_path, guard, max_steps=3), watched_task(), [batch()] * 3)
    logged = [row["train/loss"] for row in rows(tmp_path) if "train/loss" in row]
    assert guard.progress["recent"]["loss"] == pytest.approx(logged)


def test_zero_switches_it_off(tmp_path: Path) -> None:
    guard = SpikeGuard(every=0)
    trainer(tmp_path, guard, max_steps=2).fit(Scripted([1.0, math.nan]), loader([0] * 2))
    assert not guard.summary()


@pytest.mark.parametrize("wrong", [{"deviations": 0.0}, {"deviations": math.nan}, {"window": 3}])
def test_wrong_settings_are_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UserError, match=f"{name}: "):
        SpikeGuard(**wrong)
