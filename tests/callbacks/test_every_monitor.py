"""What all monitors promise: nothing left behind, one transfer, a history that survives, any model."""

from __future__ import annotations

import gc
import math
import os
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import wandb
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from stabilize.callbacks import (
    ActivationScale,
    AttentionEntropy,
    EpsilonAudit,
    GradientRatio,
    SpikeGuard,
    UpdateRatio,
)
from stabilize.commands import training
from stabilize.errors import UserError
from stabilize.task import TranslationTask
from tests import wandb_file
from tests.callbacks.monitors import MONITORS, batch, stance, watched_task
from tests.callbacks.test_layer_similarity import LiveTensors
from tests.callbacks.tiny import TinyTask, batches, hooks, loader, records, trainer
from tests.checkout import ROOT
from tests.tasks import fit, small_trainer

README = (ROOT / "README.md").read_text(encoding="utf-8")
SENTENCES = " ".join(README.split())


@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_no_hook_and_nothing_held(tmp_path: Path, exception: type[BaseException]) -> None:
    task, monitors = watched_task(), [make() for make in MONITORS.values()]
    loss = task.loss

    def breaks(given: Any) -> Any:
        found = loss(given)
        if task.global_step == 2:
            assert hooks(task) > 0
            assert stance() == "force_eager"
            raise exception("stop here")
        return found

    task.loss = breaks
    with pytest.raises(SystemExit if exception is KeyboardInterrupt else exception):
        fit(small_trainer(tmp_path, *monitors, max_steps=5), task, [batch()] * 5)
    assert hooks(task) == 0
    assert stance() == "default"
    for monitor in monitors:
        for name, kept in vars(monitor).items():
            if name not in ("log", "log_dict"):  # Lightning's, of the LightningModule
                assert not held(kept), name


def held(thing: Any) -> list[Any]:
    """The tensors and modules in containers of any kind."""
    if isinstance(thing, dict):
        return held([*thing, *thing.values()])
    if isinstance(thing, list | tuple | set):
        return [found for part in thing for found in held(part)]
    return [thing] if isinstance(thing, Tensor | nn.Module) else []


