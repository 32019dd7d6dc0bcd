"""What is read off a model, with its scales folded in, is the model: torch's own layers are given the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilize.errors import UserError
from stabilize.export.fold import fold, remarks
from stabilize.export.plain import Linear, Plain, PlainBranch, PlainStack, read
from stabilize.model import EncoderDecoder, Sizes
from stabilize.strategies import (
    AdminClosedForm,
    AdminResidual,
    BranchNorm,
    DeepNormResidual,
    FixedEpsilon,
    FixNorm,
    LayerEpsilon,
    LayerNorm,
    LayerScale,
    PlainAttention,
    PostNorm,
    PreNorm,
    RMSNorm,
    ScaledLayerNorm,
    ScaledSum,
    SigmaReparam,
    SkipInit,
    Stabilizer,
    StochasticDepth,
    Sum,
)
from stabilize.strategies.norm import StandardNorm
from tests.models import PAD, STABILIZERS, VOCABULARY, disturb, sentences

SIZES = Sizes(3, 2, width=16, heads=4, hidden=24, dropout=0.0)
LARGE = FixedEpsilon(0.03)
"""An epsilon in the wrong place is seen."""
BY_LAYER = LayerEpsilon([0.3, 1e-5, 0.01], [1e-6, 0.1], default=0.02)


def model_of(stabilizer: Stabilizer, decoder: Stabilizer | None = None, sizes: Sizes = SIZES) -> EncoderDecoder:
    """Three and two layers, no parameter where it starts."""
    model = EncoderDecoder(VOCABULARY, sizes, stabilizer, decoder).eval()
    disturb(model, 0.1)
    return model


# ---------------------------------------------------------------- torch's layers with the numbers


def filled(target: nn.Module, **values: Tensor) -> None:
    with torch.no_grad():
        for name, value in values.items():
            getattr(target, name).copy_(value)


def layer_of(branches: list[PlainBranch], pre_norm: bool, activation: str, heads: int) -> nn.Module:
    """torch.nn.TransformerEncoderLayer or -DecoderLayer; each norm with the epsilon that it is said to need."""
    *attentions, feed_forward = branches
    hidden, width = feed_forward.reads["input"].weight.shape
    kind = nn.TransformerEncoderLayer if len(branches) == 2 else nn.TransformerDecoderLayer
    layer = kind(width, heads, hidden, 0.0, activation, batch_first=True, norm_first=pre_norm).double()
    for name, branch in zip(("self_attn", "multihead_attn"), attentions, strict=False):
        parts = branch.reads | branch.memory
        both = Linear.stacked([parts[role] for role in ("query", "key", "value")])
        filled(getattr(layer, name), in_proj_weight=both.weight, in_proj_bias=both.bias)
        filled(getattr(layer, name).out_proj, weight=branch.output.weight, bias=branch.output.bias)
    filled(layer.linear1, weight=feed_forward.reads["input"].weight, bias=feed_forward.reads["input"].bias)
    filled(layer.linear2, weight=feed_forward.output.weight, bias=feed_forward.output.bias)
    for number, branch in enumerate(branches, 1):
        assert branch.skip.eq(1).all()
        assert branch.scale.eq(1).all()
        setattr(layer, f"norm{number}", norm_of(branch.norm))
    return layer


def norm_of(norm: StandardNorm) -> nn.Module:
    made = (nn.LayerNorm if norm.centred else nn.RMSNorm)(len(norm.gain), norm.epsilon).double()
    filled(made, weight=norm.gain, **({"bias": norm.bias} if norm.centred else {}))
    return made


def run(stack: PlainStack, plain: Plain, tokens: Tensor, **masks: Any) -> Tensor:
    x = stack.embedding[tokens] + stack.positions[: tokens.size(1)]
    memory = masks.pop("memory", None)
    for branches in stack.layers:
        layer = layer_of(branches, stack.pre_norm, plain.sizes.activation, plain.sizes.heads)
        x = layer(x, **masks) if memory is None else layer(x, memory, **masks)
    return norm_of(stack.final)(x) if stack.final else x


@torch.no_grad()
def logits(plain: Plain, source: Tensor, target: Tensor) -> Tensor:
    """What torch's layers compute with these numbers."""
    padding = source == PAD
    memory = run(plain.encoder, plain, source, src_key_padding_mask=padding)
    later = torch.ones(target.size(1), target.size(1)).triu(1).bool()
    masks = {"tgt_mask": later, "memory_key_padding_mask": padding}
    hidden = run(plain.decoder, plain, target, memory=memory, **masks)
    return hidden @ plain.projection.weight.T + plain.projection.bias


def pair() -> tuple[Tensor, Tensor]:
    source, target = sentences(3, 7), sentences(3, 5)
    source[1, 4:] = PAD
    return source, target


# ---------------------------------------------------------------- the algebra

