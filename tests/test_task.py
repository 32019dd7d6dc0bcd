"""The training loop: the same update however the data is cut, the schedule, checkpoints."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from stabilize import kernels
from stabilize.callbacks import GradientRatio
from stabilize.data.batch import Batch
from stabilize.errors import UserError
from stabilize.model.layer import compiled_run
from stabilize.strategies import (
    B2T,
    HyperConnections,
    InverseSqrt,
    Linear,
    Noam,
    NoWarmup,
    Part,
    PostNorm,
    PreNorm,
    RMSNorm,
    Stabilizer,
    Sum,
    Warmup,
)
from stabilize.task import TranslationTask
from stabilize.tokens import PAD
from tests.models import assert_equal
from tests.tasks import ENGLISH, Sentences, curve, fit, rows, sentence_batch, small_task, small_trainer, weights

SMOOTHING = 0.1
BATCH = sentence_batch(0, 1, 2, 3)


def padded(batch: Batch, columns: int) -> Batch:
    """The same sentences with more padding."""
    source, target = (F.pad(ids, (0, columns), value=PAD) for ids in (batch.source, batch.target))
    return Batch(source, target, batch.index)


def without_targets(batch: Batch) -> Batch:
    """The same sources, and nothing to predict."""
    return batch._replace(target=torch.full_like(batch.target, PAD))


@pytest.mark.parametrize(("half", "tolerance"), [(False, 2e-5), (True, 4e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_makes_an_update_fast_changes_neither_loss_nor_gradients(
    half: bool, tolerance: float, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against torch's own linear layer, attention and loss in float64, in the precision that training has."""
    monkeypatch.setattr(kernels, "LARGE", 0)
    monkeypatch.setattr("stabilize.loss.LOGITS_AT_ONCE", {True: 400})
    monkeypatch.setattr("stabilize.loss.ROWS_AT_ONCE", 1)
    task = small_task(tied=tied, label_smoothing=SMOOTHING)
    plain = copy.deepcopy(task).double()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss, nll, _ = task.loss(BATCH)
    loss.backward()

    for name, own in {"linear": F.linear, "attend": torchs_attention}.items():
        monkeypatch.setattr(kernels, name, own)
    labels = BATCH.target[:, 1:]
    logits = plain.model.project(plain.model(BATCH.source, BATCH.target[:, :-1].masked_fill(labels == PAD, PAD)))
    exact = functools.partial(F.cross_entropy, logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)
    wanted = exact(reduction="sum", label_smoothing=SMOOTHING)
    wanted.backward()

    torch.testing.assert_close(loss.double(), wanted, rtol=tolerance, atol=0)
    torch.testing.assert_close(nll.double(), exact(reduction="sum"), rtol=tolerance, atol=0)
    scale = max(parameter.grad.abs().max().item() for parameter in plain.parameters())
    for mine, true in zip(task.parameters(), plain.parameters(), strict=True):
        assert_equal(mine.grad.double() / scale, true.grad / scale, tolerance)


def torchs_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rate: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Waits(TorchDispatchMode):
    """Refuses what makes the host wait for a device: numbers read from it, and sizes that depend on its numbers."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), "it waits"
        return function(*args, **(kwargs or {}))


def test_an_update_that_logs_nothing_waits_for_no_device(tmp_path: Path) -> None:
    """From the batch, which the loader makes on the host, to the true gradients; for norms see tests/test_stats.py."""

    class Task(TranslationTask):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            with Waits():
                return super().training_step(batch, batch_idx)

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            with Waits():
                super().backward(loss, *args, **kwargs)

        def on_after_backward(self) -> None:
            with Waits():
                super().on_after_backward()

    data = Sentences()
    data.setup("fit")
    trainer = small_trainer(tmp_path, max_epochs=2, log_every_n_steps=100)
    trainer.fit(small_task(kind=Task, label_smoothing=SMOOTHING), data)
    assert trainer.global_step > 1


def test_the_loader_says_where_the_real_tokens_are() -> None:
    data = Sentences()
    data.setup("fit")
    for batch in data.train_dataloader():
        assert batch.real.equal((batch.target[:, 1:] != PAD).flatten().nonzero().squeeze(1))
        found = [small_task().loss(given)[:2] for given in (batch, batch._replace(real=None))]
        assert found[0] == found[1]


def per_token_gradients(task: TranslationTask, batch: Batch) -> dict[str, Tensor]:
    """By hand: torch's mean loss over the real tokens of a batch, differentiated."""
    logits = task.model.project(task.model(batch.source, batch.target[:, :-1]))
    loss = F.cross_entropy(
        logits.flatten(0, 1), batch.target[:, 1:].flatten(), ignore_index=PAD, label_smoothing=task.label_smoothing
    )
    names = [name for name, _ in task.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(task.parameters())), strict=True))


