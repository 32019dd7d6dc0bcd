"""Gradient ratios of real training against gradients taken by hand."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stabilize.callbacks import GradientRatio, SpikeGuard, UpdateRatio
from stabilize.errors import UserError
from tests.callbacks.tiny import WIDTH, TinyTask, batches, hooks, loader, records, trainer


def measure(every: int = 1, **options: Any) -> GradientRatio:
    return GradientRatio(every, figures=False, **options)


def fit(folder: Path, callback: GradientRatio, task: pl.LightningModule, data: list[Any], **options: Any) -> pl.Trainer:
    made = trainer(folder, callback, **{"max_steps": len(data)} | options)
    made.fit(task, loader(data))
    return made


def norm(parameters: Any) -> float:
    gradients = [parameter.grad.flatten().double() for parameter in parameters if parameter.grad is not None]
    return torch.cat(gradients).norm().item()


def by_hand(task: TinyTask, data: list[Any]) -> list[dict[str, float]]:
    """Train a copy with a plain loop; return for every update what the callback has to say."""
    task = copy.deepcopy(task)
    optimizer = task.configure_optimizers()
    updates = []
    for batch in data:
        optimizer.zero_grad()
        task.loss(batch).backward()
        row = {"gradient_norm/total": norm(task.parameters())}
        for stack in ("encoder", "decoder"):
            norms = [norm(layer.parameters()) for layer in getattr(task.model, stack).layers]
            ratios = [value / norms[-1] for value in norms[:-1]]
            row |= {f"gradient_norm/{stack}/layer_{i:03d}": value for i, value in enumerate(norms, 1)}
            row |= {f"gradient_ratio/{stack}/layer_{i:03d}": value for i, value in enumerate(ratios, 1)}
            row[f"gradient_ratio/{stack}/first_to_last"] = ratios[0]
        updates.append(row)
        optimizer.step()
    return updates


def activation_ratios(task: TinyTask, batch: Any) -> list[float]:
    """Return |dL/dx_l| / |dL/dx_L| of the encoder's layer outputs."""
    x, real = batch
    states = []
    for layer in task.model.encoder.layers:
        x = layer(x, real)
        states.append(x)
    loss = (task.model.decoder(x, real).square().sum(-1) * real).sum()
    norms = [gradient.norm().item() for gradient in torch.autograd.grad(loss, states)]
    return [value / norms[-1] for value in norms[:-1]]


def test_every_update_equals_a_plain_loop_and_clipping_comes_after(tmp_path: Path):
    task, data = TinyTask(learning_rate=0.0), batches(3)
    expected = by_hand(task, data)
    fit(tmp_path, measure(), task, data, gradient_clip_val=1e-4)
    got = records(tmp_path, "gradient")
    assert [row.pop("step") for row in got] == [0, 1, 2]
    assert got == [pytest.approx(row, rel=1e-5) for row in expected]


def test_only_every_nth_update_whatever_log_every_n_steps_is(tmp_path: Path):
    task, data = TinyTask(), batches(7)
    expected = by_hand(task, data)
    callback = measure(every=3)
    fit(tmp_path, callback, task, data, log_every_n_steps=50)
    got = records(tmp_path, "gradient")
    assert [row.pop("step") for row in got] == [2, 5]
    assert got == [pytest.approx(expected[2], rel=1e-5), pytest.approx(expected[5], rel=1e-5)]
    headlines = ["gradient_ratio/encoder/first_to_last", "gradient_ratio/decoder/first_to_last"]
    assert callback.summary() == pytest.approx({key: expected[5][key] for key in headlines}, rel=1e-5)


def test_zero_switches_it_off(tmp_path: Path):
    fit(tmp_path, GradientRatio(every=0, layers={"none": "such.*"}), TinyTask(), batches(2))
    assert not (tmp_path / "metrics.csv").exists()
    assert not (tmp_path / "figures").exists()


def test_accumulation_is_one_record_an_update_and_equals_the_large_batch(tmp_path: Path):
    task, (batch,) = TinyTask(), batches(1, size=8)
    whole = copy.deepcopy(task)
    fit(tmp_path / "whole", measure(activations=True), whole, [batch])
    parts = [(batch[0][i : i + 2], batch[1][i : i + 2]) for i in range(0, 8, 2)]
    fit(tmp_path / "parts", measure(activations=True), task, parts, accumulate_grad_batches=4, max_steps=1)
    (expected,), (got,) = records(tmp_path / "whole", ""), records(tmp_path / "parts", "")
    for key, value in expected.items():  # Lightning divides each of the four losses by four
        assert got[key] == pytest.approx(value / 4 if key.startswith("gradient_norm") else value, rel=1e-5), key