def test_memory_stays_the_same(tmp_path: Path) -> None:
    """Over 300 updates with every callback at each of them; the curves themselves are numbers."""
    sizes: list[int] = []

    class Resident(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"))

    task, counter = watched_task(), LiveTensors(every=20)
    monitors = [make() for make in MONITORS.values()]
    fit(small_trainer(tmp_path, *monitors, Resident(), counter, max_steps=300), task, [batch()] * 300)
    assert len(counter.counts) == 15
    assert len(set(counter.counts[1:])) == 1
    assert sizes[299] - sizes[99] < 4 * 2**20
    assert hooks(task) == 0


def test_callbacks_do_not_keep_models(tmp_path: Path) -> None:
    """Of twenty runs one after the other with callbacks that are kept, no model is left."""
    models, kept = [], []
    for _ in range(20):
        task, monitors = watched_task(), [make() for make in MONITORS.values()]
        fit(small_trainer(tmp_path, *monitors, max_steps=1, logger=False), task, [batch()])
        models.append(weakref.ref(task.model))
        kept.append(monitors)
        for monitor in monitors:  # Lightning's: `log` of the LightningModule
            vars(monitor).pop("log")
            vars(monitor).pop("log_dict")
    del task
    gc.collect()
    assert not [model for model in models if model() is not None]


class OnHost(Tensor):
    """What has been copied to the host, and all that is made of it."""


READS = ("cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")
"""What makes the host wait for a device."""


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", MONITORS)
def test_one_transfer_to_the_host_and_only_when_due(
    tmp_path: Path, name: str, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[str] = []

    def counted(method: str) -> None:
        read = getattr(Tensor, method)

        def reads(self: Tensor, *arguments: Any) -> Any:
            file = Path(sys._getframe(1).f_code.co_filename)
            if isinstance(self, OnHost) or not ("callbacks" in file.parts or file.stem in ("precision", "gradients")):
                return read(self, *arguments)
            moved.append(f"{method} in {file.name}")
            found = read(self, *arguments)
            return found.as_subclass(OnHost) if isinstance(found, Tensor) else found

        monkeypatch.setattr(Tensor, method, reads)

    for method in READS:
        counted(method)
    options: dict[str, Any] = {}
    if mixed:
        options["plugins"] = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    trainer_ = small_trainer(tmp_path, MONITORS[name](2), max_steps=4, logger=False, **options)
    fit(trainer_, watched_task(), [batch()] * 4)
    assert len(moved) == 2, moved
    assert all(read.startswith("cpu in ") for read in moved)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("name", MONITORS)
def test_what_was_seen_survives_a_checkpoint(tmp_path: Path, name: str) -> None:
    whole, first, second = (MONITORS[name](2) for _ in range(3))
    fit(small_trainer(tmp_path / "whole", whole, max_steps=5), watched_task(), [batch()] * 5)
    made = small_trainer(tmp_path / "first", first, max_steps=3)
    fit(made, watched_task(), [batch()] * 3)
    made.save_checkpoint(tmp_path / "half.ckpt")
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    made = small_trainer(tmp_path / "second", second, max_steps=5)
    fit(made, watched_task(), [batch()] * 5, ckpt_path=tmp_path / "half.ckpt")
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("name", MONITORS)
def test_wrong_settings_are_named(name: str) -> None:
    with pytest.raises(UserError, match="every: -1"):
        MONITORS[name](-1)


def warned(kind: type, act: Callable[[], None]) -> list[str]:
    """What a callback warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(one.message) for one in caught if str(one.message).startswith(kind.__name__)]


def test_an_epoch_that_ends_before_its_batch_leaves_no_hook(tmp_path: Path) -> None:
    class Stops(TranslationTask):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            super().on_train_batch_start(batch, batch_idx)
            return -1 if batch_idx == 1 else None

        def on_train_epoch_start(self) -> None:
            assert hooks(self) == 0

    task, monitors = watched_task(kind=Stops), [make() for make in MONITORS.values()]
    fit(small_trainer(tmp_path, *monitors, max_epochs=3), task, [batch()] * 3)
    assert task.global_step == 3
    assert hooks(task) == 0
    assert stance() == "default"


class Keywords(TinyTask):
    """Calls its norm by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, eps=0.02)

    def loss(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return self.norm(input=given[0]).cumsum(-1).square().sum()


def test_a_norm_may_be_called_by_keyword(tmp_path: Path) -> None:
    monitor, (given,) = EpsilonAudit(every=1, layers={"norms": "norm"}, figures=False), batches(1)
    trainer(tmp_path, monitor, max_steps=1).fit(Keywords(), loader([given]))
    near = (given[0].var(-1, correction=0) <= 10 * 0.02).double().mean().item()
    assert 0 < near < 1
    assert monitor.latest == {"epsilon_audit/norms/layer_001": pytest.approx(near)}


def compiled_whole(task: Any) -> Any:
    """The task with its model in one graph, in which no hook of a layer is called."""
    task.model.forward = torch.compile(task.model.forward, backend="eager", dynamic=True)
    return task


def test_a_model_that_is_compiled_as_a_whole_hides_its_layers_and_that_is_said(tmp_path: Path) -> None:
    monitors = [MONITORS[name](2) for name in ("gradient_ratio", "layer_similarity", "activation_scale")]
    made = small_trainer(tmp_path, *monitors, max_steps=2, logger=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(made, compiled_whole(watched_task()), [batch()] * 2)
    torch._dynamo.reset()
    said = [str(warning.message) for warning in caught]
    for monitor in monitors:
        for stack in ("encoder", "decoder"):
            start = f"{type(monitor).__name__}: no layer of {stack} ran in training_step where a hook sees it"
            assert any(sentence.startswith(start) for sentence in said)
        assert not [key for key in monitor.latest if key.startswith(("activation", "layer"))]
    assert "gradient_ratio/encoder/first_to_last" in monitors[0].latest


def test_what_looks_inside_layers_lets_a_model_that_is_compiled_as_a_whole_run_as_written(tmp_path: Path) -> None:
    found = []
    for task in (watched_task(), compiled_whole(watched_task())):
        monitors = [MONITORS[name](2) for name in ("epsilon_audit", "attention_entropy")]
        fit(small_trainer(tmp_path, *monitors, max_steps=2, logger=False), task, [batch()] * 2)
        found.append(monitors[0].latest | monitors[1].latest)
    torch._dynamo.reset()
    assert "attention_entropy/encoder/layer_001" in found[0]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


# ---------------------------------------------------------------- other people's models

WIDTH = 8
STACKS = {"encoder": "model.encoder.layers.*", "decoder": "model.decoder.layers.*"}


class Translator(pl.LightningModule):
    """torch's own Transformer, pre-norm, whose layers know nothing of us."""

    def __init__(self) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.model = nn.Transformer(WIDTH, 2, 2, 3, 16, **options)

    def training_step(self, given: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(*given).cumsum(-1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but")
def test_torchs_transformer(tmp_path: Path) -> None:
    task, given = Translator(), (torch.randn(2, 5, WIDTH), torch.randn(2, 4, WIDTH))
    before = {p: p.detach().clone() for p in task.parameters()}
    seen: dict[str, list[Tensor]] = {"encoder": [], "decoder": []}
    handles = [
        layer.register_forward_hook(lambda layer, inputs, output, stack=stack: seen[stack].append(output.detach()))
        for stack in seen
        for layer in getattr(task.model, stack).layers
    ]
    task.training_step(given, 0)
    for handle in handles:
        handle.remove()
    kinds = (ActivationScale, UpdateRatio, EpsilonAudit)
    monitors: list[Any] = [kind(every=1, layers=STACKS, figures=False) for kind in kinds]
    monitors.append(GradientRatio(every=1, layers=STACKS, roles=True, figures=False))
    trainer(tmp_path, *monitors, max_steps=1).fit(task, loader([given]))
    got = {key: value for monitor in monitors for key, value in monitor.latest.items()}
    for stack, states in seen.items():
        layers = getattr(task.model, stack).layers
        for i, (layer, state) in enumerate(zip(layers, states, strict=True)):
            key = f"{stack}/layer_{i + 1:03d}"
            assert got[f"activation_rms/{key}"] == pytest.approx(state.square().mean().sqrt().item(), rel=1e-5)
            step = torch.cat([(p.detach() - before[p]).flatten() for p in layer.parameters()]).norm()
            weights = torch.cat([before[p].flatten() for p in layer.parameters()]).norm()
            assert got[f"update_ratio/{key}"] == pytest.approx((step / weights).item(), rel=1e-4)
            assert got[f"epsilon_audit/{key}"] == 0.0
            own = torch.cat([p.grad.flatten() for p in layer.self_attn.parameters()]).norm().item()
            assert got[f"gradient_norm_self_attention/{key}"] == pytest.approx(own, rel=1e-5)
            both = [*layer.linear1.parameters(), *layer.linear2.parameters()]
            forward = torch.cat([p.grad.flatten() for p in both]).norm().item()
            assert got[f"gradient_norm_feed_forward/{key}"] == pytest.approx(forward, rel=1e-5)
            assert (f"gradient_norm_cross_attention/{key}" in got) == (stack == "decoder")
    assert hooks(task) == 0


def test_layers_without_attention_are_said_aloud(tmp_path: Path) -> None:
    monitor = AttentionEntropy(every=1, figures=False)
    said = warned(AttentionEntropy, lambda: trainer(tmp_path, monitor, max_steps=1).fit(TinyTask(), loader(batches(1))))
    assert len(said) == 2
    assert all("have no attention whose logits it knows" in sentence for sentence in said)
    assert not monitor.latest


def test_layers_without_parts_have_no_roles(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="roles: true, but nothing says what the parts of Block are"):
        trainer(tmp_path, GradientRatio(roles=True), max_steps=1).fit(TinyTask(), loader(batches(1)))


def test_layers_without_norms_are_said_aloud(tmp_path: Path) -> None:
    made = trainer(tmp_path, EpsilonAudit(every=1), max_steps=1)
    said = warned(EpsilonAudit, lambda: made.fit(TinyTask(), loader(batches(1))))
    assert len(said) == 2
    assert all("have no norm that it knows" in sentence for sentence in said)


@pytest.mark.parametrize("depth", [24, 25, 100])
def test_number_of_keys_is_bounded(tmp_path: Path, depth: int) -> None:
    monitors = [ActivationScale(every=1, figures=False), UpdateRatio(every=1, figures=False)]
    trainer(tmp_path, *monitors, max_steps=1).fit(TinyTask(encoder_layers=depth), loader(batches(1)))
    for kind in ("activation_rms", "update_ratio"):
        rows = records(tmp_path, f"{kind}/encoder/layer_")
        assert len(rows[0]) - 1 <= 25
        assert {f"{kind}/encoder/layer_001", f"{kind}/encoder/layer_{depth:03d}"} <= set(rows[0])
    assert math.isfinite(monitors[0].summary()["activation_rms/encoder/slope"])


def test_a_deep_run_has_as_many_keys_as_the_readme_says(tmp_path: Path) -> None:
    said = re.search(r"18\+18 layers has (\d+) keys of diagnostics, (\d+) with everything on", SENTENCES)
    assert said
    default = [kind(figures=False) if kind is not SpikeGuard else kind() for kind in training.MONITORS.values()]
    for monitor in default:
        monitor.every = min(monitor.every, 1)
    for monitors, keys in ((default, said[1]), ([make() for make in MONITORS.values()], said[2])):
        task = watched_task(encoder_layers=18, decoder_layers=18)
        fit(small_trainer(tmp_path, *monitors, max_steps=1, logger=False), task, [batch()])
        assert len({key for monitor in monitors for key in monitor.latest}) == int(keys)


ELSEWHERE = ("val", "test", "stability/diverged_at", "stability/rollbacks", "skip_cost", "effective_depth")
"""How keys begin that not every run logs, or not with an update."""


def documented() -> list[str]:
    """The keys in the README's table that the updates of any run log, as patterns."""
    rows = [row.split("|")[1] for row in README.split("| key | what |")[1].split("\n\n")[0].splitlines()[2:]]
    keys = [key for row in rows for key in re.findall(r"`([^`]+)`", row)]
    kinds = {r"\{stack\}": "(encoder|decoder)", r"\{role\}": "(self_attention|cross_attention|feed_forward)", "…": ".+"}
    patterns = []
    for key in keys:
        if not key.startswith((*ELSEWHERE, "attention_entropy.", "gradient_ratio.", "trainer.")):
            pattern = re.escape(key)
            for name, expression in kinds.items():
                pattern = pattern.replace(name, expression)
            patterns.append(pattern)
    return patterns


def test_weights_and_biases_gets_every_key_of_a_deep_run_and_no_more_than_the_readme_says(tmp_path: Path) -> None:
    """Read back from the file of an offline run, whose gradients are scaled so that skipped updates are counted too."""
    said = re.search(r"18\+18 layers has \d+ keys of diagnostics, (\d+) with everything on", SENTENCES)
    assert said
    task = watched_task(encoder_layers=18, decoder_layers=18)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    monitors = [make() for make in MONITORS.values()]
    logger = training.wandb_logger(tmp_path, "offline")
    fit(small_trainer(tmp_path, *monitors, max_steps=2, logger=logger, plugins=[plugin]), task, [batch()] * 2)
    wandb.finish()
    wandb.teardown()
    found: dict[str, list[int]] = {}
    for row in wandb_file.history(tmp_path):
        for key in row.keys() - {"trainer/global_step"}:
            found.setdefault(key, []).append(row["trainer/global_step"])
    assert {key: steps for key, steps in found.items() if not key.startswith("_")} == {
        key: [0, 1] for key in found if not key.startswith("_")
    }, "each key once an update, at growing updates"
    diagnostics = {key for monitor in monitors for key in monitor.latest}
    assert diagnostics <= set(found)
    assert len(diagnostics) == int(said[1]) + 1, "and one where gradients are scaled"
    for pattern in documented():
        assert any(re.fullmatch(pattern, key) for key in found), pattern
