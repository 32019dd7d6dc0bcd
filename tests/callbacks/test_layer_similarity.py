"""Similarity between layers in real training against a plain loop over positions."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stabilize.callbacks import GradientRatio, LayerSimilarity
from stabilize.errors import UserError
from tests.callbacks.tiny import WIDTH, TinyTask, batches, hooks, loader, records, trainer


def measure(every: int = 1, **options: Any) -> LayerSimilarity:
    return LayerSimilarity(every, figures=False, **options)


def fit(folder: Path, callback: pl.Callback, task: pl.LightningModule, data: list[Any], **options: Any) -> pl.Trainer:
    made = trainer(folder, callback, **{"max_steps": len(data)} | options)
    made.fit(task, loader(data))
    return made


def outputs(task: TinyTask, batch: Any) -> dict[str, list[Tensor]]:
    """Return the real positions `[positions, width]` of each layer's output."""
    x, real = batch
    states: dict[str, list[Tensor]] = {"encoder": [], "decoder": []}
    for stack in states:
        for layer in getattr(task.model, stack).layers:
            x = layer(x, real)
            states[stack].append(x[real].detach().double())
    return states


def by_hand(states: list[Tensor], centered: bool) -> list[float]:
    if centered:
        states = [state - state.mean(0) for state in states]
    pairs = itertools.pairwise(states)
    return [torch.nn.functional.cosine_similarity(lower, upper).mean().item() for lower, upper in pairs]


def test_every_record_equals_a_loop_over_real_positions(tmp_path: Path):
    task, data = TinyTask(encoder_layers=4, learning_rate=0.0), batches(4)
    expected = outputs(task, data[3])
    callback = measure(every=2)
    fit(tmp_path, callback, task, data, log_every_n_steps=50)
    first, got = records(tmp_path, "layer_similarity")
    assert (first["step"], got.pop("step")) == (1, 3)
    for name, centered in (("layer_similarity", False), ("layer_similarity_centered", True)):
        for stack, states in expected.items():
            cosines = by_hand(states, centered)
            for i, cosine in enumerate(cosines, 1):
                assert got.pop(f"{name}/{stack}/layer_{i:03d}") == pytest.approx(cosine, abs=1e-6)
            mean = sum(cosines) / len(cosines)
            assert callback.summary()[f"{name}/{stack}/mean"] == pytest.approx(mean, abs=1e-6)
            assert got.pop(f"{name}/{stack}/mean") == pytest.approx(mean, abs=1e-6)
    assert not got
    assert len(callback.matrices["layer_similarity/encoder"]) == 4
    assert callback.matrices["layer_similarity/encoder"][0][3] == pytest.approx(
        nn.functional.cosine_similarity(expected["encoder"][0], expected["encoder"][3]).mean().item(), abs=1e-6
    )


def test_padding_changes_nothing(tmp_path: Path):
    x, real = batches(1)[0]
    padded = nn.functional.pad(x, (0, 0, 0, 10), value=9.0), nn.functional.pad(real, (0, 10))
    task = TinyTask(learning_rate=0.0)
    for name, batch in (("plain", (x, real)), ("padded", padded)):
        fit(tmp_path / name, measure(), task, [batch])
    (expected,), (got,) = records(tmp_path / "plain", ""), records(tmp_path / "padded", "")
    assert got == pytest.approx(expected, abs=1e-5)


def test_accumulation_is_one_record_an_update_weighted_by_tokens(tmp_path: Path):
    task, (batch,) = TinyTask(), batches(1, size=8)
    parts = [(batch[0][:1], batch[1][:1]), (batch[0][1:3], batch[1][1:3]), (batch[0][3:], batch[1][3:])]
    fit(tmp_path / "whole", measure(), copy.deepcopy(task), [batch])
    fit(tmp_path / "parts", measure(), task, parts, accumulate_grad_batches=3, max_steps=1)
    (expected,), (got,) = (
        records(tmp_path / "whole", "layer_similarity/"),
        records(tmp_path / "parts", "layer_similarity/"),
    )
    assert got == pytest.approx(expected, abs=1e-6)


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
    fit(tmp_path / "plain", measure(), plain, batches(2))
    fit(tmp_path / "checkpointed", measure(), checkpointed, batches(2))
    expected, got = records(tmp_path / "plain", ""), records(tmp_path / "checkpointed", "")
    assert got == [pytest.approx(row, abs=1e-6) for row in expected]


