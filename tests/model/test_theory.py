"""Gradients at initialisation, against what the papers derive: one recipe, only depth or method changes."""

from __future__ import annotations

import functools

import numpy
import pytest
import torch.nn.functional as F

from tests.models import model_of, sentences


@functools.cache
def gradient_norms(name: str, encoder_layers: int, decoder_layers: int) -> dict[str, list[float]]:
    """Of the feed-forward output matrices of both stacks, bottom first, for the loss on random sentences."""
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