def assert_all_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_equal(found[name], tensor, tolerance)


class Gradients(pl.Callback):
    """Keeps what a callback sees just before each update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Optimizer) -> None:
        named = pl_module.named_parameters()
        self.seen.append({name: p.grad.clone() for name, p in named if p.grad is not None})


# ---------------------------------------------------------------------- loss


def test_the_loss_of_a_batch_is_torchs_over_its_real_tokens() -> None:
    task = small_task(label_smoothing=SMOOTHING)
    loss, nll, tokens = task.loss(BATCH)
    logits = task.model.project(task.model(BATCH.source, BATCH.target[:, :-1])).flatten(0, 1)
    labels = BATCH.target[:, 1:].flatten()
    torchs = functools.partial(F.cross_entropy, logits, labels, ignore_index=PAD, reduction="sum")
    assert_equal(loss, torchs(label_smoothing=SMOOTHING))
    assert_equal(nll, torchs())
    assert tokens == (BATCH.target != PAD).sum() - len(BATCH.target)


def test_padding_changes_neither_loss_nor_gradient() -> None:
    """Nor the nll, which knows of no smoothing (FIELD_REPORTS 1.8)."""
    task = small_task(label_smoothing=SMOOTHING)
    losses, gradients = [], []
    for batch in (BATCH, padded(BATCH, 10)):
        task.zero_grad()
        loss, nll, tokens = task.loss(batch)
        loss.backward()
        losses.append(torch.stack([loss, nll, torch.tensor(float(tokens))]))
        gradients.append({name: p.grad for name, p in task.named_parameters()})
    assert_equal(*losses)
    assert_all_equal(*gradients)


@pytest.mark.parametrize("precision", [{}, {"plugins": MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))}])
def test_an_update_without_targets_moves_nothing(tmp_path: Path, precision: dict[str, Any]) -> None:
    """Not even by Adam's momentum; counters and schedule go on, and no number that is logged is NaN
    (FIELD_REPORTS 1.7)."""
    task = small_task(optimizer=functools.partial(Adam, lr=1e-2))
    trail: list[dict[str, Tensor]] = []
    record = type("Record", (pl.Callback,), {"on_train_batch_end": lambda *_: trail.append(weights(task))})()
    trainer = small_trainer(tmp_path, record, GradientRatio(every=1, figures=False), max_steps=3, **precision)
    fit(trainer, task, [BATCH, without_targets(BATCH), BATCH])
    first, second, third = trail
    assert all(second[name].equal(first[name]) for name in first)
    assert any(not third[name].equal(second[name]) for name in first)
    assert all(weight.isfinite().all() for weight in third.values())
    assert trainer.global_step == 3
    assert curve(tmp_path, "train/loss").keys() == {0, 2}
    assert curve(tmp_path, "train/tokens") == {0: tokens_in(BATCH), 1: tokens_in(BATCH), 2: 2 * tokens_in(BATCH)}
    assert all(math.isfinite(value) for row in rows(tmp_path) for value in row.values())


def tokens_in(batch: Batch) -> int:
    return int((batch.target[:, 1:] != PAD).sum())


# ---------------------------------------------------------------------- the same update however it is cut


def trained(folder: Path, batches: Sequence[Batch], *callbacks: pl.Callback, **options: Any) -> dict[str, Tensor]:
    """By how much each weight moves in an epoch over the batches."""
    task = small_task(label_smoothing=SMOOTHING)
    before = weights(task)
    fit(small_trainer(folder, *callbacks, max_epochs=1, **options), task, batches)
    return {name: weight - before[name] for name, weight in weights(task).items()}


@pytest.mark.parametrize(
    ("windows", "cut", "accumulate"),
    [
        ([(0, 1, 2, 3)], [(2,), (0, 1, 3)], 2),
        ([(0, 1, 2, 3)], [(3,), (1,), (2,), (0,)], 4),
        ([(0, 1, 2), (3,)], [(0,), (2,), (1,), (3,)], 3),
        ([(0, 1, 2), (3, 4), (5,)], [(0, 1), (2,), (3,), (4,), (5,)], 2),
    ],
    ids=["two", "four", "last window of one", "last window of one after two"],
)
def test_accumulated_batches_make_the_update_of_their_union(
    tmp_path: Path, windows: list[tuple[int, ...]], cut: list[tuple[int, ...]], accumulate: int
) -> None:
    """Of unequal batches too, and in a last window of fewer (FIELD_REPORTS 1.9)."""
    whole, parts = Gradients(), Gradients()
    expected = trained(tmp_path / "whole", [sentence_batch(*window) for window in windows], whole)
    batches = [sentence_batch(*part) for part in cut]
    found = trained(tmp_path / "parts", batches, parts, accumulate_grad_batches=accumulate)
    assert_all_equal(found, expected)
    assert len(parts.seen) == len(whole.seen) == len(windows)
    for one, other in zip(parts.seen, whole.seen, strict=True):
        assert_all_equal(one, other)
    for key in ("train/loss", "train/nll", "train/tokens", "lr"):
        assert curve(tmp_path / "parts", key) == pytest.approx(curve(tmp_path / "whole", key), rel=1e-5)


def test_a_callback_sees_the_gradient_per_token(tmp_path: Path) -> None:
    gradients = Gradients()
    expected = per_token_gradients(small_task(label_smoothing=SMOOTHING), BATCH)
    deltas = trained(tmp_path, [sentence_batch(2), sentence_batch(0, 1, 3)], gradients, accumulate_grad_batches=2)
    assert_all_equal(gradients.seen[0], expected)
    assert_all_equal(deltas, {name: -0.5 * gradient for name, gradient in expected.items()})


def test_a_callback_sees_the_gradient_per_token_under_a_scaler(tmp_path: Path) -> None:
    gradients = Gradients()
    expected = per_token_gradients(small_task(label_smoothing=SMOOTHING), BATCH)
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))
    batches = [sentence_batch(2), sentence_batch(0, 1, 3)]
    trained(tmp_path, batches, gradients, accumulate_grad_batches=2, plugins=plugin)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients.seen[0][name], gradient, rtol=0, atol=0.02 * gradient.abs().max().item())


class Halves(TranslationTask):
    """The first process has the first sentence of a batch, the second all others."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor, int]:
        mine = slice(0, 1) if self.global_rank == 0 else slice(1, None)
        return super().loss(Batch(*(part[mine] for part in batch[:3])))


