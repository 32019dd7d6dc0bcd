"""Every number against a closed form or a plain loop."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    matrix = stats.similarity_matrix(stats.similarity_sums([states, states, states], real))[0]
    torch.testing.assert_close(matrix, torch.ones(3, 3, dtype=matrix.dtype), rtol=0, atol=1e-6)


def test_zero_vectors_are_left_out():
    first = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]])
    second = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    assert stats.cosine_similarity(first, second).item() == pytest.approx(0.5)
    assert stats.similarity_sums([first, second])[0, 1].tolist() == [[2, 2], [2, 3]]


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
    matrix = stats.similarity_matrix(stats.similarity_sums(layers, real))[0]
    expected = torch.tensor([[mean_cosine(a, b, real) for b in layers] for a in layers], dtype=matrix.dtype)
    torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-6)


def test_sums_add_over_parts_of_a_batch_of_any_size():
    layers = list(torch.randn(3, stats.NUMBERS_AT_ONCE // 5, 4))
    whole = stats.similarity_sums(layers)
    parts = [stats.similarity_sums([layer[part] for layer in layers]) for part in (slice(10), slice(10, None))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])  # the mean that is taken out is that of a part
    expected = nn.functional.cosine_similarity(layers[0].double(), layers[1].double(), dim=-1).mean()
    assert stats.similarity_matrix(whole)[0, 0, 1].item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("at_once", [1, 60, 10**6])
def test_pieces_of_any_size_say_the_same(at_once: int, monkeypatch: pytest.MonkeyPatch):
    """Also more layers than numbers in a state."""
    monkeypatch.setattr(stats, "NUMBERS_AT_ONCE", at_once)
    layers, real = list(torch.randn(5, 3, 7, 4) + 1), torch.rand(3, 7) > 0.2
    matrices = stats.similarity_matrix(stats.similarity_sums(layers, real))
    for matrix, centered in zip(matrices, (False, True), strict=True):
        expected = torch.tensor([[mean_cosine(a, b, real, centered) for b in layers] for a in layers])
        torch.testing.assert_close(matrix.float(), expected, rtol=0, atol=1e-6)


def test_parts_that_take_out_one_mean_add_up_to_the_whole():
    """As two ranks do, whose totals are added in between."""
    layers, real = list(torch.randn(3, 6, 5, 4) + 1), torch.rand(6, 5) > 0.2
    parts = [([layer[rows] for layer in layers], real[rows]) for rows in (slice(2), slice(2, 6))]
    totals: list[Tensor] = []
    for part in parts:
        stats.similarity_sums(*part, over_ranks=lambda total: totals.append(total) or total)
    sums = [stats.similarity_sums(*part, over_ranks=lambda _: sum(totals)) for part in parts]
    torch.testing.assert_close(sums[0] + sums[1], stats.similarity_sums(layers, real))


def test_layers_of_different_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 3, 4\).*\(2, 3, 5\)"):
        stats.similarity_sums([torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_variance_that_a_layer_norm_keeps_is_that_of_its_input(dtype: torch.dtype):
    x = (torch.randn(2, 3, 64, dtype=torch.float64) * 10 ** torch.linspace(-4, 3, 6).view(2, 3, 1)).requires_grad_()
    norm = nn.LayerNorm(64, eps=1e-5)
    kept = stats.layer_norm_variance(norm(x.float()).to(dtype), 1e-5)
    torch.testing.assert_close(kept.squeeze(-1).double(), x.var(-1, correction=0), rtol=1e-4, atol=1e-10)
    assert stats.layer_norm_variance(norm(x.float()) * 2, 1e-5) is None
    with torch.no_grad():
        assert stats.layer_norm_variance(norm(x.float()), 1e-5) is None


# ---------------------------------------------------------------- updates


def test_update_ratio_is_the_step_over_the_weights_before():
    layer, frozen = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
    before = {layer.weight: torch.tensor([[3.0, 0.0]]), layer.bias: torch.tensor([4.0])}
    layer.weight.data, layer.bias.data = torch.tensor([[3.0, 3e-3]]), torch.tensor([4.004])
    ratios = stats.update_ratios([layer, frozen, nn.ModuleList([layer, frozen])], before)
    assert ratios.tolist() == pytest.approx([1e-3, math.nan, 1e-3], rel=1e-3, nan_ok=True)


class StaysOnTheDevice(TorchDispatchMode):
    """No operation mixes devices, as one does that copies an index from the host and waits for it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        places = {leaf.device.type for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, Tensor)}
        assert places <= {"meta"}, function
        return found


