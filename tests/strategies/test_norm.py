"""Normalisers and their epsilon, in every number format."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stabilize.errors import UserError
from stabilize.model import Sizes
from stabilize.strategies import Epsilon, FixedEpsilon, LayerNorm, Norm, PrecisionEpsilon, RMSNorm, Stabilizer
from stabilize.strategies.epsilon import LayerEpsilon
from stabilize.strategies.norm import (
    AdaNorm,
    AdaptiveLayerNorm,
    DynamicErf,
    DynamicTanh,
    ScaledLayerNorm,
    ScaleNorm,
)
from tests.models import assert_equal, disturb, model_of

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
    """Before training (FIELD_REPORTS 1.10)."""
    found = Stabilizer(epsilon=epsilon).warnings(SITE, precision)
    assert len(found) == warns
    assert all("float16" in warning and precision in warning for warning in found)
    assert warns == (torch.tensor(epsilon.at(SITE, precision)).to(FORMATS[precision]).item() == 0)


@pytest.mark.parametrize(
    "values", [{"encoder": [1e-5, 1e-12]}, {"encoder": [1e-5], "default": 1e-12}], ids=["layer", "end"]
)
def test_so_is_one_of_a_layer_or_of_the_end_of_a_stack(values: dict) -> None:
    assert len(Stabilizer(epsilon=LayerEpsilon(**values)).warnings(SITE, "16-mixed")) == 1


FORMATS = {"16-mixed": torch.float16, "16-true": torch.float16, "bf16-mixed": torch.bfloat16, "32-true": torch.float32}


@pytest.mark.parametrize("value", [0, 0.0, -1e-5, 1e-60, float("nan")])
@pytest.mark.parametrize("key", ["value", "float32", "bfloat16", "float16"])
def test_an_epsilon_not_above_zero_is_refused_by_key(key: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"epsilon\.{key} is {value}"):
        FixedEpsilon(value) if key == "value" else PrecisionEpsilon(**{key: value})


def test_the_default_is_torchs_own() -> None:
    x = torch.randn(3, WIDTH)
    assert_equal(Stabilizer().make_norm(SITE, "32-true")(x), F.layer_norm(x, [WIDTH]))


# ---------------------------------------------------------------- other normalisers, in ten lines of float64

Reference = Callable[[Norm, Tensor, float], Tensor]


def normed(x: Tensor, epsilon: float) -> Tensor:
    """LayerNorm without gain and bias."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def layer_norm(norm: Norm, x: Tensor, epsilon: float) -> Tensor:
    return norm.gain * normed(x, epsilon) + norm.bias


def rms_norm(norm: Norm, x: Tensor, epsilon: float) -> Tensor:
    return norm.gain * x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def scale_norm(norm: Norm, x: Tensor, epsilon: float) -> Tensor:
    """g x / max(|x|, epsilon), g one number (Nguyen and Salazar 2019, arXiv:1910.05895)."""
    assert norm.gain.numel() == 1
    return norm.gain * x / x.norm(dim=-1, keepdim=True).clamp(min=epsilon)


def ada_norm(norm: Norm, x: Tensor, epsilon: float, scale: float = 2.0, k: float = 0.1) -> Tensor:
    """C (1 - k y) y, y = (x - mean) / (deviation + epsilon), the unbiased deviation (Xu et al. 2019)."""
    y = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + epsilon)
    return scale * (1 - k * y.detach()) * y


def adaptive_layer_norm(norm: Norm, x: Tensor, epsilon: float) -> Tensor:
    """(1 + s) n + b, (s, b) = W silu(n) + w, n without gain and bias."""
    n = normed(x, epsilon)
    weight, shift = sorted(norm.parameters(), key=lambda parameter: -parameter.ndim)
    s, b = (F.silu(n) @ weight.mT + shift).chunk(2, dim=-1)
    return (1 + s) * n + b


def dynamic_tanh(norm: Norm, x: Tensor, epsilon: float) -> Tensor:
    """g tanh(alpha x) + b, alpha one number (Zhu et al. 2025, arXiv:2503.10622)."""
    assert norm.alpha.numel() == 1
    return norm.gain * torch.tanh(norm.alpha * x) + norm.bias


