"""Every number against a closed form or a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stabilize import stats


def with_gradients(*gradients: Tensor | None) -> nn.Module:
    """Return a module with one parameter for each gradient."""
    module = nn.Module()
    for number, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(2) if gradient is None else torch.zeros_like(gradient))
        parameter.grad = gradient
        module.register_parameter(f"parameter_{number}", parameter)
    return module


def mean_cosine(first: Tensor, second: Tensor, real: Tensor, centered: bool = False) -> float:
    """The definition, position by position."""
    first, second = first.double(), second.double()
    if centered:
        first, second = first - first[real].mean(0), second - second[real].mean(0)
    cosines = [
        (x @ y / (x.norm() * y.norm())).item()
        for x, y, counts in zip(first.flatten(0, -2), second.flatten(0, -2), real.flatten(), strict=True)
        if counts and x.norm() > 0 and y.norm() > 0
    ]
    return sum(cosines) / len(cosines) if cosines else math.nan


def test_gradient_norms_are_those_of_all_entries_together():
    first = with_gradients(torch.tensor([3.0, 0.0]), torch.tensor([[4.0], [0.0], [0.0]]))
    second = with_gradients(torch.tensor([-2.0]), None)
    both = nn.ModuleList([first, second])
    assert stats.gradient_norms([first, second, both]).tolist() == pytest.approx([5.0, 2.0, math.sqrt(29.0)])


def test_a_shared_parameter_counts_in_each_module_and_once_in_a_module():
    embedding = with_gradients(torch.tensor([3.0, 4.0]))
    encoder, decoder = nn.ModuleList([embedding]), nn.ModuleList([embedding])
    everything = nn.ModuleList([encoder, decoder])
    assert stats.gradient_norms([encoder, decoder, everything]).tolist() == pytest.approx([5.0, 5.0, 5.0])


def test_a_module_without_gradients_has_no_norm():
    norms = stats.gradient_norms([with_gradients(None), with_gradients(torch.tensor([2.0])), nn.Identity()])
    assert norms.isnan().tolist() == [True, False, True]
    assert stats.gradient_norms([with_gradients(None)]).isnan().all()


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_norms_whose_square_float32_cannot_hold(size: float):
    module = with_gradients(torch.full((3,), size), torch.full((6,), size))
    assert stats.gradient_norms([module]).item() == pytest.approx(3 * size, rel=1e-6)
    assert stats.squared_norm(torch.full((9,), size)).item() == pytest.approx(9 * size**2, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_gradients_are_summed_wide(dtype: torch.dtype):
    module = with_gradients(torch.full((10_000,), 3.0, dtype=dtype))
    assert stats.gradient_norms([module]).item() == pytest.approx(300.0)


def test_ratio_to_the_last_layer():
    assert stats.gradient_ratio(torch.tensor([1e-6, 1.0, 4.0])).tolist() == pytest.approx([2.5e-7, 0.25])
    assert stats.gradient_ratio(torch.tensor([1.0])).tolist() == []


@pytest.mark.parametrize("last", [0.0, math.inf, math.nan])
def test_no_ratio_to_a_last_layer_without_a_finite_gradient(last: float):
    assert stats.gradient_ratio(torch.tensor([1.0, 0.0, math.inf, last])).isnan().all()


def test_activation_rms():
    states = torch.tensor([[[3.0, 3.0], [1.0, 7.0], [math.nan, 9.0]]])
    assert stats.activation_rms(states[:, :2]).item() == pytest.approx(math.sqrt((9 + 9 + 1 + 49) / 4))
    assert stats.activation_rms(states, torch.tensor([[True, False, False]])).item() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("other", "cosine"),
    [([2.0, 0.0], 1.0), ([-1.0, 0.0], -1.0), ([0.0, 5.0], 0.0), ([1.0, math.sqrt(3.0)], 0.5)],
)
def test_cosine_of_known_angles(other: list[float], cosine: float):
    first, second = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[other]])
    assert stats.cosine_similarity(first, second).item() == pytest.approx(cosine, abs=1e-7)


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 2**31),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    st.booleans(),
)
def test_cosine_is_the_mean_over_real_positions(
    batch: int, length: int, width: int, seed: int, scale: float, centered: bool
):
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, batch, length, width, generator=generator)
    first[torch.rand(batch, length, generator=generator) < 0.2] = 0.0
    real = torch.rand(batch, length, generator=generator) < 0.7
    if centered and real.sum() < 2:
        return  # nothing is left after taking out the mean: see below
    expected = mean_cosine(first, second, real, centered)
    got = stats.cosine_similarity(first * scale, second, real, centered)
    assert got.item() == pytest.approx(expected, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("filler", [0.0, 7.0, math.nan, math.inf])
def test_padding_changes_nothing(centered: bool, filler: float):
    first, second = torch.randn(2, 3, 4, 8)
    padded = [nn.functional.pad(states, (0, 0, 0, 8, 0, 1), value=filler) for states in (first, second)]
    real = nn.functional.pad(torch.ones(3, 4, dtype=torch.bool), (0, 8, 0, 1))
    plain = stats.cosine_similarity(first, second, centered=centered)
    assert stats.cosine_similarity(*padded, real, centered).item() == pytest.approx(plain.item(), abs=1e-6)


def test_identical_layers_are_one_whatever_is_padding():
    states = torch.randn(2, 5, 16)
    real = torch.tensor([[True, True, True, False, False]] * 2)
    matrix = stats.similarity_matrix(stats.similarity_sums([states, states, states], real))
    torch.testing.assert_close(matrix, torch.ones(3, 3, dtype=matrix.dtype), rtol=0, atol=1e-6)


def test_zero_vectors_are_left_out():
    first = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]])
    second = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    assert stats.cosine_similarity(first, second).item() == pytest.approx(0.5)
    assert stats.similarity_sums([first, second])[1].tolist() == [[2, 2], [2, 3]]


def test_no_position_no_number():
    states = torch.randn(2, 3, 4)
    assert stats.cosine_similarity(states, states, torch.zeros(2, 3, dtype=torch.bool)).isnan()
    assert stats.cosine_similarity(torch.zeros(2, 3, 4), states).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [6e4, 300.0, 1e-7])
def test_half_precision_stays_between_minus_one_and_one(dtype: torch.dtype, size: float):
    first, second = (size * torch.randn(2, 4, 6, 32).clamp(-1, 1)).to(dtype)
    for centered in (False, True):
        value = stats.cosine_similarity(first, second, centered=centered).item()
        assert -1 <= value <= 1
        assert stats.cosine_similarity(first, first, centered=centered).item() == pytest.approx(1.0)


def test_centering_takes_out_what_all_positions_share():
    first, second = torch.randn(2, 8, 16, 32)
    shared = 100 * torch.randn(32)
    assert stats.cosine_similarity(first + shared, second + shared).item() > 0.99
    centered = stats.cosine_similarity(first + shared, second + shared, centered=True).item()
    assert centered == pytest.approx(stats.cosine_similarity(first, second, centered=True).item(), abs=1e-4)
    assert abs(centered) < 0.1


def test_what_centering_leaves_by_rounding_is_no_direction():
    constant = torch.randn(16).expand(4, 5, 16)
    assert stats.cosine_similarity(constant, torch.randn(4, 5, 16), centered=True).isnan()


def test_matrix_compares_every_pair_of_layers():
    layers = list(torch.randn(4, 3, 5, 8))
    real = torch.rand(3, 5) < 0.8
    matrix = stats.similarity_matrix(stats.similarity_sums(layers, real))
    expected = torch.tensor([[mean_cosine(a, b, real) for b in layers] for a in layers], dtype=matrix.dtype)
    torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-6)


def test_sums_add_over_parts_of_a_batch_of_any_size():
    layers = list(torch.randn(3, stats.NUMBERS_AT_ONCE // 5, 4))
    whole = stats.similarity_sums(layers)
    parts = [stats.similarity_sums([layer[part] for layer in layers]) for part in (slice(10), slice(10, None))]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    expected = nn.functional.cosine_similarity(layers[0].double(), layers[1].double(), dim=-1).mean()
    assert stats.similarity_matrix(whole)[0, 1].item() == pytest.approx(expected.item(), abs=1e-6)


def test_layers_of_different_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 3, 4\).*\(2, 3, 5\)"):
        stats.similarity_sums([torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)])