def test_norms_and_updates_stay_on_the_device_they_are_on():
    """On torch's device without memory: a frozen layer has its NaN there too, and nothing waits for the host."""
    with torch.device("meta"):
        layers = [nn.Linear(2, 3), nn.Linear(3, 3).requires_grad_(False), nn.Identity(), nn.Linear(3, 2)]
        for layer in layers:
            for parameter in layer.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        before = {p: torch.empty_like(p) for layer in layers for p in layer.parameters() if p.requires_grad}
        with StaysOnTheDevice():
            assert stats.gradient_norms(layers).shape == stats.update_ratios(layers, before).shape == (4,)


def test_what_is_measured_in_a_forward_stays_on_the_device():
    with torch.device("meta"):
        states, logits = torch.empty(3, 2, 5, 4), torch.empty(2, 2, 5, 5)
        real, mask = torch.empty(2, 5, dtype=torch.bool), torch.empty(2, 1, 1, 5, dtype=torch.bool)
        with StaysOnTheDevice():
            stats.similarity_sums(list(states), real)
            stats.moments(states[0], real)
            stats.near_epsilon(states[0, ..., 0], 1e-5, real)
            stats.attention_sums(logits, mask)
            stats.largest_logit(logits, mask)
            stats.squared_norm(states)


def test_weights_that_were_zero_have_no_update_ratio():
    layer = nn.Linear(2, 1)
    assert stats.update_ratios([layer], {p: torch.zeros_like(p) for p in layer.parameters()}).isnan().all()
    assert stats.update_ratios([nn.Identity()], {}).isnan().all()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_adam_health_is_bias_corrected(kind: type[torch.optim.Optimizer]):
    """While the gradient stays the same, v / (1 - beta2^t) is its square, at every update."""
    weight, gradient = nn.Parameter(torch.zeros(5)), torch.tensor([0.0, 1e-8, 3e-8, 2e-8, 1.0])
    optimizer = kind([weight], eps=1e-8, betas=(0.9, 0.98))
    assert stats.adam_health(optimizer).isnan()
    for _ in range(3):
        weight.grad = gradient.clone()
        optimizer.step()
        assert stats.adam_health(optimizer).item() == pytest.approx(2.0, rel=1e-3)  # median of 1, 2, 3 and 1e8: lower


def test_another_optimizer_has_no_adam_health():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert stats.adam_health(optimizer).isnan()


# ---------------------------------------------------------------- states


def test_moments_add_and_leave_out_padding():
    states, real = torch.randn(3, 7, 5) + 2, torch.rand(3, 7) < 0.6
    states[~real] = math.nan
    whole = stats.moments(states, real)
    torch.testing.assert_close(stats.moments(states[:1], real[:1]) + stats.moments(states[1:], real[1:]), whole)
    counted = states[real].double()
    assert whole[0] == counted.numel()
    assert stats.rms(whole).item() == pytest.approx(counted.square().mean().sqrt().item(), rel=1e-6)
    assert stats.variance(whole).item() == pytest.approx(counted.var(correction=0).item(), rel=1e-6)
    assert stats.rms(torch.zeros(3)).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [6e4, 1.0, 1e-7])
def test_scales_of_any_format(dtype: torch.dtype, size: float):
    states = torch.full((2, 3, 64), size, dtype=dtype)
    assert stats.activation_rms(states).item() == pytest.approx(states.double().mean().item(), rel=1e-6)


@given(st.floats(-2, 2), st.floats(-3, 3), st.integers(2, 40))
def test_growth_slope_of_a_geometric_series(slope: float, start: float, layers: int):
    number = torch.arange(1, layers + 1, dtype=torch.float64)
    assert stats.growth_slope((start + slope * number).exp()).item() == pytest.approx(slope, abs=1e-9)