def dynamic_erf(norm: Norm, x: Tensor, epsilon: float) -> Tensor:
    """g erf(alpha x + s) + b, alpha and s one number each (Chen et al. 2025, arXiv:2512.10938)."""
    (shift,) = (parameter for name, parameter in norm.named_parameters() if name not in ("gain", "bias", "alpha"))
    assert norm.alpha.numel() == shift.numel() == 1
    return norm.gain * torch.erf(norm.alpha * x + shift) + norm.bias


def third_layer(norm: Norm, x: Tensor, epsilon: float) -> Tensor:
    """LayerNorm / sqrt(l) (Sun et al. 2025, arXiv:2502.05795)."""
    return layer_norm(norm, x, epsilon) / 3**0.5


REFERENCES: dict[str, tuple[Norm, Reference]] = {
    "layer_norm": (LayerNorm(), layer_norm),
    "rms_norm": (RMSNorm(), rms_norm),
    "scale_norm": (ScaleNorm(), scale_norm),
    "ada_norm": (AdaNorm(), ada_norm),
    "ada_norm_as_released": (AdaNorm(1.0, 0.3), functools.partial(ada_norm, scale=1.0, k=0.3)),
    "adaptive_layer_norm": (AdaptiveLayerNorm(), adaptive_layer_norm),
    "dynamic_tanh": (DynamicTanh(), dynamic_tanh),
    "dynamic_erf": (DynamicErf(), dynamic_erf),
    "scaled_layer_norm": (ScaledLayerNorm(), third_layer),
}

SIZES = Sizes(5, 4, WIDTH, 2, 32)

every_norm = pytest.mark.parametrize("name", REFERENCES)
sides = pytest.mark.parametrize("side", ["encoder", "decoder"])
DTYPES = {"float32": (torch.float32, 2e-6), "bfloat16": (torch.bfloat16, 2e-2), "float16": (torch.float16, 3e-3)}
dtypes = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.values(), ids=DTYPES)


def third(name: str, side: str, width: int | None, epsilon: float, dtype: torch.dtype) -> Norm:
    """The norm in the third layer of a stack, with its parameters moved."""
    placed = REFERENCES[name][0].at(SIZES.site(side, 3, "feed_forward"), width=width, epsilon=epsilon)
    disturb(placed, 0.3)
    return placed.to(dtype)


