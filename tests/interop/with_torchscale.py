"""DeepNorm and Sub-LN, against torchscale: the wiring of both stacks, and the gains of the initialisation.

torchscale draws from other distributions than the papers; the gains are what its depth-aware models are larger than its
plain ones by.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stabilize.model import EncoderDecoder, Layer, Sizes
from stabilize.strategies import (
    DeepNormInit,
    DeepNormResidual,
    Initialization,
    Norm,
    PostNorm,
    Stabilizer,
    SubNorm,
    SubNormInit,
)
from stabilize.strategies.initialization import Role
from tests.interop.weights import HEADS, HIDDEN, WIDTH, give, give_attention, ours, pass_over
from tests.models import PAD, assert_equal, sentences

pass_over("timm", "timm.models")  # they ask for torchvision

from torchscale.architecture.config import EncoderDecoderConfig  # noqa: E402
from torchscale.architecture.decoder import Decoder  # noqa: E402
from torchscale.architecture.encoder import Encoder  # noqa: E402


def theirs(encoder_layers: int, decoder_layers: int, **options: Any) -> dict[str, nn.Module]:
    """Both stacks, drawn from one seed."""
    sizes = {"embed_dim": WIDTH, "attention_heads": HEADS, "ffn_embed_dim": HIDDEN}
    config = EncoderDecoderConfig(
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        **{f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()},
        activation_fn="relu",
        **{"subln": False} | options,
    )
    torch.manual_seed(3)
    return {kind.__name__.lower(): kind(config, is_encoder_decoder=True).eval() for kind in (Encoder, Decoder)}


def give_norm(target: nn.Module, source: Norm) -> None:
    give(target, weight=source.gain, bias=source.bias)


def give_layer(target: nn.Module, source: Layer) -> None:
    *attentions, feed_forward = source.branches
    for name, branch in zip(("self_attn", "encoder_attn"), attentions, strict=False):
        attention = getattr(target, name)
        give_attention(branch.function, attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj)
        give_norm(getattr(target, f"{name}_layer_norm"), branch.slots["norm"])
        if "mixed" in branch.function.slots:
            give_norm(attention.inner_attn_ln, branch.function.slots["mixed"].norm)
    give(target.ffn.fc1, weight=feed_forward.function.input.weight, bias=feed_forward.function.input.bias)
    give(target.ffn.fc2, weight=feed_forward.function.output.weight, bias=feed_forward.function.output.bias)
    give_norm(target.final_layer_norm, feed_forward.slots["norm"])
    if "hidden" in feed_forward.function.slots:
        give_norm(target.ffn.ffn_layernorm, feed_forward.function.slots["hidden"])


def give_stacks(targets: dict[str, nn.Module], model: EncoderDecoder) -> None:
    for name, target in targets.items():
        stack = getattr(model, name)
        for theirs, source in zip(target.layers, stack.layers, strict=True):
            give_layer(theirs, source)
        if "norm" in stack.end.slots:
            give_norm(target.layer_norm, stack.end.slots["norm"])
        else:
            assert target.layer_norm is None


@pytest.mark.parametrize(
    ("stabilizer", "option"),
    [(Stabilizer(PostNorm(), DeepNormResidual()), "deepnorm"), (Stabilizer(SubNorm()), "subln")],
    ids=["deepnorm", "subln"],
)
def test_both_stacks(stabilizer: Stabilizer, option: str) -> None:
    model = ours(stabilizer)
    stacks = theirs(3, 2, **{option: True})
    give_stacks(stacks, model)
    source, target = sentences(3, 7), sentences(3, 5)
    source[1, 4:] = PAD
    memory, hidden = model.encode(source), model(source, target)

    padding = source == PAD
    embedded = model.source_embedding(source)
    encoded = stacks["encoder"](None, encoder_padding_mask=padding, token_embeddings=embedded)
    assert_equal(memory.states[~padding], encoded["encoder_out"][~padding], 1e-5)
    embedded = model.target_embedding(target)
    expected, _ = stacks["decoder"](target, encoder_out=encoded, token_embeddings=embedded, features_only=True)
    assert_equal(hidden, expected, 1e-5)


ROLES: dict[str, Role] = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "output",
    "fc1": "feed_forward_in",
    "fc2": "feed_forward_out",
}
BRANCHES = {"self_attn": "self_attention", "encoder_attn": "cross_attention", "ffn": "feed_forward"}
TOO_LARGE = 1.15**2
"""torchscale divides its encoder's DeepNorm weights by (N^4 M)^(1/16) / 1.15; the paper's beta is 0.87 = 1 / 1.15 times
the inverse, so it had to multiply by 1.15."""


@pytest.mark.parametrize(("encoder_layers", "decoder_layers"), [(6, 6), (18, 6), (3, 9)])
@pytest.mark.parametrize(
    ("initialization", "option", "too_large"),
    [(DeepNormInit(), "deepnorm", {"encoder": TOO_LARGE, "decoder": 1.0}), (SubNormInit(), "subln", {})],
    ids=["deepnorm", "subln"],
)
def test_gains_of_the_initialisation(
    initialization: Initialization, option: str, too_large: dict[str, float], encoder_layers: int, decoder_layers: int
) -> None:
    sizes = Sizes(encoder_layers, decoder_layers, WIDTH, HEADS, HIDDEN)
    plain, scaled = theirs(encoder_layers, decoder_layers), theirs(encoder_layers, decoder_layers, **{option: True})
    for stack in ("encoder", "decoder"):
        site = {branch: sizes.site(stack, 1, role) for branch, role in BRANCHES.items()}
        compared = set()
        for name, weight in scaled[stack].layers[0].named_parameters():
            branch, matrix, *rest = name.split(".")
            if rest != ["weight"] or matrix not in ROLES:
                continue
            gain = initialization.gain(site[branch], ROLES[matrix])
            if gain != 1:
                gain *= too_large.get(stack, 1.0)
            # Below a thousandth: 0.87 is the paper's rounding of 1 / 1.15.
            found = (weight / plain[stack].layers[0].get_parameter(name)).detach()
            torch.testing.assert_close(found, torch.full_like(found, gain), rtol=1e-3, atol=0)
            compared.add((branch, matrix))
        assert len(compared) == (6 if stack == "encoder" else 10)
