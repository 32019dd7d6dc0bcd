"""Every number is the same on every path: formats, accumulation, ranks, checkpointing, compiling, padding."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from stabilize.callbacks.monitor import step_of
from stabilize.model.layer import compiled_run
from tests.callbacks import parity
from tests.callbacks.monitors import MONITORS, batch, padded, parts, stance, watch, watched_task
from tests.callbacks.tiny import hooks
from tests.tasks import fit, small_trainer

COARSE = ("epsilon_audit", "stability")
"""Counts: a position more or less is a step, not an error."""
LEAST = 1e-4
"""Of numbers that may be zero."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Plain float32 on the whole batch."""
    found = watch(tmp_path_factory.mktemp("plain"), watched_task(), [batch()])
    assert {key.split("/")[0] for key in found} >= {
        "gradient_norm",
        "gradient_ratio",
        "gradient_ratio_cross_attention",
        "activation_gradient_ratio",
        "layer_similarity",
        "activation_rms",
        "update_ratio",
        "epsilon_audit",
        "attention_entropy",
        "cross_attention_logit",
        "stability",
    }
    assert any(0 < value < 1 for key, value in found.items() if key.startswith("epsilon_audit"))
    return found


def assert_same(found: dict[str, float], expected: dict[str, float], relative: float, without: str = "none") -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        if not key.startswith(without):
            least = max(LEAST, 3 * relative) if key.startswith(COARSE) else LEAST
            assert found[key] == pytest.approx(value, rel=relative, abs=least if relative > 1e-3 else 1e-6), key


def test_accumulated(tmp_path: Path, expected: dict[str, float]) -> None:
    found = watch(tmp_path, watched_task(), parts(), accumulate_grad_batches=3, max_steps=1)
    assert_same(found, expected, 1e-4, without="layer_similarity_centered")  # each part takes out its own mean


def test_padded(tmp_path: Path, expected: dict[str, float]) -> None:
    assert_same(watch(tmp_path, watched_task(), [padded(batch())]), expected, 1e-4)


def test_checkpointed(tmp_path: Path, expected: dict[str, float]) -> None:
    assert_same(watch(tmp_path, watched_task(checkpoint_layers=True), [batch()]), expected, 1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled(
    tmp_path: Path, expected: dict[str, float], checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where compiled graphs are there already, in which no hook is called."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled_run.cache_clear()
    try:
        task = watched_task(compile_layers=True, checkpoint_layers=checkpointed)
        task.train()
        task.loss(batch())
        assert_same(watch(tmp_path, task, [batch()]), expected, 1e-4)
        assert stance() == "default"
    finally:
        compiled_run.cache_clear()
        torch._dynamo.reset()


def test_bfloat16(tmp_path: Path, expected: dict[str, float]) -> None:
    assert_same(watch(tmp_path, watched_task(), [batch()], precision="bf16-mixed"), expected, 0.05)


@pytest.mark.parametrize("path", ["16-mixed", "16-mixed fused"])
def test_scaled_float16(tmp_path: Path, expected: dict[str, float], path: str) -> None:
    found = parity.PATHS[path](tmp_path)
    assert found.pop("stability/skipped_updates") == 0
    assert_same(found, expected, 0.05)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_an_update_that_the_scaler_passes_over_is_counted_and_nothing_else(tmp_path: Path) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**40))
    found = watch(tmp_path, watched_task(), [batch()], plugins=[plugin])
    assert found["stability/skipped_updates"] == 1
    assert found["stability/diverged"] == found["stability/spikes"] == 0
    assert not [key for key in found if key.startswith("update_ratio")]
    assert not math.isfinite(found["gradient_norm/total"])


def test_frozen_layers_have_no_gradient_and_no_update(tmp_path: Path, expected: dict[str, float]) -> None:
    task = watched_task()
    task.model.encoder.layers[0].requires_grad_(False)
    found = watch(tmp_path, task, [batch()])
    gone = set(expected) - set(found)
    assert gone == {
        key
        for key in expected
        if key.startswith(("gradient", "update")) and key.endswith(("encoder/layer_001", "encoder/first_to_last"))
    }
    for key in set(found) - {"gradient_norm/total"}:
        assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("name", MONITORS)
def test_a_step_that_learns_nothing_has_no_record(tmp_path: Path, name: str) -> None:
    task, monitor, sent = watched_task(), MONITORS[name](), []
    step, send = task.training_step, monitor.send
    task.training_step = lambda batch, batch_idx: None if batch_idx == 1 else step(batch, batch_idx)

    def remember(trainer: pl.Trainer, metrics: dict[str, float], *step: int) -> None:
        sent.append(step_of(trainer))
        send(trainer, metrics, *step)

    monitor.send = remember  # type: ignore[method-assign]
    fit(small_trainer(tmp_path, monitor, max_steps=3), task, [batch()] * 3)
    assert sent == [0, 2]
    assert hooks(task) == 0


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
@pytest.mark.parametrize("path", ["None first", "deep copy", "averaged", "2 ranks", "2 shards"])
def test_others(tmp_path: Path, expected: dict[str, float], path: str) -> None:
    assert_same(parity.PATHS[path](tmp_path), expected, 1e-4)


def test_a_number_that_is_missing_is_no_parity() -> None:
    found = {"a/x": math.nan, "b/x": 1.1, "b/y": 2.0}
    assert parity.differences(found, {"a/x": 1.0, "b/x": 1.0, "b/y": 2.0, "c/x": 0.0}) == {
        "a": math.inf,
        "b": pytest.approx(0.1),
        "c": math.inf,
    }
