"""Post-norm and pre-norm are torch's own layers, weight for weight; and how many norms stand where."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stabilize.model import EncoderDecoder, Layer, Sizes, Stack
from stabilize.strategies import (
    B2T,
    DLCL,
    HyperConnections,
    NoNorm,
    NoResidual,
    Norm,
    PostNorm,
    PreNorm,
    ResiDual,
    Stabilizer,
)
from tests.models import PAD, VOCABULARY, assert_equal, disturb, query_key_value, sentences

WIDTH, HEADS, HIDDEN = 16, 4, 24
ENCODER_LAYERS, DECODER_LAYERS = 3, 2

norm_first = pytest.mark.parametrize("norm_first", [False, True], ids=["post_norm", "pre_norm"])
activations = pytest.mark.parametrize("activation", ["relu", "gelu"])


def ours(norm_first: bool, activation: str = "relu") -> EncoderDecoder:
    sizes = Sizes(ENCODER_LAYERS, DECODER_LAYERS, WIDTH, HEADS, HIDDEN, activation=activation)
    model = EncoderDecoder(VOCABULARY, sizes, Stabilizer(PreNorm() if norm_first else PostNorm())).eval()
    disturb(model)
    return model


def copy_linear(target: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    target.weight.copy_(weight)
    target.bias.copy_(bias)


@torch.no_grad()
def copy_layer(target: nn.Module, source: Layer) -> None:
    """Give torch's layer the weights of ours."""
    *attentions, feed_forward = (branch.function for branch in source.branches)
    for name, attention in zip(("self_attn", "multihead_attn"), attentions, strict=False):
        theirs = getattr(target, name)
        weights, biases = zip(*query_key_value(attention), strict=True)
        theirs.in_proj_weight.copy_(torch.cat(weights))
        theirs.in_proj_bias.copy_(torch.cat(biases))
        copy_linear(theirs.out_proj, attention.output.weight, attention.output.bias)
    copy_linear(target.linear1, feed_forward.input.weight, feed_forward.input.bias)
    copy_linear(target.linear2, feed_forward.output.weight, feed_forward.output.bias)
    for number, branch in enumerate(source.branches, 1):
        copy_norm(getattr(target, f"norm{number}"), branch.slots["norm"])


@torch.no_grad()
def copy_norm(target: nn.LayerNorm, source: nn.Module) -> None:
    target.weight.copy_(source.gain)
    target.bias.copy_(source.bias)


def theirs(stack: Stack, kind: str, norm_first: bool, activation: str = "relu") -> nn.Module:
    """torch's stack with our weights, and one final norm after pre-norm layers."""
    options = {"dropout": 0.0, "activation": activation, "batch_first": True, "norm_first": norm_first}
    layer = getattr(nn, f"Transformer{kind}Layer")(WIDTH, HEADS, HIDDEN, **options)
    final = nn.LayerNorm(WIDTH) if norm_first else None
    others = {"enable_nested_tensor": False} if kind == "Encoder" else {}
    copy = getattr(nn, f"Transformer{kind}")(layer, len(stack.layers), norm=final, **others).eval()
    for target, source in zip(copy.layers, stack.layers, strict=True):
        copy_layer(target, source)
    if norm_first:
        copy_norm(final, stack.end.slots["norm"])
    return copy


@norm_first
@activations
def test_both_stacks_equal_torchs(norm_first: bool, activation: str) -> None:
    model = ours(norm_first, activation)
    source, target = sentences(3, 7), sentences(3, 5)
    source[1, 4:] = PAD
    memory, hidden = model.encode(source), model(source, target)

    padding = source == PAD
    encoder, decoder = (
        theirs(getattr(model, kind.lower()), kind, norm_first, activation) for kind in ("Encoder", "Decoder")
    )
    expected = encoder(model.source_embedding(source), src_key_padding_mask=padding)
    assert_equal(memory.states[~padding], expected[~padding], 1e-5)

    forbidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = decoder(model.target_embedding(target), expected, tgt_mask=forbidden, memory_key_padding_mask=padding)
    assert_equal(hidden, expected, 1e-5)


