"""The stabilisers under test, and small models that carry them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize.model import EncoderDecoder, Sizes
from stabilize.model.attention import Attention
from stabilize.strategies import (
    B2T,
    DLCL,
    GPT2,
    AdaNorm,
    AdaptiveLayerNorm,
    AdminClosedForm,
    AdminResidual,
    B2TInit,
    BranchNorm,
    Cosine,
    CosineAttention,
    DeepNormInit,
    DeepNormResidual,
    DepthScaled,
    DynamicErf,
    DynamicTanh,
    Exponential,
    FixNorm,
    Fixup,
    HybridNorm,
    HyperConnections,
    InverseSqrtDecay,
    LayerEpsilon,
    LayerScale,
    Linear,
    MaskedBatchNorm,
    MixNorm,
    Noam,
    NoNorm,
    NoResidual,
    NormFormer,
    NoWarmup,
    Part,
    PeriNorm,
    PostNorm,
    PowerNorm,
    PrecisionEpsilon,
    PreNorm,
    QKNorm,
    RealFormer,
    ResiDual,
    ReZero,
    RMSNorm,
    SandwichNorm,
    ScaledLayerNorm,
    ScaledSum,
    ScaleNorm,
    SigmaReparam,
    SkipInit,
    SmallInit,
    SoftCap,
    Stabilizer,
    StochasticDepth,
    SubNorm,
    SubNormInit,
    TFixup,
    Untuned,
    ValueResidual,
    WarmupStableDecay,
)

DEEP_NORM = Stabilizer(PostNorm(), DeepNormResidual(), initialization=DeepNormInit())

STABILIZERS: dict[str, tuple[Stabilizer, Stabilizer]] = {
    name: (stabilizer, stabilizer)
    for name, stabilizer in {
        "pre_norm": Stabilizer(PreNorm()),
        "post_norm": Stabilizer(PostNorm()),
        "b2t": Stabilizer(B2T()),
        "residual": Stabilizer(ResiDual()),
        "no_norm": Stabilizer(NoNorm()),
        "scaled_sum": Stabilizer(PreNorm(), ScaledSum("rsqrt2")),
        "deep_norm": DEEP_NORM,
        "hyper_connections": Stabilizer(PreNorm(), HyperConnections()),
        "dynamic_hyper_connections": Stabilizer(PreNorm(), HyperConnections(dynamic=True)),
        "dlcl": Stabilizer(PreNorm(), DLCL("each")),
        "dlcl_post": Stabilizer(PostNorm(), DLCL("sum")),
        "no_residual": Stabilizer(PreNorm(), NoResidual()),
        "rms_norm": Stabilizer(PreNorm(), norm=RMSNorm()),
        "qk_norm": Stabilizer(PreNorm(), attention=QKNorm("head")),
        "qk_norm_projection": Stabilizer(PreNorm(), attention=QKNorm("projection")),
        "realformer": Stabilizer(PostNorm(), attention=RealFormer()),
        "realformer_mean": Stabilizer(PostNorm(), attention=RealFormer(running_mean=True)),
        "sandwich": Stabilizer(SandwichNorm()),
        "peri_norm": Stabilizer(PeriNorm(), norm=RMSNorm()),
        "sub_norm": Stabilizer(SubNorm(), initialization=SubNormInit()),
        "norm_former": Stabilizer(NormFormer()),
        "hybrid_norm": Stabilizer(HybridNorm(), norm=RMSNorm()),
        "hybrid_norm_first": Stabilizer(HybridNorm(first_layer_pre_norm=True), norm=RMSNorm()),
        "mix_norm": Stabilizer(MixNorm(0.5)),
        "admin": Stabilizer(PostNorm(), AdminResidual()),
        "admin_closed_form": Stabilizer(PostNorm(), AdminClosedForm()),
        "rezero": Stabilizer(NoNorm(), ReZero()),
        "skip_init": Stabilizer(NoNorm(), SkipInit("rsqrt_branches")),
        "layer_scale": Stabilizer(PreNorm(), LayerScale()),
        "branch_norm": Stabilizer(PostNorm(), BranchNorm(3)),
        "stochastic_depth": Stabilizer(PreNorm(), StochasticDepth(rate=0.3)),
        "stochastic_depth_around": Stabilizer(PreNorm(), StochasticDepth(HyperConnections(), 0.3)),
        "fix_norm": Stabilizer(PreNorm(), norm=ScaleNorm(), initialization=FixNorm()),
        "ada_norm": Stabilizer(PreNorm(), norm=AdaNorm()),
        "adaptive_layer_norm": Stabilizer(PreNorm(), norm=AdaptiveLayerNorm()),
        "dynamic_tanh": Stabilizer(PreNorm(), norm=DynamicTanh(0.3, 0.8)),
        "dynamic_erf": Stabilizer(PreNorm(), norm=DynamicErf()),
        "scaled_layer_norm": Stabilizer(PreNorm(), norm=ScaledLayerNorm()),
        "batch_norm": Stabilizer(PreNorm(), norm=MaskedBatchNorm()),
        "power_norm": Stabilizer(PostNorm(), norm=PowerNorm(warmup=2)),
        "soft_cap": Stabilizer(PreNorm(), attention=SoftCap(5.0)),
        "cosine_attention": Stabilizer(PreNorm(), attention=CosineAttention(learned=True)),
        "value_residual": Stabilizer(PreNorm(), attention=ValueResidual()),
        "sigma_reparam": Stabilizer(PostNorm(), attention=SigmaReparam()),
    }.items()
}
STABILIZERS["b2t_then_realformer"] = Stabilizer(B2T()), Stabilizer(PreNorm(), attention=RealFormer())
STABILIZERS["batch_norm_then_layer_norm"] = Stabilizer(norm=MaskedBatchNorm()), Stabilizer()
STABILIZERS["hyper_connections_then_dlcl"] = Stabilizer(PreNorm(), HyperConnections(2)), Stabilizer(PostNorm(), DLCL())
"""The encoder's and the decoder's stabiliser, by name."""

STARTS: dict[str, tuple[Stabilizer, Stabilizer]] = {
    name: (stabilizer, stabilizer)
    for name, stabilizer in {
        "t_fixup": Stabilizer(NoNorm(), initialization=TFixup(), warmup=InverseSqrtDecay()),
        "fixup": Stabilizer(NoNorm(), SkipInit(1.0), initialization=Fixup(), warmup=NoWarmup()),
        "gpt2": Stabilizer(PreNorm(), initialization=GPT2(), warmup=Cosine(2, 8)),
        "ds_init": Stabilizer(PostNorm(), initialization=DepthScaled(), warmup=Noam(2)),
        "small_init": Stabilizer(PostNorm(), initialization=SmallInit(), warmup=Linear(2)),
        "b2t_released": Stabilizer(B2T(), initialization=B2TInit(), warmup=WarmupStableDecay(1, 8, 0.8)),
        "layer_epsilon": Stabilizer(PostNorm(), epsilon=LayerEpsilon([1e-5, 1e-6], [1e-6, 1e-5]), warmup=Exponential()),
        "precision_epsilon": Stabilizer(PreNorm(), epsilon=PrecisionEpsilon(1e-6, 1e-4), warmup=Untuned()),
    }.items()
}
"""Those that differ from others in numbers alone; no graph, cache or hook knows of them."""

every_stabilizer = pytest.mark.parametrize("name", STABILIZERS)
every_start = pytest.mark.parametrize("name", STABILIZERS | STARTS)
"""Those that differ in numbers alone too."""

VOCABULARY = 20
PAD, END = 0, 3
SOURCE = torch.tensor([[5, 6, 7, 3], [8, 9, 3, 0]])
TARGET = torch.tensor([[2, 5, 6, 7, 8], [2, 9, 4, 0, 0]])
"""Two sentences, the second shorter; `TARGET` as the decoder reads it."""


def model_of(name: str | Stabilizer, encoder_layers: int = 2, decoder_layers: int = 3, **others: Any) -> EncoderDecoder:
    """A small model with the stabilisers called `name`, or that one, by default in evaluation and without dropout."""
    precision = others.pop("precision", "32-true")
    shape = {"width": 16, "heads": 2, "hidden": 32, "dropout": 0.0} | others
    sizes = Sizes(encoder_layers, decoder_layers, **shape)
    stabilizers = (name,) if isinstance(name, Stabilizer) else (STABILIZERS | STARTS)[name]
    return EncoderDecoder(VOCABULARY, sizes, *stabilizers, precision=precision).eval()


def disturb(module: nn.Module, deviation: float = 0.05, update: int = 2) -> None:
    """Move every parameter away from where it starts, so that no gain is one and no bias zero, and every clock on to
    an update, so that no branch that fades in is still zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=deviation)
        for part in module.modules():
            if isinstance(part, Part):
                part.after_update(update)


def sentences(rows: int, length: int) -> Tensor:
    """Random tokens without padding `[rows, length]`."""
    return torch.randint(END + 1, VOCABULARY, (rows, length))


def gradients(loss: Tensor, module: nn.Module) -> dict[str, Tensor]:
    """Of all parameters that the loss depends on, by name."""
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}


def assert_equal(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    """Equal to `tolerance`, relative to the largest entry where that is above one."""
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * max(1.0, expected.abs().max().item()))


def query_key_value(attention: Attention) -> Sequence[tuple[Tensor, Tensor]]:
    """Weight and bias of each of the three projections; the bias is zero where the module has none."""
    parts = (attention.query, attention.value_key) if attention.crosses else (attention.query_value_key,)
    weight, bias = (torch.cat([getattr(part, name) for part in parts]) for name in ("weight", "bias"))
    bias = F.pad(bias, (0, len(weight) - len(bias)))
    query, value, key = zip(weight.chunk(3), bias.chunk(3), strict=True)
    return query, key, value