def test_nothing_is_held_during_backward(tmp_path: Path):
    callback = measure()

    class Checks(TinyTask):
        def on_before_backward(self, loss: Tensor) -> None:  # runs after the callback's
            assert not callback._observed
            assert hooks(self) == 0

    fit(tmp_path, callback, Checks(), batches(2))


class Alone(LayerSimilarity):
    """A callback that must not be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        raise AssertionError("a deep copy of the model copied the callback")


def test_other_forwards_are_not_measured(tmp_path: Path):
    class Looks(TinyTask):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.eval()
            self.loss((100 + batch[0], batch[1]))
            self.train()
            copy.deepcopy(self.model).encoder(*batch)  # weight averaging, say: it copies the hooks
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert hooks(self) == 0
            self.loss(batch)

    plain, looks = TinyTask(), Looks()
    looks.load_state_dict(plain.state_dict())
    fit(tmp_path / "plain", measure(), plain, batches(3))
    made = trainer(tmp_path / "looks", Alone(every=1, figures=False), max_steps=3, val_check_interval=1)
    made.fit(looks, loader(batches(3)), loader(batches(1)))
    assert records(tmp_path / "looks", "layer_s") == records(tmp_path / "plain", "layer_s")


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_that_learns_nothing_has_no_record(tmp_path: Path):
    class Skips(TinyTask):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    task = Skips()
    fit(tmp_path, measure(), task, batches(3))
    assert [row["step"] for row in records(tmp_path, "")] == [0, 2]
    assert hooks(task) == 0


def test_a_layer_that_is_skipped_has_no_number(tmp_path: Path):
    class Drops(TinyTask):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            x, real = batch
            for number, layer in enumerate(self.model.encoder.layers):
                x = x if number == 1 else layer(x, real)
            return self.model.decoder(x, real).square().sum()

    fit(tmp_path, measure(), Drops(encoder_layers=4), batches(1))
    (got,) = records(tmp_path, "layer_similarity/encoder")
    got.pop("step")
    assert set(got) == {"layer_similarity/encoder/layer_003", "layer_similarity/encoder/mean"}
    assert got["layer_similarity/encoder/mean"] == got["layer_similarity/encoder/layer_003"]


def test_layers_that_no_hook_sees_are_said_aloud(tmp_path: Path):
    class Hides(TinyTask):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.model.encoder(*batch).square().sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, measure(), Hides(), batches(1))
    assert [warning for warning in caught if "no layer of decoder ran" in str(warning.message)]
    (got,) = records(tmp_path, "")
    assert not [key for key in got if "decoder" in key]
    assert "layer_similarity/encoder/mean" in got


@pytest.mark.parametrize("broken", [False, True])
def test_a_stack_of_one_layer_has_no_picture_of_pairs(tmp_path: Path, broken: bool):
    class Breaks(TinyTask):
        def on_train_batch_end(self, *_: Any) -> None:
            if broken and self.global_step == 2:
                raise RuntimeError("stop here")

    made = trainer(tmp_path, LayerSimilarity(every=1), max_steps=2)
    with pytest.raises(RuntimeError, match="stop here") if broken else contextlib.nullcontext():
        made.fit(Breaks(decoder_layers=1), loader(batches(2)))
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert "similarity_matrix_encoder.png" in drawn
    assert not [name for name in drawn if "decoder" in name]


def test_any_module_by_pattern(tmp_path: Path):
    class Plain(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
            self.model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.model(batch[0]).cumsum(-1).square().sum()

    task, (batch,) = Plain(), batches(1)
    x, states = batch[0], []
    for layer in task.model.layers:
        x = layer(x)
        states.append(x.detach().flatten(0, 1).double())
    fit(tmp_path, measure(layers={"encoder": "model.layers.*"}), task, [batch])
    (got,) = records(tmp_path, "layer_similarity/encoder/layer_")
    got.pop("step")
    assert list(got.values()) == pytest.approx(by_hand(states, centered=False), abs=1e-6)


def test_outputs_of_different_shape_are_refused_by_name(tmp_path: Path):
    class Narrows(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))

        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.model(batch[0]).sum()

    with pytest.raises(UserError, match=r"layers\.mlp: layers of different shape"):
        fit(tmp_path, measure(layers={"mlp": "model.*"}), Narrows(), batches(1))


@pytest.mark.parametrize("depth", [24, 25, 100])
def test_number_of_keys_is_bounded(tmp_path: Path, depth: int):
    made = fit(tmp_path, measure(), TinyTask(encoder_layers=depth), batches(1))
    (got,) = records(tmp_path, "layer_similarity/encoder/layer_")
    got.pop("step")
    assert len(got) <= 25
    assert {"layer_similarity/encoder/layer_001", f"layer_similarity/encoder/layer_{depth - 1:03d}"} <= set(got)
    assert not [key for key in made.progress_bar_metrics if "similarity" in key]


@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_no_hook_and_nothing_held(tmp_path: Path, exception: type[BaseException]):
    class Breaks(TinyTask):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = super().loss(batch)
            if self.global_step == 2:
                assert hooks(self) > 0
                raise exception("stop here")
            return loss

    task = Breaks()
    callbacks = [measure(), GradientRatio(every=1, activations=True, figures=False)]
    made = trainer(tmp_path, *callbacks, max_steps=5)
    with pytest.raises(SystemExit if exception is KeyboardInterrupt else exception):
        made.fit(task, loader(batches(5)))
    assert hooks(task) == 0
    assert all(not callback.stacks for callback in callbacks)
    assert not callbacks[0]._observed
    assert [row["step"] for row in records(tmp_path, "layer_similarity/")] == [0, 1]


class LiveTensors(pl.Callback):
    """Counts the tensors made since training began, at the end of every n-th batch."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.batches = 0
        self.counts: list[int] = []

    def on_train_start(self, *_: Any) -> None:
        gc.freeze()  # what is there already need not be walked through sixty times

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1
        if self.batches % self.every:
            return
        gc.collect()
        self.counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))

    on_validation_batch_end = on_train_batch_end

    def on_train_end(self, *_: Any) -> None:
        gc.unfreeze()