class Keep(pl.Callback):
    """Leaves the trained weights and what was seen before the updates in a file."""

    def __init__(self) -> None:
        self.gradients = Gradients()

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        self.gradients.on_before_optimizer_step(*arguments)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        path = Path(trainer.default_root_dir) / f"rank_{trainer.global_rank}.pt"
        torch.save({"weights": weights(pl_module), "gradients": self.gradients.seen}, path)


def test_two_processes_make_the_update_of_one(tmp_path: Path) -> None:
    """With unequal shares, one of them without any target in the last update."""
    batches = [BATCH, sentence_batch(5, 2, 4), sentence_batch(1, 0)]
    batches[2] = batches[2]._replace(target=batches[2].target * torch.tensor([[1], [0]]))
    for kind, folder, options in (
        (TranslationTask, tmp_path / "one", {}),
        (Halves, tmp_path / "two", {"devices": 2, "strategy": "ddp_spawn"}),
    ):
        task = small_task(kind=kind, label_smoothing=SMOOTHING)
        fit(small_trainer(folder, Keep(), max_epochs=1, **options), task, batches)
    expected = torch.load(tmp_path / "one" / "rank_0.pt")
    for rank in (0, 1):
        found = torch.load(tmp_path / "two" / f"rank_{rank}.pt")
        assert_all_equal(found["weights"], expected["weights"])
        for one, other in zip(found["gradients"], expected["gradients"], strict=True):
            assert_all_equal(one, other)
    for key in ("train/loss", "train/nll", "train/tokens"):
        assert curve(tmp_path / "two", key) == pytest.approx(curve(tmp_path / "one", key), rel=1e-5)