FOLDED: dict[str, Stabilizer] = {
    "pre_norm": Stabilizer(PreNorm(), epsilon=LARGE),
    "post_norm": Stabilizer(PostNorm(), epsilon=LARGE),
    "post_norm_by_layer": Stabilizer(PostNorm(), epsilon=BY_LAYER),
    "deep_norm": Stabilizer(PostNorm(), DeepNormResidual(), epsilon=LARGE),
    "post_scaled_sum": Stabilizer(PostNorm(), ScaledSum(0.3), epsilon=LARGE),
    "admin": Stabilizer(PostNorm(), AdminResidual(), epsilon=BY_LAYER),
    "admin_closed_form": Stabilizer(PostNorm(), AdminClosedForm(), epsilon=LARGE),
    "branch_norm": Stabilizer(PostNorm(), BranchNorm(3), epsilon=LARGE),
    "post_layer_scale": Stabilizer(PostNorm(), LayerScale(), epsilon=LARGE),
    "pre_layer_scale": Stabilizer(PreNorm(), LayerScale(), epsilon=LARGE),
    "skip_init": Stabilizer(PreNorm(), SkipInit(0.4), epsilon=LARGE),
    "stochastic_depth": Stabilizer(PostNorm(), StochasticDepth(DeepNormResidual(), 0.3), epsilon=LARGE),
    "scaled_layer_norm": Stabilizer(PreNorm(), norm=ScaledLayerNorm(), epsilon=LARGE),
    "sigma_reparam": Stabilizer(PostNorm(), attention=SigmaReparam(), epsilon=LARGE),
    "rms_norm": Stabilizer(PostNorm(), DeepNormResidual(), norm=RMSNorm(), epsilon=LARGE),
    "fix_norm": Stabilizer(PreNorm(), initialization=FixNorm(), epsilon=LARGE),
}