def test_live_tensors_stay_the_same(tmp_path: Path):
    """Also over evaluation with a model that was left in training mode, of 300 batches after 300."""

    class Trains(TinyTask):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.train()
            assert hooks(self) == 0
            self.loss(batch)

    task, counter = Trains(), LiveTensors(every=10)
    callbacks = [measure(every=2), GradientRatio(every=2, activations=True, figures=False), counter]
    options: dict[str, Any] = {"val_check_interval": 300, "logger": False, "num_sanity_val_steps": 0}
    made = trainer(tmp_path, *callbacks, max_steps=300, **options)
    made.fit(task, loader(batches(300)), loader(batches(1) * 300))
    training, evaluation = counter.counts[:30], counter.counts[30:]
    assert len(evaluation) == 30
    assert len(set(training[1:])) == len(set(evaluation[1:])) == 1
    assert hooks(task) == 0


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("make", [measure, lambda: GradientRatio(every=1, activations=True)])
def test_history_survives_a_checkpoint(tmp_path: Path, make: Callable[[], Any]):
    whole, first, second = make(), make(), make()
    data = batches(4)
    start = TinyTask()
    fit(tmp_path / "whole", whole, copy.deepcopy(start), data)
    made = fit(tmp_path / "first", first, copy.deepcopy(start), data[:2])
    made.save_checkpoint(tmp_path / "half.ckpt")
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    made = trainer(tmp_path / "second", second, max_steps=4)
    made.fit(copy.deepcopy(start), loader(data[2:] * 2), ckpt_path=tmp_path / "half.ckpt")
    assert second.state_dict() == whole.state_dict()
    assert [row["step"] for row in records(tmp_path / "second", "")] == [2, 3]