# ---------------------------------------------------------------------- schedule and parameter groups

CUTS = [(10, 1, 3), (10, 4, 3), (7, 3, 2)]
"""Batches of an epoch, batches of an update, epochs."""

SCHEDULES: list[tuple[Warmup, Callable[[int], float]]] = [
    (InverseSqrt(4), lambda n: min(n / 4, 2 / n**0.5)),
    (Noam(4), lambda n: 16**-0.5 * min(n**-0.5, n * 4**-1.5)),
    (Linear(4), lambda n: min(n / 4, 1.0)),
    (NoWarmup(), lambda n: 1.0),
]


@pytest.mark.parametrize(("batches", "accumulate", "epochs"), CUTS)
@pytest.mark.parametrize(("warmup", "factor"), SCHEDULES[:1])
def test_the_schedule_counts_updates(
    tmp_path: Path, warmup: Warmup, factor: Callable[[int], float], batches: int, accumulate: int, epochs: int
) -> None:
    trainer = small_trainer(tmp_path, max_epochs=epochs, accumulate_grad_batches=accumulate)
    fit(trainer, small_task(Stabilizer(warmup=warmup)), [sentence_batch(1)] * batches)
    updates = math.ceil(batches / accumulate) * epochs
    rates = curve(tmp_path, "lr")
    assert trainer.global_step == updates
    assert rates == pytest.approx({n - 1: 0.5 * factor(n) for n in range(1, updates + 1)})
    assert max(rates, key=rates.__getitem__) == 4 - 1


@pytest.mark.parametrize(("warmup", "factor"), SCHEDULES[1:])
def test_every_schedule_reaches_the_optimizer(tmp_path: Path, warmup: Warmup, factor: Callable[[int], float]) -> None:
    fit(small_trainer(tmp_path, max_epochs=1), small_task(Stabilizer(warmup=warmup)), [sentence_batch(1)] * 6)
    assert curve(tmp_path, "lr") == pytest.approx({n - 1: 0.5 * factor(n) for n in range(1, 7)})