@norm_first
def test_gradients_equal_torchs(norm_first: bool) -> None:
    model = ours(norm_first)
    encoder = theirs(model.encoder, "Encoder", norm_first).train()
    source = sentences(2, 6)
    x = model.source_embedding(source).detach()
    model.encode(source).states.pow(3).sum().backward()
    encoder(x).pow(3).sum().backward()

    def gradient(module: nn.Module) -> Tensor:
        return module.weight.grad

    for mine, other in zip(model.encoder.layers, encoder.layers, strict=True):
        attention, feed_forward = (branch.function for branch in mine.branches)
        assert_equal(gradient(feed_forward.input), gradient(other.linear1), 1e-5)
        assert_equal(gradient(feed_forward.output), gradient(other.linear2), 1e-5)
        assert_equal(gradient(attention.output), gradient(other.self_attn.out_proj), 1e-5)
        query, value, key = gradient(attention.query_value_key).chunk(3)
        assert_equal(torch.cat([query, key, value]), other.self_attn.in_proj_weight.grad, 1e-5)


FINAL_NORMS = [
    (Stabilizer(PreNorm()), 1),
    (Stabilizer(PostNorm()), 0),
    (Stabilizer(B2T()), 0),
    (Stabilizer(ResiDual()), 1),
    (Stabilizer(NoNorm()), 0),
    (Stabilizer(PreNorm(), HyperConnections()), 1),
    (Stabilizer(PreNorm(), NoResidual()), 1),
]
"""Norms after the last layer of a stack; each branch has one beside, but for NoNorm."""


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize(("stabilizer", "final"), FINAL_NORMS)
def test_each_stack_has_the_norms_of_its_method(stabilizer: Stabilizer, final: int, side: str) -> None:
    stack = getattr(EncoderDecoder(VOCABULARY, Sizes(4, 4, WIDTH, HEADS, HIDDEN), stabilizer), side)
    branches = 4 * (2 if side == "encoder" else 3)
    norms = sum(isinstance(module, Norm) for module in stack.modules())
    assert norms == final + (0 if isinstance(stabilizer.placement, NoNorm) else branches)
    assert sum(isinstance(module, Norm) for module in stack.end.modules()) == final


@pytest.mark.parametrize(("side", "depth"), [("encoder", 24), ("decoder", 24)])
def test_dlcl_has_one_norm_a_layer_beside(side: str, depth: int) -> None:
    """Each output is normed once, however many layers read it; the sums of post-norm are normed but for the first."""
    for stabilizer, final in ((Stabilizer(PreNorm(), DLCL("each")), 1), (Stabilizer(PostNorm(), DLCL("sum")), 0)):
        stack = getattr(EncoderDecoder(VOCABULARY, Sizes(depth, depth, WIDTH, HEADS, HIDDEN), stabilizer), side)
        branches = depth * (2 if side == "encoder" else 3)
        assert sum(isinstance(module, Norm) for module in stack.modules()) == branches + depth + final


@pytest.mark.parametrize(
    ("stabilizer", "expected"), [(Stabilizer(PreNorm()), 1), (Stabilizer(PostNorm()), 1), (Stabilizer(ResiDual()), 2)]
)
def test_24_layers_end_at_the_scale_of_a_norm(stabilizer: Stabilizer, expected: float) -> None:
    """ResiDual ends in the sum of two normed streams, between 1 and 2; without its final norm pre-norm ends near 9
    (FIELD_REPORTS 1.4)."""
    model = EncoderDecoder(VOCABULARY, Sizes(24, 24, 32, HEADS, 64), stabilizer).eval()
    source, target = sentences(4, 9), sentences(4, 8)
    for states in (model.encode(source).states, model(source, target)):
        assert 0.99 < states.pow(2).mean().sqrt().item() < expected + 0.01
