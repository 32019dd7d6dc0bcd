"""Clipping of an update's gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stabilize.callbacks import GradientRatio
from stabilize.errors import UserError
from stabilize.strategies import GlobalNorm, NoClipping
from tests.tasks import curve, fit, sentence_batch, small_task, small_trainer

VALUE = 0.05


def parameters(scale: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Three parameters with gradients and one without, the same at each call."""
    generator = torch.Generator().manual_seed(2)
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(3, 4), (5,), (), (2,)]]
    for parameter in made[:3]:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(dtype)
    return made


@given(scale=st.floats(1e-4, 1e4), value=st.floats(1e-3, 1e3))
def test_global_norm_is_torchs(scale: float, value: float) -> None:
    mine, torchs = parameters(scale), parameters(scale)
    GlobalNorm(value).clip(mine)
    nn.utils.clip_grad_norm_(torchs, value)
    for one, other in zip(mine[:3], torchs[:3], strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert mine[3].grad is None


def test_a_small_gradient_keeps_every_bit() -> None:
    mine, before = parameters(0.1), parameters(0.1)
    GlobalNorm(1e3).clip(mine)
    assert all(one.grad.equal(other.grad) for one, other in zip(mine[:3], before[:3], strict=True))


def test_nothing_to_clip_is_no_error() -> None:
    for clipping in (GlobalNorm(), NoClipping()):
        clipping.clip([nn.Parameter(torch.zeros(2))])


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
