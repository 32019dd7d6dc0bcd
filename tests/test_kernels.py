"""Dropout and attention against closed forms and torch's own."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import stabilize
from stabilize import kernels

rates = pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
COUNT = 1 << 18


@pytest.mark.parametrize("rate", [0.99999, 0.9999999])
def test_hardly_anything_may_be_left(rate: float) -> None:
    """The greatest rate that 16 bits tell from one drops all but one in 65,536."""
    assert kept((COUNT,), rate).mean().item() == pytest.approx(1 / 65536, abs=5 / 65536)


def kept(shape: tuple[int, ...], rate: float) -> Tensor:
    return (kernels.dropout(torch.ones(shape), rate) != 0).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (7, 16), (33, 16), (5, 7, 16), (2, 300, 16)])
def test_linear_is_torchs_forward_and_backward(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in (shape, (24, 16), (24,)))
    grad = torch.randn(*shape[:-1], 24, generator=generator).to(dtype)
    found = []
    for linear in (kernels.linear, F.linear):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        y = linear(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, grad)])
    for mine, torchs in zip(*found, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, torchs, rtol=0.02, atol=0.02 * max(1.0, shape[0]) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_follows_autocast(dtype: torch.dtype) -> None:
    """Also on a view that is not contiguous, and with gradients in the parameters' own precision."""
    x, weight, bias = torch.randn(9, 16, 5), torch.randn(24, 16), torch.randn(24)
    found = []
    for linear in (kernels.linear, F.linear):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        with torch.autocast("cpu", dtype=dtype):
            y = linear(leaves[0].transpose(1, 2), *leaves[1:])
        assert y.dtype == dtype
        found.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for mine, torchs in zip(*found, strict=True):
        assert mine.dtype == torchs.dtype
        torch.testing.assert_close(mine, torchs, rtol=0.05, atol=0.05 * torchs.abs().max().item())
    assert kernels.linear(x.transpose(1, 2), weight).equal(F.linear(x.transpose(1, 2), weight))
    with torch.autocast("cpu", dtype=dtype):
        assert kernels.linear(weight.double(), weight.double()).dtype == torch.float64


