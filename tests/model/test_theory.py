"""Signal and gradients at initialisation, against what the papers derive: one recipe, only depth or method changes."""

from __future__ import annotations

import functools

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize.model import EncoderDecoder
from stabilize.strategies import PreNorm, ScaledSum, Stabilizer
from stabilize.strategies.placement import SandwichNorm
from tests.models import model_of, sentences


@functools.cache
def gradient_norms(name: str, encoder_layers: int, decoder_layers: int) -> dict[str, list[float]]:
    """Of the feed-forward output matrices of both stacks, bottom first, for the loss on random sentences."""
    torch.manual_seed(1)  # the same numbers whichever test asks first
    model = model_of(name, encoder_layers, decoder_layers, width=64, heads=4, hidden=256).train()
    source, target = sentences(16, 12), sentences(16, 13)
    logits = model.project(model(source, target[:, :-1]))
    F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten()).backward()
    return {
        stack: [layer.branches[-1].function.output.weight.grad.norm().item() for layer in getattr(model, stack).layers]
        for stack in ("encoder", "decoder")
    }


def growth(norms: list[float]) -> float:
    """From one layer to the next, fitted over all."""
    return float(numpy.exp(numpy.polyfit(range(len(norms)), numpy.log(norms), 1)[0]))


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("post_norm", 1.3, 1.7), ("b2t", 1.05, 1.25), ("pre_norm", 0.9, 1.05), ("deep_norm", 0.95, 1.05)],
)
def test_growth_of_the_gradient_from_layer_to_layer(name: str, least: float, most: float) -> None:
    """In a decoder of 12 layers: geometric under post-norm, milder with B2T, flat under pre-norm and DeepNorm."""
    assert least < growth(gradient_norms(name, 12, 12)["decoder"]) < most


BANDS = {"pre_norm": (0.5, 4.0), "b2t": (0.1, 2.0), "deep_norm": (0.5, 2.0)}
"""First layer's gradient over the last layer's."""


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("depths", [(2, 2), (12, 12), (18, 3)], ids=str)
def test_methods_for_depth_keep_the_first_layer_in_reach(name: str, depths: tuple[int, int]) -> None:
    """When nothing but depth changes (FIELD_REPORTS 1.3)."""
    least, most = BANDS[name]
    for norms in gradient_norms(name, *depths).values():
        assert least < norms[0] / norms[-1] < most


def test_post_norm_loses_the_first_layer_at_twelve_though_not_at_three() -> None:
    shallow, deep = (gradient_norms("post_norm", *depths)["decoder"] for depths in ((18, 3), (12, 12)))
    assert shallow[0] / shallow[-1] > 0.2
    assert deep[0] / deep[-1] < 0.05


def test_last_gradient_falls_with_the_root_of_depth_under_pre_norm_only() -> None:
    """O(sqrt(1 / L)) under pre-norm, independent of L under post-norm (arXiv:2002.04745, section 3.3)."""
    pre, post = (
        [gradient_norms(name, 2, depth)["decoder"][-1] for depth in (3, 24)] for name in ("pre_norm", "post_norm")
    )
    assert pre[0] / pre[1] == pytest.approx(8**0.5, rel=0.25)
    assert post[0] / post[1] == pytest.approx(1, rel=0.35)


def test_post_norm_loses_the_same_share_in_every_layer_of_a_decoder() -> None:
    """Geometric: the logarithms lie on a line. A layer's cross-attention adds about the stream's variance and hands
    hardly any gradient down, so the norm after it halves the gradient's square: sqrt(2) a layer."""
    norms = gradient_norms("post_norm", 24, 24)["decoder"]
    assert numpy.corrcoef(range(24), numpy.log(norms))[0, 1] > 0.97
    assert growth(norms) == pytest.approx(2**0.5, rel=0.12)
    assert norms[-1] / norms[0] > 1000


def test_post_norm_loses_nothing_in_an_encoder_at_the_start() -> None:
    """What a self-attention or feed-forward branch adds to the variance it hands down as gradient again. The bound
    (2/3)^((L - l) / 2) of arXiv:2002.04745 counts what the norm takes only."""
    assert 0.92 < growth(gradient_norms("post_norm", 24, 24)["encoder"]) < 1.1


@pytest.mark.parametrize("depth", [6, 24])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_pre_norms_gradients_differ_by_the_root_of_depth_at_most(depth: int, stack: str) -> None:
    """The last layer's falls as depth^-1/2; going down, each layer's 1 + O(1 / l) makes it l^-1/2 at most."""
    norms = gradient_norms("pre_norm", depth, depth)[stack]
    assert 0.8 < norms[0] / norms[-1] < 1.5 * depth**0.5
    assert max(norms) / min(norms) < 1.7 * depth**0.5