@pytest.mark.parametrize("epsilon", [0.03, 1e-5])
@pytest.mark.parametrize("name", FOLDED)
def test_folded_it_is_the_same_function(name: str, epsilon: float) -> None:
    model = model_of(FOLDED[name])
    plain = fold(read(model, SIZES), epsilon)
    source, target = pair()
    assert not remarks(plain, epsilon), "every norm has the target's epsilon"
    torch.testing.assert_close(
        logits(plain, source, target).float(), model.project(model(source, target)), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("shape", [{"tied": False}, {"activation": "gelu"}, {"positions": "learned"}], ids=str)
def test_every_shape(shape: dict[str, Any]) -> None:
    sizes = Sizes(3, 2, 16, 4, 24, maximum_length=9, **shape)
    model = model_of(FOLDED["deep_norm"], FOLDED["pre_norm"], sizes)
    source, target = pair()
    found = logits(fold(read(model, sizes), 1e-5), source, target).float()
    torch.testing.assert_close(found, model.project(model(source, target)), rtol=0, atol=2e-5)


@pytest.mark.parametrize("fixed_positions", [False, True])
@pytest.mark.parametrize("name", ["pre_scaled_sum", "pre_norm_by_layer", "deep_norm"])
def test_where_an_epsilon_cannot_be_had_it_is_said_which_would_be_exact(name: str, fixed_positions: bool) -> None:
    """A pre-norm stream keeps its units, and so does one whose positions cannot be scaled up to its first norm."""
    stabilizer = {
        "pre_scaled_sum": Stabilizer(PreNorm(), ScaledSum(), epsilon=LARGE),
        "pre_norm_by_layer": Stabilizer(PreNorm(), epsilon=BY_LAYER),
        **FOLDED,
    }[name]
    model = model_of(stabilizer)
    unfolded = read(model, SIZES)
    plain = fold(unfolded, 0.02, fixed_positions)
    source, target = pair()
    torch.testing.assert_close(
        logits(plain, source, target).float(), model.project(model(source, target)), rtol=0, atol=2e-5
    )
    if fixed_positions:
        assert torch.equal(plain.encoder.positions, unfolded.encoder.positions)
    (told,) = remarks(plain, 0.02) if fixed_positions or name != "deep_norm" else ["all norms have the epsilon 0.02"]
    assert "norms have the epsilon 0.02" in told
    if name == "pre_scaled_sum":  # six sums of an encoder double it each, nine norms of a decoder likewise
        needed = [norm.epsilon / plain.encoder.norms[0].epsilon for norm in plain.encoder.norms]
        assert needed == pytest.approx([2.0**k for k in range(7)], rel=1e-5)
    if name == "deep_norm" and fixed_positions:  # LN(a x + f) = LN(x + f / a) with an epsilon of a^2 less
        alpha = 0.81 * (3**4 * 2) ** (1 / 16)
        assert plain.encoder.norms[0].epsilon == pytest.approx(0.03 / alpha**2)
        assert [norm.epsilon for norm in plain.encoder.norms[1:]] == pytest.approx([0.02] * 5)


# ---------------------------------------------------------------- what is refused

REFUSED = {
    "b2t": "layer 1 of the encoder computes x <- norm(x + (x ⊕ f(x)))",
    "residual": "layer 1 of the encoder carries more than one stream",
    "no_norm": "layer 1 of the encoder computes x <- x ⊕ f(x)",
    "hyper_connections": "the encoder's residual, HyperConnections, carries more than one stream",
    "dlcl": "the encoder's residual, DLCL, carries more than one stream",
    "dlcl_post": "the encoder's residual, DLCL, carries more than one stream",
    "no_residual": "of self-attention in layer 1 of the encoder, NoResidual, does not add to the stream",
    "qk_norm": "computes something else than softmax(q k^T / sqrt(d_head)) v: QKNorm",
    "realformer": "computes something else than softmax(q k^T / sqrt(d_head)) v: RealFormer",
    "soft_cap": "computes something else than softmax(q k^T / sqrt(d_head)) v: SoftCap",
    "cosine_attention": "computes something else than softmax(q k^T / sqrt(d_head)) v: CosineAttention",
    "value_residual": "computes something else than softmax(q k^T / sqrt(d_head)) v: ValueResidual",
    "sandwich": "layer 1 of the encoder computes x <- x ⊕ norm_out(f(norm(x)))",
    "peri_norm": "layer 1 of the encoder computes x <- x ⊕ norm_out(f(norm(x)))",
    "sub_norm": "self-attention in layer 1 of the encoder has norms or gains inside the branch: mixed",
    "norm_former": "norm_out1(f1(norm1(x)))",
    "hybrid_norm": "layer 1 of the encoder computes x <- norm(x) ⊕ f(norm(x))",
    "hybrid_norm_first": "layer 2 of the encoder computes x <- norm(x) ⊕ f(norm(x))",
    "mix_norm": "layer 2 of the encoder has its norms elsewhere than layer 1",
    "ada_norm": "AdaNorm, is neither LayerNorm nor RMSNorm",
    "adaptive_layer_norm": "AdaptiveLayerNorm, is neither LayerNorm nor RMSNorm",
    "dynamic_tanh": "DynamicTanh, is neither LayerNorm nor RMSNorm",
    "dynamic_erf": "DynamicErf, is neither LayerNorm nor RMSNorm",
    "batch_norm": "MaskedBatchNorm, is neither LayerNorm nor RMSNorm",
    "power_norm": "PowerNorm, is neither LayerNorm nor RMSNorm",
    "fix_norm": "ScaleNorm, is neither LayerNorm nor RMSNorm",
    "rezero": "layer 1 of the encoder computes x <- x ⊕ f(x)",
}
TAKEN = {
    *("pre_norm", "post_norm", "scaled_sum", "deep_norm", "rms_norm", "admin", "admin_closed_form", "layer_scale"),
    *("branch_norm", "stochastic_depth", "scaled_layer_norm", "sigma_reparam"),
}


@pytest.mark.parametrize("name", STABILIZERS)
def test_what_has_no_equal_is_refused_by_what_it_is_built_of(name: str) -> None:
    sizes = Sizes(2, 2, width=16, heads=2, hidden=32)
    model = model_of(*STABILIZERS[name], sizes)
    if name in TAKEN:
        read(model, sizes)
        return
    with pytest.raises(UserError) as raised:
        read(model, sizes)
    told = str(raised.value)
    assert told.startswith("no plain Transformer equals this model: ")
    assert told.endswith("; --to safetensors takes every model")
    assert REFUSED.get(name, "") in told


def test_scales_by_channel_stay_in_a_pre_norm_stream() -> None:
    model = model_of(Stabilizer(PreNorm(), AdminResidual()))
    with pytest.raises(UserError, match="a skip scales each channel by itself, which cannot be folded"):
        fold(read(model, SIZES), 1e-5)


class Doubled(PreNorm):
    """What it inherits says pre-norm; what it does does not."""

    def sublayer(self, stream: Any, step: Any) -> Any:
        return step.write(stream, step(step.norm(step.norm(step.read(stream)))))


class Shifted(LayerNorm):
    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return super().forward(x, real) + 0.01


class Sharper(PlainAttention):
    def forward(self, query: Tensor, *others: Any) -> tuple[Tensor, Tensor | None]:
        return super().forward(1.01 * query, *others)


class Squared(Sum):
    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return stream + branch * branch.abs()


class Halved(Sum):
    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return stream + 0.5 * branch


@pytest.mark.parametrize(
    ("stabilizer", "why"),
    [
        (Stabilizer(Doubled()), r"x <- x ⊕ f\(norm\(norm\(x\)\)\)"),
        (Stabilizer(norm=Shifted()), "Shifted, is neither LayerNorm nor RMSNorm"),
        (Stabilizer(attention=Sharper()), "Sharper"),
        (Stabilizer(residual=Squared()), r"Squared, computes something else than a x \+ b f"),
    ],
)
def test_a_strategy_of_ones_own_is_what_it_computes_not_what_it_inherits(stabilizer: Stabilizer, why: str) -> None:
    with pytest.raises(UserError, match=why):
        read(model_of(stabilizer), SIZES)


def test_a_strategy_of_ones_own_that_has_an_equal_is_taken() -> None:
    model = model_of(Stabilizer(residual=Halved()))
    source, target = pair()
    found = logits(fold(read(model, SIZES), 1e-5), source, target).float()
    torch.testing.assert_close(found, model.project(model(source, target)), rtol=0, atol=2e-5)
