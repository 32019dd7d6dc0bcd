"""Sandwich norm, other norms, value residual, capped and added logits, against whole stacks of x-transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import x_transformers
from torch import nn
from x_transformers.x_transformers import LayerNorm as TheirLayerNorm
from x_transformers.x_transformers import RMSNorm as TheirRMSNorm
from x_transformers.x_transformers import ScaleNorm as TheirScaleNorm

from stabilize.model import EncoderDecoder
from stabilize.model.layer import Branch
from stabilize.strategies import (
    DynamicErf,
    DynamicTanh,
    LayerNorm,
    Norm,
    PreNorm,
    RealFormer,
    RMSNorm,
    SandwichNorm,
    ScaleNorm,
    SoftCap,
    Stabilizer,
    ValueResidual,
)
from tests.interop.weights import HEADS, HIDDEN, WIDTH, give, give_attention, ours, without
from tests.models import PAD, assert_equal, sentences

CASES: dict[str, tuple[Stabilizer, dict[str, Any]]] = {
    "pre_norm": (Stabilizer(PreNorm()), {}),
    "sandwich_norm": (Stabilizer(SandwichNorm()), {"sandwich_norm": True}),
    "rms_norm": (Stabilizer(norm=RMSNorm()), {"use_rmsnorm": True}),
    "scale_norm": (Stabilizer(norm=ScaleNorm()), {"use_scalenorm": True}),
    "dynamic_tanh": (Stabilizer(norm=DynamicTanh()), {"use_dynamic_tanh": True}),
    "dynamic_erf": (Stabilizer(norm=DynamicErf()), {"use_derf": True}),
    "soft_cap": (
        Stabilizer(attention=SoftCap(0.5)),
        {"attn_softclamp_logits": True, "attn_logit_softclamp_value": 0.5},
    ),
    "realformer": (Stabilizer(attention=RealFormer()), {"residual_attn": True, "cross_residual_attn": True}),
    "value_residual": (
        Stabilizer(attention=ValueResidual()),
        {"add_value_residual": True, "learned_value_residual_mix": False},
    ),
}


def theirs(kind: str, layers: int, **options: Any) -> nn.Module:
    """An `Encoder` or `Decoder` of theirs; the decoder looks at the encoder's output."""
    sizes = {"dim": WIDTH, "heads": HEADS, "attn_dim_head": WIDTH // HEADS, "ff_mult": HIDDEN / WIDTH}
    crosses = {"cross_attend": True} if kind == "Decoder" else {}
    stack = getattr(x_transformers, kind)(depth=layers, norm_add_unit_offset=False, **sizes, **crosses, **options)
    return stack.eval()


def give_norm(target: nn.Module, source: Norm) -> None:
    """By the names of their parameters; their ScaleNorm has sqrt(width) beside its gain."""
    if isinstance(target, TheirScaleNorm):
        give(target, g=source.gain / WIDTH**0.5)
    elif isinstance(target, TheirRMSNorm):
        give(target, g=source.gain)
    elif isinstance(target, TheirLayerNorm):
        give(target, gamma=source.gain, beta=source.bias)
    else:
        slope = "pre_tanh_scale" if hasattr(target, "pre_tanh_scale") else "alpha"
        shift = {"s": source.shift} if hasattr(target, "s") else {}
        give(target, gamma=source.gain, beta=source.bias, **{slope: source.alpha}, **shift)


def give_branch(target: nn.Module, source: Branch) -> None:
    (norm, out, after), function, _ = target
    assert after is None
    give_norm(norm, source.slots["norm"])
    if out is not None:
        give_norm(out, source.slots["out"])
    if source.role == "feed_forward":
        first, second = (module for module in function.modules() if isinstance(module, nn.Linear))
        give(first, weight=source.function.input.weight, bias=source.function.input.bias)
        give(second, weight=source.function.output.weight, bias=source.function.output.bias)
    else:
        give_attention(source.function, function.to_q, function.to_k, function.to_v, function.to_out)


def as_theirs(model: EncoderDecoder, kind: str, **options: Any) -> nn.Module:
    """Their stack with our weights."""
    stack = getattr(model, kind.lower())
    copy = theirs(kind, len(stack.layers), **options)
    branches = [branch for layer in stack.layers for branch in layer.branches]
    for target, source in zip(copy.layers, branches, strict=True):
        give_branch(target, source)
    give_norm(copy.final_norm, stack.end.slots["norm"])
    return copy


@pytest.mark.parametrize("name", CASES)
def test_both_stacks(name: str) -> None:
    stabilizer, options = CASES[name]
    model = ours(stabilizer, activation="gelu")
    functions = [
        branch.function for layer in model.layers for branch in layer.branches if branch.role != "feed_forward"
    ]
    without(bias for function in functions for path, bias in function.named_parameters() if path.endswith("bias"))
    without(norm.bias for norm in model.modules() if isinstance(norm, LayerNorm))
    source, target = sentences(3, 7), sentences(3, 5)
    source[1, 4:] = PAD
    memory, hidden = model.encode(source), model(source, target)

    real = source != PAD
    expected = as_theirs(model, "Encoder", **options)(model.source_embedding(source), mask=real)
    assert_equal(memory.states[real], expected[real], 1e-5)
    decoder = as_theirs(model, "Decoder", **options)
    expected = decoder(model.target_embedding(target), context=expected, context_mask=real)
    assert_equal(hidden, expected, 1e-5)
    assert torch.isfinite(hidden).all()