@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (7, 16), (5, 7, 16)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_large_product_is_torchs_to_rounding(
    shape: tuple[int, ...], biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 oneDNN makes it forward and by the input; here of any size."""
    monkeypatch.setattr(kernels, "LARGE", 0)
    x, weight, bias = torch.randn(*shape[:-1], 5, 16).transpose(-1, -2), torch.randn(24, 5), torch.randn(24)
    grad, found = torch.randn(*shape[:-1], 16, 24), []
    for linear in (kernels.linear, F.linear):
        leaves = [tensor.clone().requires_grad_() for tensor in ((x, weight, bias) if biased else (x, weight))]
        y = linear(*leaves)
        found.append([y.clone(), *torch.autograd.grad(y.add_(1), leaves, grad)])  # it may be changed in place
    assert "_Linear" in str(kernels.linear(x, weight.requires_grad_()).grad_fn)
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=1e-5)


def test_linear_asks_for_no_gradient_that_nobody_wants() -> None:
    x, weight = (torch.randn(size, dtype=torch.bfloat16) for size in ((3, 16), (24, 16)))
    assert not kernels.linear(x, weight).requires_grad
    y = kernels.linear(x, weight.requires_grad_())
    y.sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(24, 16), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (5, 7, 16), (300, 2, 16)])
def test_weights_that_stay_may_be_arranged(
    shape: tuple[int, ...], dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    x, weight, bias = torch.randn(shape, dtype=dtype), torch.randn(24, 16, dtype=dtype), torch.randn(24, dtype=dtype)
    parameter = torch.nn.Parameter(weight)
    with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
        expected = [kernels.linear(x, weight, bias), kernels.linear(x, weight)]
        with kernels.constant_weights():
            for _ in range(2):
                found = [kernels.linear(x, parameter, bias), kernels.linear(x, parameter)]
                for mine, plain in zip(found, expected, strict=True):
                    assert mine.dtype == plain.dtype
                    tolerance = 0.02 if plain.dtype in kernels.HALF else 1e-4
                    torch.testing.assert_close(mine, plain, rtol=tolerance, atol=tolerance)


class Calls(TorchDispatchMode):
    """What is asked of torch's operations, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not kernels._has_onednn(torch.float32), reason="torch has no oneDNN here")
def test_a_weight_is_arranged_once() -> None:
    x, weight = torch.randn(8, 16), torch.nn.Parameter(torch.randn(24, 16))
    with torch.no_grad(), kernels.constant_weights(), Calls() as calls:
        for _ in range(3):
            kernels.linear(x, weight)
    assert calls.names.count("_reorder_linear_weight") == 1
    assert calls.names.count("_linear_pointwise") == 3


@pytest.mark.skipif(not kernels._has_onednn(torch.float32), reason="torch has no oneDNN here")
def test_large_products_are_onednns_in_training_alone() -> None:
    x, weight = torch.randn(1024, 256), torch.randn(256, 256, requires_grad=True)
    for grad, made in ((True, 1), (False, 0)):
        with torch.set_grad_enabled(grad), Calls() as calls:
            kernels.linear(x, weight)
        assert calls.names.count("_linear_pointwise") == made


def test_weights_are_not_arranged_where_they_may_change() -> None:
    """With gradients, where they are computed anew each time, and from the end on."""
    x, weight = torch.randn(8, 16), torch.nn.Parameter(torch.randn(24, 16))
    with kernels.constant_weights():
        kernels.linear(x, weight).sum().backward()
        torch.testing.assert_close(weight.grad, x.sum(0).expand(24, 16))
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(kernels.linear(x, weight * 2), x @ weight.T * 2)
            kernels.linear(x, weight)
    with torch.no_grad():
        weight.mul_(3.0)
        torch.testing.assert_close(kernels.linear(x, weight), x @ weight.T)
        with kernels.constant_weights():
            torch.testing.assert_close(kernels.linear(x, weight), x @ weight.T)


def test_products_in_half_precision_have_few_shapes() -> None:
    """32 numbers of rows in an octave, each at most a 32nd larger than asked for above 1,024."""
    seen = {rows: len(kernels._fill(torch.zeros(rows, 1), torch.bfloat16)) for rows in range(1, 4097)}
    assert all(rows <= made <= max(rows + 31, rows * 33 / 32) for rows, made in seen.items())
    assert len({made for made in seen.values() if 2048 < made <= 4096}) == 32
    assert len(set(seen.values())) <= 32 * 3


@rates
def test_dropout_keeps_its_share_and_scales_it(rate: float) -> None:
    dropped = kernels.dropout(torch.ones(COUNT), rate)
    assert_share((dropped != 0).double(), 1 - rate)
    torch.testing.assert_close(dropped.unique(), torch.tensor([0, 1 / (1 - rate)]))


def assert_share(events: Tensor, probability: float) -> None:
    """Within five standard deviations of a binomial."""
    deviation = math.sqrt(probability * (1 - probability) / events.numel())
    assert abs(events.mean().item() - probability) < 5 * deviation


@rates
@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 64])
def test_dropout_decides_for_each_entry_by_itself(rate: float, lag: int) -> None:
    """Four entries share one draw of 64 bits: no pair of places may know of each other."""
    decisions = kept((COUNT,), rate)
    assert_share(decisions[lag:] * decisions[:-lag], (1 - rate) ** 2)


@rates
def test_dropout_treats_every_place_alike(rate: float) -> None:
    """Chi-square over the eight places within two draws, seven degrees of freedom: below 30 but once in 10,000."""
    decisions = kept((COUNT // 8, 8), rate)
    deviations = decisions.sum(0) - decisions.size(0) * (1 - rate)
    assert deviations.pow(2).sum() / (decisions.size(0) * rate * (1 - rate)) < 30


@rates
def test_dropout_has_the_moments_of_torchs(rate: float) -> None:
    """E y = x and E y^2 = x^2 / (1 - rate), over many draws."""
    x = torch.tensor([-2.0, 0.5, 1.0, 3.0, 7.0])
    for draw in (kernels.dropout, F.dropout):
        draws = draw(x.expand(COUNT // 8, 5).contiguous(), rate)
        torch.testing.assert_close(draws.mean(0), x, rtol=0.1, atol=0)
        torch.testing.assert_close(draws.pow(2).mean(0), x.pow(2) / (1 - rate), rtol=0.1, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 7), (2, 3, 5)])
def test_dropout_takes_every_shape_and_format(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype)
    dropped = kernels.dropout(x, 0.5)
    assert dropped.shape == x.shape
    assert dropped.dtype == dtype
    assert torch.where(dropped == 0, x * 0, x * 2).equal(dropped)


def test_dropout_follows_the_seed() -> None:
    x = torch.ones(1000)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(kernels.dropout(x, 0.5))
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])
    assert not kernels.dropout(x, 0.5).equal(kernels.dropout(x, 0.5))