def test_gradients_by_activations(tmp_path: Path):
    task, data = TinyTask(encoder_layers=4), batches(2)
    expected = activation_ratios(task, data[0])
    fit(tmp_path, measure(activations=True), task, data)
    first, second = records(tmp_path, "activation_gradient_ratio/encoder")
    assert list(first)[:-1] == [
        *(
            f"activation_gradient_ratio/encoder/{key}"
            for key in ("first_to_last", "layer_001", "layer_002", "layer_003")
        ),
    ]
    assert list(first.values())[1:-1] == pytest.approx(expected, rel=1e-5)
    assert first["activation_gradient_ratio/encoder/first_to_last"] == pytest.approx(expected[0], rel=1e-5)
    assert second != first
    assert hooks(task) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_around_layers_changes_nothing(tmp_path: Path, reentrant: bool):
    class Checkpointed(TinyTask):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            x, real = batch
            x = x.clone().requires_grad_()
            for layer in [*self.model.encoder.layers, *self.model.decoder.layers]:
                x = checkpoint(layer, x, real, use_reentrant=reentrant)
            return (x.square().sum(-1) * real).sum()

    plain, checkpointed = TinyTask(), Checkpointed()
    checkpointed.load_state_dict(plain.state_dict())
    fit(tmp_path / "plain", measure(activations=True), plain, batches(2))
    fit(tmp_path / "checkpointed", measure(activations=True), checkpointed, batches(2))
    expected, got = records(tmp_path / "plain", ""), records(tmp_path / "checkpointed", "")
    assert got == [pytest.approx(row, rel=1e-5) for row in expected]


@pytest.mark.parametrize("fused", [False, True])
def test_sixteen_bit_gradients_are_unscaled(tmp_path: Path, fused: bool):
    class Fused(TinyTask):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), fused=fused)

    data = batches(1)
    task = Fused()
    (expected,) = by_hand(task, data)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    fit(tmp_path, measure(), task, data, plugins=[plugin])
    (got,) = records(tmp_path, "gradient")
    got.pop("step")
    assert got == pytest.approx(expected, rel=0.05)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_an_update_that_the_scaler_never_sees_is_unscaled_too(tmp_path: Path):
    """Its last batch returned None: Lightning neither unscales nor makes the update."""

    class Skips(TinyTask):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return None if batch_idx == 3 else super().training_step(batch, batch_idx)

    task, data = Skips(learning_rate=0.0), batches(4)
    (expected,) = by_hand(task, data[2:3])
    task.learning_rate = 1e-5
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    guard, update = SpikeGuard(every=1), UpdateRatio(every=1, figures=False)
    made = trainer(tmp_path, measure(), guard, update, max_steps=2, accumulate_grad_batches=2, plugins=[plugin])
    made.fit(task, loader(data))
    got = records(tmp_path, "gradient")[-1]
    assert got["step"] == 1
    assert got["gradient_norm/total"] == pytest.approx(expected["gradient_norm/total"] / 2, rel=0.05)
    assert guard.progress["recent"]["gradient_norm"][1] == pytest.approx(got["gradient_norm/total"], rel=1e-5)
    assert [row["step"] for row in records(tmp_path, "update_ratio")] == [0]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_that_learns_nothing_has_no_record(tmp_path: Path):
    class Skips(TinyTask):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    task = Skips()
    fit(tmp_path, measure(activations=True), task, batches(3))
    assert [row["step"] for row in records(tmp_path, "")] == [0, 2]
    assert hooks(task) == 0


def test_frozen_layers_have_no_number(tmp_path: Path):
    task = TinyTask()
    task.model.encoder.layers[1].requires_grad_(False)
    task.model.decoder.layers[-1].requires_grad_(False)
    fit(tmp_path, measure(), task, batches(1))
    (got,) = records(tmp_path, "gradient")
    assert {key for key in got if "encoder" in key} == {
        "gradient_norm/encoder/layer_001",
        "gradient_norm/encoder/layer_003",
        "gradient_ratio/encoder/layer_001",
        "gradient_ratio/encoder/first_to_last",
    }
    assert {key for key in got if "decoder" in key} == {"gradient_norm/decoder/layer_001"}