def test_growth_slope_is_that_of_least_squares_and_leaves_out_what_has_no_logarithm():
    logs = torch.randn(9, dtype=torch.float64)
    design = torch.stack([torch.arange(9.0), torch.ones(9)], 1).double()
    kept = torch.tensor([True] * 4 + [False] + [True] * 4)
    expected = torch.linalg.lstsq(design[kept], logs[kept, None]).solution[0].item()
    for missing in (0.0, math.nan, math.inf):
        variances = torch.where(kept, logs.exp(), missing)
        assert stats.growth_slope(variances).item() == pytest.approx(expected)
    assert stats.growth_slope(torch.tensor([1.0, 0.0])).isnan()
    assert stats.growth_slope(torch.tensor([])).isnan()


def test_branch_share_of_independent_parts():
    """Var(x + f) = Var x + Var f, so a branch of standard deviation 2 on a stream of 1 has written four fifths."""
    x, f = torch.randn(2, 100, 50, 40)
    assert stats.branch_share(2 * f, x + 2 * f).item() == pytest.approx(0.8, abs=0.01)
    assert stats.branch_share(f, f).item() == pytest.approx(1.0)
    real = torch.rand(100, 50) < 0.5
    padded = torch.where(real[..., None], f, math.nan)
    assert stats.branch_share(padded, 3 * padded, real).item() == pytest.approx(1 / 9)


def test_epsilon_has_a_say_up_to_ten_times_its_size():
    variances = torch.tensor([[0.0, 1e-5, 1e-4], [1.01e-4, 1.0, 0.0]])
    assert stats.near_epsilon(variances, 1e-5).tolist() == [4, 6]
    real = torch.tensor([[True, True, False], [True, False, False]])
    assert stats.near_epsilon(variances, 1e-5, real).tolist() == [2, 3]


@given(st.floats(0.0, math.pi), st.sampled_from([1e-20, 1.0, 1e20]))
def test_angular_distance_of_known_angles(angle: float, size: float):
    first = torch.tensor([[[size, 0.0]]], dtype=torch.float64)
    second = torch.tensor([[[math.cos(angle), math.sin(angle)]]], dtype=torch.float64)
    assert stats.angular_distance(first, second).item() == pytest.approx(angle / math.pi, abs=1e-12)


def test_angular_distance_is_a_mean_over_positions_that_count():
    first = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [math.nan, 1.0]]])
    second = torch.tensor([[[0.0, 2.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]])
    real = torch.tensor([[True, True, True, False]])
    assert stats.angular_distance(first, second, real).item() == pytest.approx(0.25)
    assert stats.angular_distance(first, second, torch.zeros_like(real)).isnan()


# ---------------------------------------------------------------- attention


def test_equal_logits_have_the_entropy_of_looking_everywhere():
    logits, mask = torch.zeros(2, 3, 4, 5), torch.ones(4, 5, dtype=torch.bool)
    assert stats.attention_entropy(logits, mask).item() == pytest.approx(math.log(5))
    assert stats.attention_entropy(logits, mask, normalized=True).item() == pytest.approx(1.0)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([0.0, 1.0, 30.0, 1e4]))
def test_entropy_is_that_of_the_keys_a_query_may_look_at(queries: int, keys: int, seed: int, size: float):
    generator = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(2, queries, keys, generator=generator, dtype=torch.float64)
    mask = torch.rand(queries, keys, generator=generator) < 0.6
    rows = [head[query][mask[query]].softmax(-1) for head in logits for query in range(queries)]
    entropies = [-(row * row.clamp(min=1e-300).log()).sum().item() for row in rows if len(row)]
    shares = [
        entropy / math.log(len(row))
        for entropy, row in zip(entropies, [r for r in rows if len(r)], strict=True)
        if len(row) > 1
    ]
    logits = torch.where(mask, logits, math.inf)
    for expected, normalized in ((entropies, False), (shares, True)):
        mean = sum(expected) / len(expected) if expected else math.nan
        got = stats.attention_entropy(logits, mask, normalized).item()
        assert got == pytest.approx(mean, abs=1e-4, nan_ok=True)


