"""What becomes of the logits, against the published equations on the weights of the very modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize.model import Context, Layer
from stabilize.model.attention import Attention
from tests.models import assert_equal, disturb, model_of, query_key_value

WIDTH, HEADS = 12, 3
SOURCE_LENGTH, LENGTH = 4, 6


def split(x: Tensor) -> Tensor:
    """`[batch, length, width]` to `[batch, heads, length, head width]`."""
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def heads_of(attention: Attention, x: Tensor, source: Tensor) -> list[Tensor]:
    """Query, key and value of each head."""
    inputs = zip((x, source, source), query_key_value(attention), strict=True)
    return [split(F.linear(origin, *parameters)) for origin, parameters in inputs]


def attended(logits: Tensor, value: Tensor, mask: Tensor, attention: Attention) -> Tensor:
    """W_o softmax(logits) v + b_o, heads side by side."""
    mixed = logits.masked_fill(~mask, -torch.inf).softmax(-1) @ value
    return F.linear(mixed.transpose(1, 2).reshape(*mixed.shape[:1], -1, WIDTH), *attention.output.parameters())


def context(side: str) -> Context:
    """The second of two sentences ends early; the decoder looks back only."""
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, -2:] = False
    memory_mask = torch.tensor([[True] * 4, [True, True, False, False]])[:, None, None]
    mask = real[:, None, None] if side == "encoder" else torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return Context(real, mask, torch.randn(2, SOURCE_LENGTH, WIDTH), memory_mask)


def layers_of(name: str, side: str) -> list[Layer]:
    model = model_of(name, 3, 3, width=WIDTH, heads=HEADS, hidden=8)
    disturb(model, 0.3)
    return list(getattr(model, side).layers)


def layer_norm(x: Tensor, norm: nn.Module) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.gain, norm.bias, 1e-5)


@pytest.mark.parametrize("running_mean", [False, True])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_realformer_adds_the_logits_of_all_layers_below(side: str, running_mean: bool) -> None:
    """S_l = q k^T / sqrt(d_h) + S_(l-1), handed on unmasked and whole; softmax(S_l), or softmax(S_l / l)."""
    layers, seen = layers_of("realformer_mean" if running_mean else "realformer", side), context(side)
    stream, carry = torch.randn(2, LENGTH, WIDTH), {}
    x, sums = stream, [torch.zeros(())] * 2

    for number, layer in enumerate(layers, 1):
        stream, carry = layer(stream, carry, seen)
        for place, branch in enumerate(layer.branches):
            if isinstance(branch.function, Attention):
                source, mask = (seen.memory, seen.memory_mask) if place else (x, seen.mask)
                query, key, value = heads_of(branch.function, x, source)
                sums[place] = query @ key.mT / (WIDTH / HEADS) ** 0.5 + sums[place]
                scale = 1 / number if running_mean else 1
                f = attended(sums[place] * scale, value, mask, branch.function)
            else:
                f, _ = branch.function(x, seen, None)
            x = layer_norm(x + f, branch.slots["norm"])
        assert_equal(stream, x, 3e-6)


@pytest.mark.parametrize("over", ["head", "projection"])
@pytest.mark.parametrize("place", [("encoder", 0), ("decoder", 0), ("decoder", 1)])
def test_qk_norm_normalises_queries_and_keys(place: tuple[str, int], over: str) -> None:
    """Each head by itself, or all heads together before the split; then the usual scaled products."""
    side, branch = place
    layer, seen = layers_of("qk_norm" if over == "head" else "qk_norm_projection", side)[1], context(side)
    attention = layer.branches[branch].function
    x = torch.randn(2, LENGTH, WIDTH)
    source, mask = (seen.memory, seen.memory_mask) if branch else (x, seen.mask)
    query, key, value = heads_of(attention, x, source)
    norms = attention.stabilizer.query_norm, attention.stabilizer.key_norm

    if over == "head":
        query, key = (layer_norm(y, norm) for y, norm in zip((query, key), norms, strict=True))
    else:
        together = (y.transpose(1, 2).flatten(2) for y in (query, key))
        query, key = (split(layer_norm(y, norm)) for y, norm in zip(together, norms, strict=True))

    found, carried = attention(x, seen, None)
    assert carried is None
    assert_equal(found, attended(query @ key.mT / (WIDTH / HEADS) ** 0.5, value, mask, attention), 3e-6)


def test_keys_have_a_bias_only_where_the_logits_depend_on_it() -> None:
    """softmax(q (k + b)^T) = softmax(q k^T): the same number is added to every logit of a query; a norm undoes that."""
    plain, normed = (model_of(name).decoder.layers[0].branches for name in ("pre_norm", "qk_norm"))
    assert [len(branch.function.query_value_key.bias) for branch in (plain[0], normed[0])] == [2 * 16, 3 * 16]
    assert [len(branch.function.value_key.bias) for branch in (plain[1], normed[1])] == [16, 2 * 16]