# ---------------------------------------------------------------- the stream's variance

DEPTH = 12


def variances(model: EncoderDecoder) -> dict[str, list[float]]:
    """Of the stream before the first layer and after each, over tokens and channels, by stack."""
    found: dict[str, list[float]] = {"encoder": [], "decoder": []}

    def before(layer: nn.Module, inputs: tuple, seen: list[float]) -> None:
        seen.append(inputs[0].var(correction=0).item())

    def after(layer: nn.Module, inputs: tuple, output: tuple, seen: list[float]) -> None:
        seen.append(layer.observe(inputs, output)[0].var(correction=0).item())

    for stack, seen in found.items():
        layers = getattr(model, stack).layers
        layers[0].register_forward_pre_hook(functools.partial(before, seen=seen))
        for layer in layers:
            layer.register_forward_hook(functools.partial(after, seen=seen))
    with torch.no_grad():
        model(sentences(16, 12), sentences(16, 12))
    return found


def with_gain(stabilizer: Stabilizer, gain: float) -> EncoderDecoder:
    """All matrices of the branches times `gain`. The hidden layer is as wide as the stream, as in arXiv:2002.04745."""
    model = model_of(stabilizer, DEPTH, DEPTH, width=64, heads=4, hidden=64)
    for layer in model.layers:
        for branch in layer.branches:
            for parameter in branch.function.parameters():
                parameter.data.mul_(gain if parameter.ndim == 2 else 1.0)
    return model


def line(values: list[float]) -> tuple[float, float]:
    """Slope of the fitted line, and the squared correlation with it."""
    layers = range(len(values))
    return float(numpy.polyfit(layers, values, 1)[0]), float(numpy.corrcoef(layers, values)[0, 1] ** 2)


@pytest.mark.parametrize("gain", [1.0, 3.0])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_pre_norms_variance_grows_linearly(stack: str, gain: float) -> None:
    """A feed-forward branch adds 1/2, an attention between 0 and 1 (arXiv:2002.04745, lemma 2), at Xavier's gain; at
    gain g both g^4 times that, for two matrices stand in a row."""
    slope, fit = line(variances(with_gain(Stabilizer(PreNorm()), gain))[stack])
    attentions = 1 if stack == "encoder" else 2
    assert fit > 0.9
    assert 0.5 * 0.9 * gain**4 < slope < (0.5 + attentions) * 1.1 * gain**4


@pytest.mark.parametrize("gain", [1.0, 3.0])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_sandwich_norms_variance_is_bounded_by_the_number_of_branches(stack: str, gain: float) -> None:
    """Each branch adds a vector of variance one, whatever its weights: the variance grows by about one a branch (by
    no more than the square of their number, were they all the same)."""
    found = variances(with_gain(Stabilizer(SandwichNorm()), gain))[stack]
    slope, fit = line(found)
    branches = 2 if stack == "encoder" else 3
    assert fit > 0.9
    assert 0.7 * branches < slope < 1.3 * branches
    assert all(value**0.5 <= found[0] ** 0.5 + branches * layer + 1e-3 for layer, value in enumerate(found))


def test_a_scaled_sum_keeps_unit_variance_for_branches_of_unit_variance() -> None:
    """(x + f) / sqrt(2) of two independent parts of variance one."""
    residual, stream = ScaledSum("rsqrt2"), torch.randn(64, 64, 64)
    for _ in range(36):
        stream = residual.write(stream, torch.randn_like(stream))
        assert stream.var().item() == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_a_scaled_sum_tends_to_the_variance_of_real_branches(stack: str) -> None:
    """v <- (v + s) / 2: the start is soon forgotten, and s, the branches' own variance, is what stays."""
    model = with_gain(Stabilizer(PreNorm(), ScaledSum("rsqrt2")), 1.0)
    added: list[float] = []

    def remember(branch: nn.Module, inputs: tuple, output: tuple[Tensor, Tensor | None]) -> None:
        added.append(output[0].var(correction=0).item())

    for layer in getattr(model, stack).layers:
        for branch in layer.branches:
            branch.function.register_forward_hook(remember)
    found = variances(model)[stack]
    branches = len(added) // DEPTH
    assert found[0] > 1.15
    assert numpy.mean(found[3:]) == pytest.approx(numpy.mean(added[2 * branches :]), rel=0.3)
    assert numpy.mean(found[3:]) < 0.85 * found[0]