def test_attention_sums_add():
    logits, mask = torch.randn(4, 2, 5, 5), torch.ones(5, 5, dtype=torch.bool).tril()
    whole = stats.attention_sums(logits, mask)
    torch.testing.assert_close(stats.attention_sums(logits[:1], mask) + stats.attention_sums(logits[1:], mask), whole)
    assert whole[1] == 4 * 2 * 5
    assert whole[3] == 4 * 2 * 4, "the first query sees one key, whose entropy is zero over zero"


def test_the_largest_logit_is_one_that_is_seen():
    logits = torch.tensor([[1.0, -7.0, 9.0], [2.0, 3.0, math.inf]])
    mask = torch.tensor([True, True, False])
    assert stats.largest_logit(logits, mask).item() == 7.0
    assert stats.largest_logit(logits, torch.zeros(3, dtype=torch.bool)).isnan()


# ---------------------------------------------------------------- the whole run


def slow_spikes(values: list[float], window: int, fewest: int, deviations: float) -> list[bool]:
    spikes = []
    for i, value in enumerate(values):
        before = [x for x in values[max(0, i - window) : i] if math.isfinite(x)]
        if not math.isfinite(value):
            spikes.append(True)
        elif len(before) < fewest:
            spikes.append(False)
        else:
            off = abs(value - statistics.fmean(before))
            spikes.append(off > 0 and off >= deviations * statistics.pstdev(before))
    return spikes


@given(st.integers(0, 2**31), st.integers(1, 60), st.integers(2, 20), st.integers(1, 10))
def test_spikes_are_those_of_a_plain_loop(seed: int, count: int, window: int, fewest: int):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    values[torch.rand(count, generator=generator) < 0.1] *= 100
    values[torch.rand(count, generator=generator) < 0.05] = math.nan
    expected = slow_spikes(values.tolist(), window, fewest, 2.5)
    assert (stats.rolling_deviations(values, window, fewest) >= 2.5).tolist() == expected
    score = stats.spike_score(values, 2.5, window, fewest)
    assert score.item() == pytest.approx(sum(expected) / count)


def test_spike_score_of_a_known_curve():
    values = torch.tensor([0.0, 1.0] * 5000)
    values[[2500, 7500]] = 1e3
    assert stats.spike_score(values).item() == pytest.approx(2 / 10_000)
    assert stats.spike_score(torch.full((2000,), 0.1)).item() == 0.0
    assert stats.spike_score(torch.tensor([])).isnan()


class Scale(nn.Module):
    """Multiply by a number; a tuple comes out where asked."""

    def __init__(self, by: float, tuples: bool) -> None:
        super().__init__()
        self.by, self.tuples = by, tuples

    def forward(self, x: Tensor) -> Any:
        return (self.by * x, "logits") if self.tuples else self.by * x


@pytest.mark.parametrize("tuples", [False, True])
def test_a_layer_is_worth_what_the_loss_is_without_it(tuples: bool):
    layers = [Scale(by, tuples) for by in (2.0, 1.0, 0.5)]

    def loss() -> Tensor:
        x = torch.tensor(8.0)
        for layer in layers:
            x = layer(x)[0] if tuples else layer(x)
        return x

    costs = stats.skip_costs(layers, loss)
    assert costs.tolist() == [4 - 8, 0, 16 - 8]
    assert stats.effective_depth(costs).item() == 1
    assert stats.effective_depth(costs, -10.0).item() == 3
    assert not any(layer._forward_hooks for layer in layers)


def test_a_layer_may_say_what_stands_in_its_place():
    class Own(Scale):
        def skip(self, inputs: tuple[Any, ...]) -> Any:
            return -inputs[0]

    layer = Own(3.0, False)
    assert stats.skip_costs([layer], lambda: layer(torch.tensor(1.0))).tolist() == [-4.0]
    with pytest.raises(RuntimeError, match="stop here"):
        stats.skip_costs([layer], _stop_when_hooked(layer))
    assert not layer._forward_hooks


def _stop_when_hooked(layer: nn.Module) -> Any:
    def loss() -> Tensor:
        if layer._forward_hooks:
            raise RuntimeError("stop here")
        return layer(torch.tensor(1.0))

    return loss
