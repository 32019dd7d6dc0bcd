"""Clipping of an update's gradient."""

from __future__ import annotations

import copy
import functools
import json
import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer

from stabilize.callbacks import GradientRatio, SpikeGuard
from stabilize.errors import UserError
from stabilize.strategies import Clipping, GlobalNorm, Gradients, NoClipping
from stabilize.strategies.clipping import AdaptiveClipping, ZClip
from tests.tasks import curve, fit, sentence_batch, small_task, small_trainer

VALUE = 0.05


def parameters(scale: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Three parameters with gradients and one without, the same at each call."""
    generator = torch.Generator().manual_seed(2)
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(3, 4), (5,), (), (2,)]]
    for parameter in made[:3]:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(dtype)
    return made


def test_the_norm_is_that_of_all_entries_together_as_they_are() -> None:
    half = torch.bfloat16
    made = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 1, dtype=half)), nn.Parameter(torch.zeros(()))]
    for parameter, gradient in zip(made, ([3.0, 0.0], [[4.0], [0.0]], 12.0), strict=True):
        parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
    gradients = Gradients(made)
    assert gradients.norm.item() == pytest.approx(13.0)
    assert gradients.norm is gradients.norm  # taken once
    GlobalNorm(1.0).clip(gradients)
    assert gradients.norm.item() == pytest.approx(1.0, rel=0.01)
    made[0].grad = torch.tensor([math.nan, 0.0])
    assert gradients.norm.isnan()


class Doubles(pl.Callback):
    """Changes the gradients after others have looked at them."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Optimizer) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.mul_(1000.0)


def test_what_is_clipped_are_the_gradients_as_callbacks_leave_them(tmp_path: Path) -> None:
    task = small_task(clipping=GlobalNorm(VALUE), optimizer=functools.partial(SGD, lr=1.0))
    before = [p.detach().clone() for p in task.parameters()]
    fit(small_trainer(tmp_path, SpikeGuard(every=1), Doubles(), max_steps=1), task, [sentence_batch(0, 1, 2)])
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(task.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(VALUE, rel=1e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_clipped_under_a_scaler_are_the_true_gradients(tmp_path: Path, fused: bool) -> None:
    """A fused optimiser unscales in its step, which comes after."""
    task = small_task(clipping=GlobalNorm(VALUE), optimizer=functools.partial(SGD, lr=1.0, fused=fused))
    before = [p.detach().clone() for p in task.parameters()]
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=1024.0))
    guard = SpikeGuard(every=1)
    fit(small_trainer(tmp_path, guard, max_steps=1, plugins=plugin), task, [sentence_batch(0, 1, 2)])
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(task.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(VALUE, rel=1e-3)
    assert curve(tmp_path, "gradient_norm/total_clipped")[0] == pytest.approx(VALUE, rel=1e-3)
    plain = small_task()
    loss, _, tokens = plain.loss(sentence_batch(0, 1, 2))
    (loss / tokens).backward()
    assert guard.progress["recent"]["gradient_norm"] == pytest.approx(
        [Gradients([*plain.parameters()]).norm.item()], rel=0.02
    )


@given(scale=st.floats(1e-4, 1e4), value=st.floats(1e-3, 1e3))
def test_global_norm_is_torchs(scale: float, value: float) -> None:
    mine, torchs = parameters(scale), parameters(scale)
    GlobalNorm(value).clip(Gradients(mine))
    nn.utils.clip_grad_norm_(torchs, value)
    for one, other in zip(mine[:3], torchs[:3], strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert mine[3].grad is None


def test_a_small_gradient_keeps_every_bit() -> None:
    mine, before = parameters(0.1), parameters(0.1)
    GlobalNorm(1e3).clip(Gradients(mine))
    assert all(one.grad.equal(other.grad) for one, other in zip(mine[:3], before[:3], strict=True))


def test_nothing_to_clip_is_no_error() -> None:
    for clipping in (GlobalNorm(), NoClipping(), AdaptiveClipping(), ZClip()):
        before = clipping.state()
        clipping.clip(Gradients([nn.Parameter(torch.zeros(2))]))
        assert clipping.state() == before


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_value_that_leaves_nothing_is_refused(value: float) -> None:
    with pytest.raises(UserError, match=r"model\.clipping\.value"):
        GlobalNorm(value)


@pytest.mark.parametrize(
    ("of_task", "of_trainer"), [({"clipping": GlobalNorm(VALUE)}, {}), ({}, {"gradient_clip_val": VALUE})]
)
def test_the_log_has_the_norm_before_and_after(tmp_path: Path, of_task: dict, of_trainer: dict) -> None:
    trainer = small_trainer(tmp_path, GradientRatio(every=1, figures=False), max_steps=3, **of_trainer)
    fit(trainer, small_task(**of_task), [sentence_batch(0, 1, 2)] * 3)
    before, after = curve(tmp_path, "gradient_norm/total"), curve(tmp_path, "gradient_norm/total_clipped")
    assert before.keys() == after.keys() == {0, 1, 2}
    assert min(before.values()) > VALUE
    assert all(norm == pytest.approx(VALUE, rel=1e-4) and norm <= VALUE * (1 + 1e-6) for norm in after.values())


def test_without_clipping_both_norms_are_one(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, GradientRatio(every=1, figures=False), max_steps=2)
    fit(trainer, small_task(), [sentence_batch(0, 1, 2)] * 2)
    after = curve(tmp_path, "gradient_norm/total_clipped")
    assert curve(tmp_path, "gradient_norm/total") == pytest.approx(after, rel=1e-5)


def test_two_clippings_are_refused(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, max_steps=1, gradient_clip_val=1.0)
    with pytest.raises(UserError, match=r"trainer\.gradient_clip_val is 1\.0 and model\.clipping is GlobalNorm"):
        fit(trainer, small_task(clipping=GlobalNorm()), [sentence_batch(0)])


def test_clipping_that_lightning_refuses_for_fused_optimisers_is_refused_before_training(tmp_path: Path) -> None:
    task = small_task(optimizer=functools.partial(torch.optim.AdamW, fused=True))
    made = small_trainer(tmp_path, max_steps=1, precision="bf16-mixed", gradient_clip_val=1.0)
    with pytest.raises(UserError, match=r"refuses for a fused AdamW in bf16-mixed; model\.clipping: GlobalNorm"):
        fit(made, task, [sentence_batch(0)])


# ---------------------------------------------------------------- adaptive clipping of units


def weighted(scale: float) -> list[Tensor]:
    """A matrix with a row of zeros, a bias, a scalar, and one without a gradient."""
    generator = torch.Generator().manual_seed(3)
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(4, 6), (5,), (), (2, 2)]]
    made[0].data[1] = 0.0
    for parameter in made[:3]:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    made[0].grad[2] = 0.0
    return made


def units(parameter: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Weight and gradient of each unit: a matrix's rows, a vector or a scalar as a whole."""
    rows = list(zip(parameter.data, parameter.grad, strict=True)) if parameter.ndim > 1 else []
    return rows or [(parameter.data, parameter.grad)]


@given(scale=st.floats(1e-4, 1e3), ratio=st.sampled_from([0.01, 0.3]), epsilon=st.sampled_from([1e-3, 0.1]))
def test_adaptive_clipping_bounds_each_unit_by_its_weight(scale: float, ratio: float, epsilon: float) -> None:
    """G_i <- G_i ratio max(|W_i|, epsilon) / |G_i| where |G_i| is above that (Brock et al. 2021, arXiv:2102.06171)."""
    mine, before = weighted(scale), weighted(scale)
    AdaptiveClipping(ratio, epsilon).clip(Gradients(mine))
    for one, other in zip(mine[:3], before[:3], strict=True):
        for (_, found), (weight, gradient) in zip(units(one), units(other), strict=True):
            most, norm = ratio * max(weight.norm().item(), epsilon), gradient.norm().item()
            expected = gradient * (most / max(norm, 1e-6)) if norm > most else gradient
            torch.testing.assert_close(found, expected)
    assert mine[3].grad is None


@pytest.mark.parametrize(("arguments", "key"), [({"ratio": 0.0}, "ratio"), ({"epsilon": -1.0}, "epsilon")])
def test_what_leaves_no_gradient_is_refused_by_key(arguments: dict, key: str) -> None:
    with pytest.raises(UserError, match=rf"model\.clipping\.{key}"):
        AdaptiveClipping(**arguments)


# ---------------------------------------------------------------- ZClip

NORMS = [1.0, 1.2, 0.8, 1.1, 0.9, 1.0, 30.0, 1.05, 2.5, 0.95, 1.0, 400.0, 1.6, 1.7, 1.8, 0.5]


def z_clipped(
    norms: list[float], threshold: float, decay: float, warmup: int, maximum: float | None
) -> tuple[list[float], float, float]:
    """The norms left, by the released code (Kumar et al. 2025, arXiv:2504.02507), and its mean and variance at the end.

    The first `warmup` norms give mean and variance; then z = (g - mean) / deviation, above the threshold g becomes
    mean + threshold^2 deviation / z, and mean and variance move by that; `maximum` bounds what is left.
    """
    left, mean, variance = [], sum(norms[:warmup]) / warmup, 0.0
    variance = sum((norm - mean) ** 2 for norm in norms[:warmup]) / warmup
    for number, norm in enumerate(norms):
        kept = norm
        if number >= warmup:
            deviation = variance**0.5
            z = (norm - mean) / (deviation + 1e-6)
            if z > threshold:
                kept = mean + threshold**2 * deviation / z
            mean = decay * mean + (1 - decay) * kept
            variance = decay * variance + (1 - decay) * (kept - mean) ** 2
        left.append(kept if maximum is None else min(kept, maximum))
    return left, mean, variance


def run(clipping: ZClip, norms: list[float]) -> list[float]:
    """The norm left at each update."""
    left = []
    for norm in norms:
        made = parameters(1.0)
        total = torch.stack([p.grad.norm() for p in made[:3]]).norm()
        for parameter in made[:3]:
            parameter.grad.mul_(norm / total)
        clipping.clip(Gradients(made))
        left.append(torch.stack([p.grad.norm() for p in made[:3]]).norm().item())
    return left


@pytest.mark.parametrize("maximum", [None, 1.0, 10.0])
@pytest.mark.parametrize(("threshold", "decay", "warmup"), [(2.5, 0.97, 5), (1.5, 0.8, 3), (2.5, 0.97, 25)])
def test_z_clip_is_the_released_code(threshold: float, decay: float, warmup: int, maximum: float | None) -> None:
    norms = NORMS * 3
    found = run(ZClip(threshold, decay, warmup, maximum), norms)
    expected, _, _ = z_clipped(norms, threshold, decay, warmup, maximum)
    assert found == pytest.approx(expected, rel=1e-3)
    if maximum is None:
        assert found[:warmup] == pytest.approx(norms[:warmup])
        assert found != pytest.approx(norms)


def test_z_clip_goes_on_where_its_state_was_taken() -> None:
    expected = run(ZClip(warmup=4, maximum=None), NORMS)
    for cut in (2, 8):
        first = ZClip(warmup=4, maximum=None)
        left = run(first, NORMS[:cut])
        state = first.state()
        assert all(isinstance(value, (int, float)) for value in state.values())
        second = ZClip(warmup=4, maximum=None)
        second.restore(state)
        assert left + run(second, NORMS[cut:]) == pytest.approx(expected)


def test_a_gradient_that_is_not_finite_does_not_stay_in_mind() -> None:
    clipping = ZClip(warmup=2, maximum=None)
    run(clipping, [1.0, 1.1, 0.9])
    before = clipping.state()
    made = parameters(1.0)
    made[0].grad.fill_(float("nan"))
    clipping.clip(Gradients(made))
    assert clipping.state() == before


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"threshold": 0.0}, "threshold"),
        ({"decay": 1.0}, "decay"),
        ({"warmup": 0}, "warmup"),
        ({"maximum": 0.0}, "maximum"),
    ],
)
def test_numbers_that_will_not_do_are_refused_by_key(arguments: dict, key: str) -> None:
    with pytest.raises(UserError, match=rf"model\.clipping\.{key}"):
        ZClip(**arguments)


