"""Normalisers and their epsilon, in every number format."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stabilize.errors import UserError
from stabilize.model import Sizes
from stabilize.strategies import Epsilon, FixedEpsilon, LayerNorm, Norm, PrecisionEpsilon, RMSNorm, Stabilizer
from tests.models import assert_equal, disturb

WIDTH = 16
SITE = Sizes(2, 2, WIDTH, 2, 32).site("encoder", 1, "feed_forward")

norms = pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])

INPUTS = {
    "zeros": torch.zeros(WIDTH),
    "constants": torch.full((WIDTH,), 0.1),
    "300": torch.full((WIDTH,), 300.0),
    "plus_minus_300": torch.tensor([300.0, -300.0]).repeat(WIDTH // 2),
}


def by_definition(norm: Norm, x: Tensor, epsilon: float) -> Tensor:
    """g (x - mean) / sqrt(var + epsilon) + b with the biased variance, or g x / sqrt(mean(x^2) + epsilon)."""
    if isinstance(norm, RMSNorm):
        return norm.gain * x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    centred = x - x.mean(-1, keepdim=True)
    return norm.gain * centred / (centred.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() + norm.bias


@norms
@pytest.mark.parametrize("epsilon", [1e-12, 1e-5, 0.5])
@pytest.mark.parametrize("width", [WIDTH, 6])
def test_a_norm_follows_its_definition(norm: type[Norm], epsilon: float, width: int) -> None:
    placed = norm().at(SITE, width=width, epsilon=epsilon)
    disturb(placed, 0.5)
    x = 3 + torch.randn(2, 5, width)
    assert_equal(placed(x), by_definition(placed, x, epsilon))


@norms
@halves
@pytest.mark.parametrize("epsilon", [1e-4, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
def test_half_precision_stays_finite(norm: type[Norm], epsilon: float, x: Tensor, dtype: torch.dtype) -> None:
    """Also where epsilon itself or the square of x would leave the format: statistics are taken in float32."""
    placed = norm().at(SITE, epsilon=epsilon).to(dtype)
    x = x.to(dtype).requires_grad_()
    output = placed(x)
    (output * torch.randn(WIDTH, dtype=dtype).clamp(-1, 1)).sum().backward()
    expected = by_definition(placed.float(), x.detach().float(), epsilon)

    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected.detach(), rtol=2e-2, atol=2e-2)
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() <= 2 * epsilon**-0.5


@norms
@halves
def test_autocast_leaves_the_statistics_in_float32(norm: type[Norm], dtype: torch.dtype) -> None:
    placed = norm().at(SITE, epsilon=1e-6)
    x = 300 * torch.randn(4, WIDTH, dtype=dtype)
    with torch.autocast("cpu", dtype):
        found = placed(x)
    torch.testing.assert_close(found.float(), by_definition(placed, x.float(), 1e-6), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("precision", "value"),
    [("32-true", 1.0), ("64-true", 1.0), ("bf16-mixed", 2.0), ("bf16-true", 2.0), ("16-mixed", 3.0), ("16-true", 3.0)],
)
def test_precision_epsilon_has_a_value_for_each_format(precision: str, value: float) -> None:
    epsilon = PrecisionEpsilon(float32=1.0, bfloat16=2.0, float16=3.0)
    assert epsilon.at(SITE, precision) == value
    assert Stabilizer(epsilon=epsilon).make_norm(SITE, precision).epsilon == value
    assert FixedEpsilon(0.1).at(SITE, precision) == 0.1


@pytest.mark.parametrize(
    ("epsilon", "precision", "warns"),
    [
        (FixedEpsilon(1e-8), "16-mixed", True),
        (FixedEpsilon(1e-8), "bf16-mixed", False),
        (FixedEpsilon(1e-8), "32-true", False),
        (FixedEpsilon(1e-7), "16-mixed", False),
        (FixedEpsilon(1e-12), "16-true", True),
        (PrecisionEpsilon(float16=1e-8), "16-mixed", True),
        (PrecisionEpsilon(float16=1e-8), "32-true", False),
        (PrecisionEpsilon(float32=1e-12), "16-mixed", False),
    ],
)
def test_an_epsilon_that_rounds_to_zero_is_said(epsilon: Epsilon, precision: str, warns: bool) -> None:
    found = Stabilizer(epsilon=epsilon).warnings(SITE, precision)
    assert len(found) == warns
    assert all("float16" in warning and precision in warning for warning in found)
    assert warns == (torch.tensor(epsilon.at(SITE, precision)).to(FORMATS[precision]).item() == 0)


FORMATS = {"16-mixed": torch.float16, "16-true": torch.float16, "bf16-mixed": torch.bfloat16, "32-true": torch.float32}


@pytest.mark.parametrize("value", [0, 0.0, -1e-5, 1e-60, float("nan")])
@pytest.mark.parametrize("key", ["value", "float32", "bfloat16", "float16"])
def test_an_epsilon_not_above_zero_is_refused_by_key(key: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"epsilon\.{key} is {value}"):
        FixedEpsilon(value) if key == "value" else PrecisionEpsilon(**{key: value})


def test_the_default_is_torchs_own() -> None:
    x = torch.randn(3, WIDTH)
    assert_equal(Stabilizer().make_norm(SITE, "32-true")(x), F.layer_norm(x, [WIDTH]))
