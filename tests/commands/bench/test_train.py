"""`stabilize bench train`: what a window of updates is, how its time is shared out, and what is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stabilize.cli import main
from stabilize.commands.bench import train
from stabilize.commands.bench.train import PARTS, Shares, Window
from stabilize.task import TranslationTask
from tests.tasks import sentence_batch


def test_each_config_and_the_bare_loop_have_all_numbers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rounds", "2", "--updates", "3", "--warm_up", "1", "--bare", "true", "--json", "found.json"]
    assert main(["bench", "train", "-c", "tiny.yaml", *words, "--against", "post_ln"]) == 0
    shown = capsys.readouterr().out
    assert all(f"share of {part}" in shown for part in PARTS)
    found = json.loads((here / "found.json").read_text())
    assert (found["rounds"], found["updates"], found["precision"]) == (2, 3, "32-true")
    assert [row["name"] for row in found["rows"]] == ["tiny", "post_ln", "bare loop"]
    own, other, bare = found["rows"]
    for row in (own, other, bare):
        assert row["target_tokens"] == own["target_tokens"] > 0  # the same batches
        assert row["padding"] == own["padding"]
        speeds = [row["tokens_per_second"]["rounds"][k] / own["tokens_per_second"]["rounds"][k] for k in range(2)]
        assert row["ratio"]["rounds"] == pytest.approx(speeds)
        seconds = [row["target_tokens"] / speed for speed in row["tokens_per_second"]["rounds"]]
        assert row["seconds"]["rounds"] == pytest.approx(seconds)
        assert row["share_of_ceiling"] == pytest.approx(row["flops_per_second"]["median"] / found["ceiling"])
    assert [bool(row["parts"]) for row in (own, other, bare)] == [True, True, False]
    assert [row["peak_memory"] is None for row in (own, other, bare)] == [False, False, True]
    assert sorted(path.name for path in here.iterdir()) == ["found.json", "tiny.yaml"]


def weights_after(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> list[list[torch.Tensor]]:
    """The weights that fit and the bare loop end with in `bench train`."""
    found: dict[str, list[torch.Tensor]] = {}
    timed = train._timed

    def keep(task: TranslationTask, window: Window, shares: dict[str, float]) -> train.Timed:
        found["fit" if shares else "bare"] = [*task.parameters()]
        return timed(task, window, shares)

    monkeypatch.setattr(train, "_timed", keep)
    monkeypatch.setattr(train.memory, "peak", lambda work: 0)
    assert main(["bench", "train", "-c", "tiny.yaml", *words, "--rounds=1", "--bare=true"]) == 0
    return [found["fit"], found["bare"]]


@pytest.mark.parametrize(
    "words",
    [
        ["--updates=8", "--warm_up=2"],  # more than an epoch
        ["--updates=2", "--warm_up=1", "--trainer.accumulate_grad_batches=2", "--model.clipping=GlobalNorm"],
        ["--updates=2", "--warm_up=1", "--trainer.precision=bf16-mixed"],
    ],
    ids=["epochs", "accumulated and clipped", "bf16"],
)
def test_the_bare_loop_trains_as_fit_does(here: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Else a comparison of their time would be of different work."""
    of_fit, of_bare = weights_after(monkeypatch, words)
    torch.testing.assert_close(of_bare, of_fit)
    fewer, _ = weights_after(monkeypatch, [*words, "--updates=1"])
    assert not any(map(torch.equal, of_fit, fewer))


def test_a_window_is_from_the_start_of_an_update_to_the_start_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 17.0])
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock))
    told: list[str] = []
    window = Window(warm_up=1, updates=2)
    window.opens, window.closes = (lambda: told.append("opens")), (lambda: told.append("closes"))
    batches = [sentence_batch(number) for number in range(6)]
    for update, batch in zip((0, 1, 1, 2, 3, 4), batches, strict=True):  # the second update has two batches
        window.before(update, batch)
    assert window.wall == 7.0
    assert window.batches == batches[1:4]
    assert told == ["opens", "closes"]


def test_time_is_shared_out_and_none_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(train.time, "perf_counter", lambda: now)
    shares = Shares()

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    with shares.profile("run_training_batch"):
        spend(100.0)  # before the window
        shares.restart()
        with shares.profile("[Strategy]SingleDeviceStrategy.batch_to_device"):
            spend(1.0)
        with shares.profile("[LightningModule]TranslationTask.optimizer_step"):
            spend(2.0)
            with shares.profile("[Strategy]SingleDeviceStrategy.training_step"):
                spend(4.0)
            with shares.profile("[Strategy]SingleDeviceStrategy.backward"):
                spend(8.0)
            with shares.profile("[Callback]GradientRatio.on_before_optimizer_step"):
                spend(16.0)
            spend(2.0)
        spend(32.0)
        shares.finish()
        spend(100.0)  # after it
    expected = {"data": 1.0, "forward": 0.0, "loss": 4.0, "backward": 8.0, "optimizer": 4.0, "rest": 48.0}
    assert shares.seconds == expected