# ---------------------------------------------------------------- both in half precision, in copies, in a task


def test_small_units_keep_every_bit_and_a_zero_weight_can_move() -> None:
    mine, before = weighted(1e-6), weighted(1e-6)
    AdaptiveClipping().clip(Gradients(mine))
    assert all(one.grad.equal(other.grad) for one, other in zip(mine[:3], before[:3], strict=True))
    mine = weighted(1.0)
    AdaptiveClipping().clip(Gradients(mine))
    assert mine[0].grad[1].norm().item() == pytest.approx(0.01 * 1e-3)


@pytest.mark.parametrize("clipping", [AdaptiveClipping(), ZClip(maximum=0.1)], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_of_other_formats_are_clipped_in_theirs(clipping: Clipping, dtype: torch.dtype) -> None:
    single = weighted(1.0)
    other = [nn.Parameter(parameter.detach().to(dtype)) for parameter in single]
    for one, parameter in zip(single, other, strict=True):
        parameter.grad = None if one.grad is None else one.grad.to(dtype)
    for parameters in (single, other):
        copy.deepcopy(clipping).clip(Gradients(parameters))
    for one, parameter in zip(single[:3], other[:3], strict=True):
        assert parameter.grad.dtype == dtype
        torch.testing.assert_close(parameter.grad.float(), one.grad, rtol=2e-2, atol=1e-6)


def test_the_classifier_is_left_alone() -> None:
    mine, before = weighted(10.0), weighted(10.0)
    AdaptiveClipping().clip(Gradients(mine, mine[0]))
    assert mine[0].grad.equal(before[0].grad)
    assert not mine[1].grad.equal(before[1].grad)


def test_a_gradient_that_is_not_finite_stays_in_its_unit() -> None:
    mine = weighted(1.0)
    mine[0].grad[2, 1] = math.inf
    AdaptiveClipping().clip(Gradients(mine))
    assert not mine[0].grad[2].isfinite().all()
    assert all(mine[0].grad[row].isfinite().all() for row in (0, 1, 3))
    assert mine[1].grad.isfinite().all()


class Told(Clipping):
    """Keeps what it is told to be the classifier."""

    def clip(self, gradients: Gradients) -> None:
        self.classifier = gradients.classifier


@pytest.mark.parametrize("tied", [True, False])
def test_a_task_says_what_makes_its_logits(tmp_path: Path, tied: bool) -> None:
    task = small_task(tied=tied, clipping=Told())
    fit(small_trainer(tmp_path, max_steps=1), task, [sentence_batch(0)])
    expected = task.model.source_embedding if tied else task.model.output
    assert task.clipping.classifier is expected.weight


def test_a_spike_is_cut_to_less_than_a_milder_one() -> None:
    """Norms of mean 1 and deviation 0.1, then one of 3: z is 20, and 1 + 2.5^2 0.1 / 20 is left."""
    clipping = ZClip(warmup=4, maximum=None)
    assert run(clipping, [0.9, 1.1, 0.9, 1.1]) == pytest.approx([0.9, 1.1, 0.9, 1.1])
    milder = copy.deepcopy(clipping)
    (left,) = run(clipping, [3.0])
    assert left == pytest.approx(1 + 2.5**2 * 0.1 / 20, rel=1e-4)
    assert clipping.state()["mean"] == pytest.approx(1 + 0.03 * 0.03125, rel=1e-4)
    assert left < run(milder, [1.3])[0] < 1.3


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("seen", [0, 2, 9])
def test_a_norm_that_is_not_finite_leaves_no_trace(bad: float, seen: int) -> None:
    clipping, made = ZClip(warmup=5), parameters(1.0)
    run(clipping, NORMS[:seen])
    before = clipping.state()
    made[1].grad[0] = bad
    clipping.clip(Gradients(made))
    assert clipping.state() == before


@pytest.mark.parametrize("stop", [1, 7, 12])
def test_z_clip_resumes_to_the_bit_from_plain_numbers(stop: int) -> None:
    whole, before, after = ZClip(warmup=7), ZClip(warmup=7), ZClip(warmup=7)
    expected = run(whole, NORMS)
    found = run(before, NORMS[:stop])
    after.restore(json.loads(json.dumps(before.state())))
    assert found + run(after, NORMS[stop:]) == expected
    assert after.state() == whole.state()


def test_copies_of_a_template_keep_their_own_averages() -> None:
    template = ZClip(warmup=2)
    run(copy.deepcopy(template), NORMS)
    assert template.state() == ZClip().state()
    assert template.spec()["init_args"] == {"threshold": 2.5, "decay": 0.97, "warmup": 2, "maximum": None}


@pytest.mark.parametrize("clipping", [AdaptiveClipping(), ZClip(warmup=2)], ids=lambda c: type(c).__name__)
def test_a_run_under_a_clipping_that_adapts(tmp_path: Path, clipping: Clipping) -> None:
    task = small_task(clipping=clipping)
    fit(small_trainer(tmp_path, max_steps=6), task, [sentence_batch(0, 1, 2)] * 6)
    assert all(math.isfinite(value) for value in curve(tmp_path, "gradient_norm/total_clipped").values())
    assert task.clipping.state().get("seen", 6) == 6