@every_norm
@sides
@dtypes
@pytest.mark.parametrize("width", [None, 6])
@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_every_norm_is_what_its_paper_writes(
    name: str, side: str, dtype: torch.dtype, tolerance: float, width: int | None, epsilon: float
) -> None:
    placed = third(name, side, width, epsilon, dtype)
    x = (0.3 + torch.randn(2, 5, width or WIDTH)).to(dtype)
    expected = REFERENCES[name][1](copy.deepcopy(placed).double(), x.double(), epsilon)
    found = placed(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@every_norm
def test_every_norms_gradient_is_that_of_its_equation(name: str) -> None:
    placed = third(name, "encoder", None, 1e-5, torch.float32)
    exact = copy.deepcopy(placed).double()
    x, weight = torch.randn(2, 5, WIDTH, requires_grad=True), torch.randn(2, 5, WIDTH)
    found = torch.autograd.grad((placed(x) * weight).sum(), [x, *placed.parameters()])
    y = x.detach().double().requires_grad_()
    loss = (REFERENCES[name][1](exact, y, 1e-5) * weight).sum()
    for one, other in zip(found, torch.autograd.grad(loss, [y, *exact.parameters()]), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@every_norm
@halves
@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
def test_every_norm_is_finite_in_half_precision(name: str, x: Tensor, dtype: torch.dtype) -> None:
    """For zeros, constants and numbers whose square overflows (FIELD_REPORTS 1.10)."""
    # Where epsilon stands outside the root, a gradient of 1 / epsilon is the equation's own; in float16 it must fit.
    placed = third(name, "encoder", None, 1e-3, dtype)
    x = x.to(dtype)[None].requires_grad_()
    output = placed(x)
    (output * torch.randn(WIDTH, dtype=dtype).clamp(-1, 1)).sum().backward()
    assert output.isfinite().all()
    assert x.grad.isfinite().all()


STARTS: dict[str, tuple[Norm, Callable[[Tensor], Tensor]]] = {
    "scale_norm": (ScaleNorm(), lambda x: F.rms_norm(x, [WIDTH], eps=0.0)),  # g = sqrt(width)
    "adaptive_layer_norm": (AdaptiveLayerNorm(), lambda x: F.layer_norm(x, [WIDTH])),
    "dynamic_tanh": (DynamicTanh(), lambda x: torch.tanh(x / 2)),
    "dynamic_erf": (DynamicErf(), lambda x: torch.erf(x / 2)),
    "dynamic_tanh_with_alpha": (DynamicTanh(0.2), lambda x: torch.tanh(0.2 * x)),
    "dynamic_erf_with_alpha": (DynamicErf(0.2), lambda x: torch.erf(0.2 * x)),
}


@pytest.mark.parametrize("name", STARTS)
def test_where_a_norm_starts(name: str) -> None:
    norm, expected = STARTS[name]
    x = torch.randn(2, 5, WIDTH)
    assert_equal(norm.at(SITE, epsilon=1e-5)(x), expected(x), 1e-5)


@sides
def test_dynamic_tanh_has_an_alpha_of_its_own_before_attention(side: str) -> None:
    """0.8 before attention, 0.2 elsewhere: the paper's LLaMA of seven billion parameters."""
    norm, x = DynamicTanh(0.2, 0.8), torch.randn(2, 5, WIDTH)
    stack = getattr(model_of(Stabilizer(norm=norm)), side)
    for layer in stack.layers:
        *attentions, feed_forward = layer.branches
        for branch in attentions:
            assert_equal(branch.slots["norm"](x), torch.tanh(0.8 * x))
        assert_equal(feed_forward.slots["norm"](x), torch.tanh(0.2 * x))
    assert_equal(stack.end.slots["norm"](x), torch.tanh(0.2 * x))


@sides
def test_a_scaled_layer_norm_divides_by_the_root_of_the_layer_but_not_at_the_end(side: str) -> None:
    x = torch.randn(2, 5, WIDTH)
    stack = getattr(model_of(Stabilizer(norm=ScaledLayerNorm()), 4, 3), side)
    for number, layer in enumerate(stack.layers, 1):
        for branch in layer.branches:
            assert_equal(branch.slots["norm"](x), F.layer_norm(x, [WIDTH]) / number**0.5)
    assert_equal(stack.end.slots["norm"](x), F.layer_norm(x, [WIDTH]))


@sides
@pytest.mark.parametrize(
    ("layer", "role", "expected"),
    [
        (0, "embedding", 7.0),
        (1, "self_attention", 1.0),
        (1, "feed_forward", 1.0),
        (2, "feed_forward", 2.0),
        (3, "self_attention", 3.0),
        (4, "feed_forward", 3.0),
    ],
)
def test_an_epsilon_a_layer(layer: int, role: str, expected: float, side: str) -> None:
    """A list shorter than the stack goes on with its last value."""
    values = {"encoder": [1.0, 2.0, 3.0], "decoder": [10.0, 20.0, 30.0]}
    found = LayerEpsilon(**values, default=7.0).at(SIZES.site(side, layer, role), "32-true")
    assert found == expected * (10 if side == "decoder" and expected < 7 else 1)


@sides
def test_the_last_norm_has_the_default_epsilon(side: str) -> None:
    model = model_of(Stabilizer(epsilon=LayerEpsilon([0.1], [0.2], default=0.3)))
    stack, value = getattr(model, side), {"encoder": 0.1, "decoder": 0.2}[side]
    assert stack.end.slots["norm"].epsilon == 0.3
    assert {branch.slots["norm"].epsilon for layer in stack.layers for branch in layer.branches} == {value}


@pytest.mark.parametrize("values", [[0.0], [1e-5, -1.0], []])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_an_epsilon_of_a_layer_that_will_not_do_is_refused_by_key(side: str, values: list[float]) -> None:
    with pytest.raises(UserError, match=rf"epsilon\.{side}"):
        LayerEpsilon(**{"encoder": [1e-5], "decoder": [1e-5], side: values})