def test_dropout_of_nothing_is_nothing() -> None:
    x = torch.ones(8)
    assert kernels.dropout(x, 0.0) is x


def test_dropout_stops_the_gradient_where_it_drops() -> None:
    x = torch.randn(1000, requires_grad=True)
    dropped = kernels.dropout(x, 0.25)
    dropped.sum().backward()
    assert x.grad.equal((dropped != 0) / 0.75)


def projections(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key, value `[2, 3, 5, 4]`."""
    return [torch.randn(2, 3, 5, 4, dtype=dtype, requires_grad=True) for _ in range(3)]


MASKS = {
    "none": torch.ones(1, 1, 5, 5, dtype=torch.bool),
    "causal": torch.ones(5, 5, dtype=torch.bool).tril(),
    "padding": torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_equals_torchs_in_value_and_gradient(mask: Tensor, dtype: torch.dtype) -> None:
    """Both the path that `attend` picks and the one with explicit weights."""
    inputs, tolerance = projections(dtype), {torch.bfloat16: 3e-2}.get(dtype, 1e-6)
    query, key, value = inputs
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, inputs, direction)
    for found in (
        kernels.attend(query, key, value, mask, 0.0),
        kernels.mix(kernels.logits(query, key), value, mask, 0.0),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        for mine, torchs in zip(torch.autograd.grad(found, inputs, direction), gradients, strict=True):
            torch.testing.assert_close(mine, torchs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("keys", [1, 3, 8, 15, 16, 17, 24, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_dropout_is_that_of_autograd(
    keys: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same weights dropped; the last keys are padding, and one query may look nowhere."""

    def kept(x: Tensor, rate: float) -> Tensor:
        return ((torch.arange(x.size(-1)) + torch.arange(x.size(-2))[:, None]) % 3 > 0) / (1 - rate)

    monkeypatch.setattr(kernels, "_kept", kept)
    query, (key, value) = torch.randn(2, 3, 5, 4), torch.randn(2, 2, 3, keys, 4).unbind()
    mask = torch.ones(2, 1, 5, keys, dtype=torch.bool)
    mask[0, ..., (keys + 1) // 2 :] = False
    mask[1, 0, 2] = False
    direction, found = torch.randn(2, 3, 5, 4), []
    for exact in (False, True):
        leaves = [x.to(torch.float64 if exact else dtype).requires_grad_() for x in (query, key, value)]
        if exact:
            scores = (leaves[0] @ leaves[1].mT / 2).masked_fill(~mask, -1e30)
            y = scores.softmax(-1) * kept(scores, 0.25) @ leaves[2]
        else:
            y = kernels.attend(*leaves, mask, 0.25)
            assert y.dtype == dtype
        found.append([y, *torch.autograd.grad(y, leaves, direction.to(y.dtype))])
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=0, atol=5e-2 if dtype == torch.bfloat16 else 1e-5)


def test_dropout_on_the_weights_is_right_on_average() -> None:
    query, key, value = projections()
    mask = MASKS["causal"]
    draws = torch.stack([kernels.attend(query, key, value, mask, 0.2) for _ in range(2000)])
    assert draws.std(0).max() > 0.1
    torch.testing.assert_close(draws.mean(0), kernels.attend(query, key, value, mask, 0.0), rtol=0, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_query_that_may_look_nowhere_stays_finite(dtype: torch.dtype, rate: float) -> None:
    inputs = projections(dtype)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[1] = False
    mixed = kernels.attend(*inputs, mask, rate)
    mixed[0].sum().backward()
    assert mixed.isfinite().all()
    for tensor in inputs:
        assert tensor.grad.isfinite().all()
        assert not tensor.grad[1].any()


def masking_constants(path: Path) -> list[float]:
    """All numbers written inside calls that fill or choose by a mask."""
    found = []
    for call in ast.walk(ast.parse(path.read_text())):
        name = getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
        if name.strip("_") in ("masked_fill", "where", "full", "full_like", "index_fill", "clamp", "nan_to_num"):
            inside = (node.value for node in ast.walk(call) if isinstance(node, ast.Constant))
            found += [value for value in inside if isinstance(value, (int, float))]
    return found


def test_no_mask_constant_leaves_half_precision() -> None:
    """float16 ends at 65504; -1e9 as a mask is an error there, but only once mixed precision is on
    (FIELD_REPORTS 1.6)."""
    sources = list(Path(stabilize.__file__).parent.rglob("*.py"))
    constants = [constant for path in sources for constant in masking_constants(path)]
    assert len(sources) > 20
    assert all(abs(constant) <= torch.finfo(torch.float16).max for constant in constants)