@pytest.mark.parametrize(("total", "over"), [(4, 5), (6, 7), (8, None), (9, None)])
def test_a_schedule_that_is_over_before_the_run_is_told(tmp_path: Path, total: int, over: int | None) -> None:
    """A rate of 0 at the last update alone is none's mistake."""
    task = small_task(Stabilizer(warmup=Linear(2, total)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(small_trainer(tmp_path, max_steps=9), task, [sentence_batch(1)] * 9)
    told = [str(warning.message) for warning in said if "learning rate" in str(warning.message)]
    assert [text[: len("the learning rate of Linear is 0 from update 5")] for text in told] == (
        [f"the learning rate of Linear is 0 from update {over}"] if over else []
    )
    rates = curve(tmp_path, "lr")
    assert over is None or [update for update in range(1, 10) if rates[update - 1] == 0] == [*range(over, 10)]


class Rates(pl.Callback):
    """The learning rate of each parameter at each update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, task: pl.LightningModule, optimizer: Optimizer) -> None:
        rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        self.seen.append({name: rate[id(p)] for name, p in task.named_parameters()})


@pytest.mark.parametrize("tied", [True, False])
def test_the_decoder_follows_the_warm_up_of_its_own_stabilizer(tmp_path: Path, tied: bool) -> None:
    task = small_task(Stabilizer(warmup=InverseSqrt(4)), decoder_stabilizer=Stabilizer(warmup=Linear(2)), tied=tied)
    rates = Rates()
    fit(small_trainer(tmp_path, rates, max_epochs=1), task, [sentence_batch(1)] * 6)
    first = ("model.encoder.", "model.source_embedding.")
    for n, seen in enumerate(rates.seen, start=1):
        assert seen.keys() == weights(task).keys()
        for name, rate in seen.items():
            factor = min(n / 4, 2 / n**0.5) if name.startswith(first) else min(n / 2, 1.0)
            assert rate == pytest.approx(0.5 * factor), name


@pytest.mark.parametrize(
    "stabilizer",
    [
        Stabilizer(PostNorm(), norm=RMSNorm(), warmup=NoWarmup()),
        Stabilizer(PreNorm(), HyperConnections(2), warmup=NoWarmup()),
    ],
)
def test_weight_decay_is_for_the_matrices_of_the_model(tmp_path: Path, stabilizer: Stabilizer) -> None:
    """Without a gradient only decay moves weights; gains, biases and all that strategies own stay."""
    decay = functools.partial(AdamW, lr=0.1, weight_decay=0.5)
    task = small_task(stabilizer, optimizer=decay, tied=False, positions="learned")
    before = weights(task)
    strategies = {id(p) for part in task.modules() if isinstance(part, Part) for p in part.parameters()}
    fit(small_trainer(tmp_path, NoGradient(), max_steps=1), task, [BATCH])
    for name, parameter in task.named_parameters():
        decayed = parameter.ndim >= 2 and id(parameter) not in strategies
        assert_equal(parameter.detach(), before[name] * (1 - 0.1 * 0.5) if decayed else before[name])
    norms = [name for name, parameter in task.named_parameters() if id(parameter) in strategies]
    assert len(norms) > 4


class NoGradient(pl.Callback):
    """Leaves nothing but decay to move a weight."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, task: pl.LightningModule, optimizer: Optimizer) -> None:
        for parameter in task.parameters():
            parameter.grad.zero_()


# ---------------------------------------------------------------------- moments of a strategy


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_strategy_is_prepared_once_and_told_of_every_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """Also across a resume; `after_update` comes after the weights moved, `prepare` before they ever did."""
    calls: list[tuple[Any, ...]] = []
    task = small_task()
    start = weights(task)

    def moved(model: nn.Module) -> bool:
        return any(not p.equal(start[f"model.{name}"]) for name, p in model.named_parameters())

    monkeypatch.setattr(Sum, "prepare", lambda part, model, batch: calls.append(("prepare", moved(model), batch)))
    monkeypatch.setattr(
        Sum, "after_update", lambda part, update: calls.append(("after_update", moved(task.model), update))
    )
    parts = sum(isinstance(part, Sum) for part in task.modules())
    batches = [sentence_batch(k % 6) for k in range(7)]
    trainer = small_trainer(tmp_path, max_epochs=2, accumulate_grad_batches=accumulate)
    fit(trainer, task, batches)
    updates = 2 * math.ceil(7 / accumulate)
    assert [call[:2] for call in calls[:parts]] == [("prepare", False)] * parts
    assert all(call[2].source.equal(batches[0].source) for call in calls[:parts])
    expected = [("after_update", True, n) for n in range(1, updates + 1) for _ in range(parts)]
    assert calls[parts:] == expected

    trainer.save_checkpoint(tmp_path / "end.ckpt")
    calls.clear()
    trainer = small_trainer(tmp_path / "resumed", max_epochs=3, accumulate_grad_batches=accumulate)
    fit(trainer, task, batches, ckpt_path=tmp_path / "end.ckpt")
    expected = [n for n in range(updates + 1, updates // 2 * 3 + 1) for _ in range(parts)]
    assert [call[2] for call in calls] == expected


# ---------------------------------------------------------------------- checkpoints


def fit_sentences(
    folder: Path, task: TranslationTask, *callbacks: pl.Callback, checkpoint: Path | None = None, **options: Any
) -> pl.Trainer:
    """Train on the sentences in token batches, three of them an epoch."""
    trainer = small_trainer(folder, *callbacks, enable_checkpointing=True, **options)
    trainer.fit(task, datamodule=Sentences(), ckpt_path=checkpoint)
    return trainer


MOMENTUM = functools.partial(Adam, lr=1e-2)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, accumulate: int) -> None:
    """To the bit, from any update, with the same logged numbers at the same steps."""
    stabilizer = Stabilizer(B2T(), warmup=InverseSqrt(3))
    options = {"max_steps": 7, "accumulate_grad_batches": accumulate}

    def every_update(folder: Path) -> ModelCheckpoint:
        return ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=1, save_top_k=-1)

    whole = small_task(stabilizer, optimizer=MOMENTUM)
    trainer = fit_sentences(tmp_path / "whole", whole, every_update(tmp_path / "whole"), **options)
    assert 2 < trainer.num_training_batches < 7 * accumulate, "there must be updates inside an epoch"
    for update in (1, 2, 4):
        resumed = small_task(stabilizer, optimizer=MOMENTUM)
        folder = tmp_path / f"from_{update}"
        checkpoint = tmp_path / "whole" / "checkpoints" / f"step={update}.ckpt"
        fit_sentences(folder, resumed, every_update(folder), checkpoint=checkpoint, **options)
        assert_all_equal(weights(resumed), weights(whole), tolerance=0)
        for key in ("lr", "train/loss", "train/nll", "train/tokens"):
            expected = {step: value for step, value in curve(tmp_path / "whole", key).items() if step >= update}
            assert curve(folder, key) == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a task whose every part differs from the default, 2 updates old."""
    folder = tmp_path_factory.mktemp("saved")
    task = small_task(
        Stabilizer(PreNorm(), HyperConnections(2), RMSNorm(), warmup=Linear(2)),
        decoder_stabilizer=Stabilizer(B2T(), warmup=NoWarmup()),
        decoder_layers=2,
        positions="learned",
        activation="swiglu",
        tied=False,
    )
    trainer = fit_sentences(folder, task, GradientRatio(every=1), max_steps=2)
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


@torch.no_grad()
def logits(task: TranslationTask) -> Tensor:
    """Of the sentences."""
    return task.model.project(task.model(BATCH.source, BATCH.target[:, :-1]))


def answers(task: TranslationTask) -> dict[str, Any]:
    """Logits and translations of the sentences, as plain values."""
    found = task.search(task.model, BATCH.source)
    translations = [task.tokenizer.decode(hypothesis.ids) for hypothesis in found]
    return {"logits": logits(task).tolist(), "translations": translations}


def test_a_checkpoint_holds_plain_values_alone(checkpoint: Path) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["task"]["stabilizer"]["residual"]["init_args"]["streams"] == 2
    assert json.loads(json.dumps(saved["task"])) == saved["task"]


LOADING = """
import json, sys
from stabilize.task import TranslationTask
from tests.test_task import answers
print(json.dumps(answers(TranslationTask.load_from_checkpoint(sys.argv[1]))))
"""


def test_a_checkpoint_is_all_that_another_process_needs(checkpoint: Path) -> None:
    here = TranslationTask.load_from_checkpoint(checkpoint)
    for name, weight in torch.load(checkpoint, weights_only=True)["state_dict"].items():
        assert here.state_dict()[name].equal(weight)
    command = [sys.executable, "-c", LOADING, str(checkpoint)]
    there = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=True)
    assert json.loads(there.stdout.splitlines()[-1]) == answers(here)


def test_another_model_is_refused_by_name(tmp_path: Path, checkpoint: Path) -> None:
    other = small_task(Stabilizer(PostNorm(), norm=RMSNorm()), decoder_layers=2, activation="swiglu", tied=False)
    with pytest.raises(UserError) as refusal:
        fit_sentences(tmp_path, other, max_steps=3, checkpoint=checkpoint)
    for difference in (
        "model.stabilizer.placement is PreNorm in the checkpoint and PostNorm here",
        "model.stabilizer.residual is HyperConnections in the checkpoint and Sum here",
        "model.stabilizer.residual.streams is 2 in the checkpoint and None here",
        "model.positions is learned in the checkpoint and sinusoidal here",
    ):
        assert difference in str(refusal.value)
    assert "model.activation" not in str(refusal.value)


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.compile without code generation, which is not what is tested here."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled_run.cache_clear()
    yield
    compiled_run.cache_clear()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("saved_compiled", [False, True])
def test_compiled_or_not_a_checkpoint_loads(tmp_path: Path, saved_compiled: bool) -> None:
    task = small_task(compile_layers=saved_compiled)
    trainer = small_trainer(tmp_path, max_steps=1)
    fit(trainer, task, [BATCH])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    expected = logits(task.eval())
    for loaded_compiled in (False, True):
        loaded = TranslationTask.load_from_checkpoint(tmp_path / "a.ckpt", compile_layers=loaded_compiled)
        assert all(layer.compiled == loaded_compiled for layer in loaded.model.layers)
        assert loaded.state_dict().keys() == task.state_dict().keys()
        assert_equal(logits(loaded), expected)


# ---------------------------------------------------------------------- shapes and averages


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_shape_learns_its_sentences(tmp_path: Path, positions: str, activation: str, tied: bool) -> None:
    """Every weight moves, and the loss falls."""
    task = small_task(
        decoder_stabilizer=Stabilizer(PostNorm(), warmup=NoWarmup()),
        optimizer=MOMENTUM,
        **{"positions": positions, "activation": activation, "tied": tied},
    )
    before = weights(task)
    fit(small_trainer(tmp_path, max_epochs=1), task, [BATCH] * 8)
    assert all(not weight.equal(before[name]) for name, weight in weights(task).items())
    losses = list(curve(tmp_path, "train/loss").values())
    assert losses[-1] < losses[0] - 0.5
    assert (task.model.output is None) == tied


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_averaged_weights_are_the_average(tmp_path: Path) -> None:
    """Lightning's callback deep-copies the task; copy and task must not share a weight."""
    task = small_task()
    trail: list[dict[str, Tensor]] = []
    record = type("Record", (pl.Callback,), {"on_train_batch_end": lambda *_: trail.append(weights(task))})()
    average = EMAWeightAveraging(decay=0.75)
    fit(small_trainer(tmp_path, record, average, max_steps=5), task, [BATCH] * 5)
    expected = trail[0]
    for after in trail[1:]:
        expected = {name: 0.75 * mean + 0.25 * after[name] for name, mean in expected.items()}
    assert_all_equal(weights(task), expected)


def test_a_deep_copy_shares_nothing() -> None:
    task = small_task(label_smoothing=SMOOTHING)
    twin = copy.deepcopy(task)
    expected = weights(task)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert_all_equal(weights(task), expected, tolerance=0)
    assert not set(map(id, itertools.chain(task.modules(), task.parameters()))) & set(
        map(id, itertools.chain(twin.modules(), twin.parameters()))
    )
    assert twin.tokenizer.encode(ENGLISH[0]) == task.tokenizer.encode(ENGLISH[0])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_training_goes_on_after_a_test(tmp_path: Path) -> None:
    """The metrics come out of inference mode and count on."""
    task, data = small_task(), Sentences()
    trainer = small_trainer(tmp_path, max_epochs=1, limit_val_batches=1.0)
    trainer.fit(task, datamodule=data)
    first = trainer.test(task, datamodule=data, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(task, datamodule=data)
    assert trainer.test(task, datamodule=data, verbose=False)[0].keys() == first[0].keys()


def test_tokens_since_the_last_log_go_on(tmp_path: Path) -> None:
    """A checkpoint between two logs: the numbers of the next log are those of a run without it."""
    batches = [sentence_batch(0, 1)] * 4  # always the same: in which order these go on is not the matter here
    fit(small_trainer(tmp_path / "whole", max_steps=6, log_every_n_steps=3), small_task(), batches)
    first = small_trainer(tmp_path / "first", max_steps=4, log_every_n_steps=3)
    fit(first, small_task(), batches)
    first.save_checkpoint(tmp_path / "four.ckpt")
    resumed = small_trainer(tmp_path / "resumed", max_steps=6, log_every_n_steps=3)
    fit(resumed, small_task(), batches, ckpt_path=tmp_path / "four.ckpt")
    for key in ("train/tokens", "train/loss", "train/nll"):
        assert curve(tmp_path / "resumed", key)[5] == pytest.approx(curve(tmp_path / "whole", key)[5]), key


def test_a_checkpoint_can_be_saved_after_a_test_alone(tmp_path: Path) -> None:
    """Without training there is no optimiser to speak of."""
    trainer = small_trainer(tmp_path)
    trainer.test(small_task(), datamodule=Sentences(), verbose=False)
    trainer.save_checkpoint(tmp_path / "tested.ckpt")
    assert torch.load(tmp_path / "tested.ckpt", weights_only=True)["optimizers"] == []