def test_a_last_layer_with_gradient_zero_makes_no_infinity(tmp_path: Path):
    class Stops(TinyTask):
        def on_after_backward(self) -> None:
            for parameter in self.model.encoder.layers[-1].parameters():
                parameter.grad.zero_()

    fit(tmp_path, measure(), Stops(), batches(1))
    (got,) = records(tmp_path, "gradient")
    assert got["gradient_norm/encoder/layer_003"] == 0
    assert not [key for key in got if key.startswith("gradient_ratio/encoder")]
    assert all(math.isfinite(value) for value in got.values())


def test_a_gradient_that_is_not_finite_shows_in_the_total(tmp_path: Path):
    class Explodes(TinyTask):
        def on_after_backward(self) -> None:
            self.model.encoder.layers[0].linear.weight.grad[0, 0] = math.nan

    fit(tmp_path, measure(), Explodes(), batches(1))
    (got,) = records(tmp_path, "gradient")
    assert math.isnan(got.pop("gradient_norm/total"))
    assert all(math.isfinite(value) for value in got.values())
    assert "gradient_norm/encoder/layer_001" not in got


@pytest.mark.parametrize(("depth", "keys"), [(24, 24), (25, 13), (50, 18), (100, 21)])
def test_number_of_keys_is_bounded(tmp_path: Path, depth: int, keys: int):
    task = TinyTask(encoder_layers=depth, decoder_layers=1)
    callback = measure()
    made = fit(tmp_path, callback, task, batches(1))
    (got,) = records(tmp_path, "gradient_norm/encoder")
    got.pop("step")
    assert len(got) == keys
    assert {"gradient_norm/encoder/layer_001", f"gradient_norm/encoder/layer_{depth:03d}"} <= set(got)
    (ratios,) = records(tmp_path, "gradient_ratio/encoder/layer_")
    assert f"gradient_ratio/encoder/layer_{depth - 1:03d}" in ratios
    assert len(ratios) - 1 <= 25
    assert len(callback.history["gradient_ratio/encoder"].rows[0]) == depth - 1
    assert not [key for key in made.progress_bar_metrics if "gradient" in key]


def test_any_module_by_pattern(tmp_path: Path):
    class Plain(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
            self.model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            x, real = batch
            output = self.model(x, src_key_padding_mask=~real)
            return (output.cumsum(-1).square().sum(-1) * real).sum()

    layers = {"encoder": "model.layers.*"}
    task = Plain()
    fit(tmp_path, measure(activations=True, layers=layers), task, batches(1))
    (got,) = records(tmp_path, "")
    norms = [norm(layer.parameters()) for layer in task.model.layers]  # the last update's gradients are still there
    assert got["gradient_ratio/encoder/layer_002"] == pytest.approx(norms[1] / norms[2], rel=1e-5)
    assert got["gradient_ratio/encoder/first_to_last"] == pytest.approx(norms[0] / norms[2], rel=1e-5)
    assert "activation_gradient_ratio/encoder/first_to_last" in got


def test_one_transfer_to_the_host_and_only_when_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    transfers = []
    to_host = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: transfers.append(self.shape) or to_host(self))
    callback = measure(every=2, activations=True)
    before = GradientRatio.on_before_optimizer_step
    counts = []

    def counted(self: GradientRatio, *arguments: Any) -> None:
        transfers.clear()
        before(self, *arguments)
        counts.append(len(transfers))

    monkeypatch.setattr(GradientRatio, "on_before_optimizer_step", counted)
    fit(tmp_path, callback, TinyTask(), batches(4))
    assert counts == [0, 1, 0, 1]


def test_wrong_settings_are_named(tmp_path: Path):
    with pytest.raises(UserError, match="every: -1"):
        GradientRatio(every=-1)
    with pytest.raises(UserError, match=r"layers.encoder: .*'model.layer.\*'; .*model.encoder.layers.\*"):
        fit(tmp_path, GradientRatio(layers={"encoder": "model.layer.*"}), TinyTask(), batches(1))
