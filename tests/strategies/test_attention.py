"""What becomes of the logits, against the published equations on the weights of the very modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize.model import Context, EncoderDecoder, Layer, Sizes
from stabilize.model.attention import Attention
from stabilize.model.projection import Projection
from stabilize.strategies import AttentionStabilizer, Part, Stabilizer
from stabilize.strategies.attention import (
    CosineAttention,
    PlainAttention,
    QKNorm,
    RealFormer,
    SigmaReparam,
    SoftCap,
    ValueResidual,
)
from tests.models import assert_equal, disturb, model_of
from tests.strategies.wiring import HEADS, HIDDEN, LENGTH, WIDTH, attended, context, heads_of, joined, layer_norm, split

SITE = Sizes(3, 3, WIDTH, HEADS, HIDDEN).site("encoder", 2, "self_attention")


def layers_of(name: str | Stabilizer, side: str) -> list[Layer]:
    model = model_of(name, 3, 3, width=WIDTH, heads=HEADS, hidden=HIDDEN)
    disturb(model, 0.3)
    return list(getattr(model, side).layers)


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
            x = layer_norm(branch.slots["norm"])(x + f)
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
        query, key = (layer_norm(norm)(y) for y, norm in zip((query, key), norms, strict=True))
    else:
        query, key = (split(layer_norm(norm)(joined(y))) for y, norm in zip((query, key), norms, strict=True))

    found, carried = attention(x, seen, None)
    assert carried is None
    assert_equal(found, attended(query @ key.mT / (WIDTH / HEADS) ** 0.5, value, mask, attention), 3e-6)


def test_keys_have_a_bias_only_where_the_logits_depend_on_it() -> None:
    """softmax(q (k + b)^T) = softmax(q k^T): the same number is added to every logit of a query; a norm undoes that."""
    plain, normed = (model_of(name).decoder.layers[0].branches for name in ("pre_norm", "qk_norm"))
    assert [len(branch.function.query_value_key.bias) for branch in (plain[0], normed[0])] == [2 * 16, 3 * 16]
    assert [len(branch.function.value_key.bias) for branch in (plain[1], normed[1])] == [16, 2 * 16]


PLACES = pytest.mark.parametrize("place", [("encoder", 0), ("decoder", 0), ("decoder", 1)], ids=str)


def at_place(chosen: AttentionStabilizer, place: tuple[str, int]) -> tuple[Attention, Context, list[Tensor], Tensor]:
    """The second layer's attention, what it sees, its queries, keys and values, and its mask; and x last."""
    side, branch = place
    attention, seen = layers_of(Stabilizer(attention=chosen), side)[1].branches[branch].function, context(side)
    x = 3 * torch.randn(2, LENGTH, WIDTH)
    source = seen.memory if branch else x
    return attention, seen, heads_of(attention, x, source), x


@PLACES
@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_soft_cap_bends_the_logits_before_the_mask(place: tuple[str, int], cap: float) -> None:
    """softmax(c tanh(s / c)), s = q k^T / sqrt(d_h) (Gemma 2)."""
    attention, seen, (query, key, value), x = at_place(SoftCap(cap), place)
    logits = query @ key.mT / (WIDTH / HEADS) ** 0.5
    assert logits.abs().max() > 1
    mask = seen.memory_mask if place[1] else seen.mask
    expected = attended(cap * torch.tanh(logits / cap), value, mask, attention)
    found, carried = attention(x, seen, None)
    assert carried is None
    assert_equal(found, expected, 3e-6)


@PLACES
@pytest.mark.parametrize("scale", [10.0, 3.0])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("length", [None, 1.0, 2.5], ids=["released", "paper", "paper_longer"])
def test_cosine_attention_knows_only_directions(
    place: tuple[str, int], scale: float, learned: bool, length: float | None
) -> None:
    """softmax(tau cos(q, k)) nu v / |v|: no 1 / sqrt(d_h) beside it; v itself in the released code (LipsFormer,
    arXiv:2304.09856)."""
    chosen = CosineAttention(scale, learned, "released") if length is None else CosineAttention(scale, learned)
    chosen.value_scale = length or 7.0  # which the released code does not have
    attention, seen, (query, key, value), x = at_place(chosen, place)
    attention.stabilizer = chosen.at(SITE, norm=nn.Identity)  # with its scale undisturbed
    if length is not None:
        value = length * value / value.square().sum(-1, keepdim=True).sqrt()
    assert len(list(attention.stabilizer.parameters())) == learned
    cosine = F.cosine_similarity(query[:, :, :, None], key[:, :, None], dim=-1)
    mask = seen.memory_mask if place[1] else seen.mask
    found, carried = attention(x, seen, None)
    assert carried is None
    assert_equal(found, attended(scale * cosine, value, mask, attention), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cosine_attention_of_zeros_is_finite(dtype: torch.dtype) -> None:
    placed = CosineAttention(learned=True).at(SITE, norm=nn.Identity).to(dtype)
    query, key, value = (torch.zeros(1, HEADS, LENGTH, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    mixed, _ = placed(query, key, value, torch.ones(LENGTH, LENGTH, dtype=torch.bool), 0.0, None)
    (mixed * torch.randn_like(mixed)).sum().backward()
    assert mixed.isfinite().all()
    assert mixed.dtype == dtype
    assert all(given.grad.isfinite().all() for given in (query, value))


@pytest.mark.parametrize("chosen", [SoftCap(), CosineAttention()], ids=lambda chosen: type(chosen).__name__)
def test_where_a_shift_of_the_logits_matters_keys_have_a_bias(chosen: AttentionStabilizer) -> None:
    """cos and c tanh(s / c) do not cancel a number added to all logits of a query."""
    own, cross, _ = model_of(Stabilizer(attention=chosen)).decoder.layers[0].branches
    assert [len(own.function.query_value_key.bias), len(cross.function.value_key.bias)] == [3 * 16, 2 * 16]


@pytest.mark.parametrize("share", [0.5, 0.2])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_value_residual_mixes_in_the_first_layers_values(side: str, share: float) -> None:
    """V_l <- (1 - share) V_l + share V_1 for l > 1; layer 1 and all keys as they are (arXiv:2410.17897)."""
    layers, seen = layers_of(Stabilizer(attention=ValueResidual(share)), side), context(side)
    stream, carry = torch.randn(2, LENGTH, WIDTH), {}
    x, first = stream, {}

    for layer in layers:
        stream, carry = layer(stream, carry, seen)
        for place, branch in enumerate(layer.branches):
            n = layer_norm(branch.slots["norm"])(x)
            if isinstance(branch.function, Attention):
                source, mask = (seen.memory, seen.memory_mask) if place else (n, seen.mask)
                query, key, value = heads_of(branch.function, n, source)
                if place in first:
                    value = (1 - share) * value + share * first[place]
                first.setdefault(place, value)
                f = attended(query @ key.mT / (WIDTH / HEADS) ** 0.5, value, mask, branch.function)
            else:
                f, _ = branch.function(n, seen, None)
            x = x + f
        assert_equal(stream[seen.real], x[seen.real], 1e-5)


# ---------------------------------------------------------------- sigma-Reparam


def reparametrised(start: str) -> EncoderDecoder:
    return model_of(
        Stabilizer(attention=SigmaReparam(start)), 1, 2, width=WIDTH, heads=HEADS, hidden=HIDDEN, tied=False
    )


def matrices(model: EncoderDecoder) -> list[tuple[Tensor, nn.Module]]:
    """Each matrix with the module that maps it to the one computed with."""
    return [
        pair
        for part in model.modules()
        if isinstance(part, Projection)
        for pair in zip(part.weight.chunk(len(part.roles)), part.forms, strict=True)
    ]


def largest(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix.double(), 2).float()


@pytest.mark.parametrize("start", ["one", "spectral"])
def test_sigma_reparam_reads_every_linear_layer_over_its_largest_singular_value(start: str) -> None:
    """W_hat = gamma W / sigma(W); gamma 1, or sigma(W) so that the model starts as it was drawn (arXiv:2303.06296)."""
    model = reparametrised(start)
    # Four matrices of self-attention and two of the feed-forward; the decoder has four more of cross-attention.
    assert len(matrices(model)) == 6 + 2 * 10 + 1
    assert len(model.source_embedding.form) == len(model.target_embedding.form) == 0
    for weight, form in matrices(model):
        (gamma,) = form.parameters()
        assert gamma.numel() == 1
        assert gamma.item() == pytest.approx(1.0 if start == "one" else largest(weight).item(), rel=1e-4)
        assert_equal(form(weight), gamma * weight / largest(weight), 1e-5)
        gamma.data.fill_(1.3)
        assert_equal(form(weight), 1.3 * weight / largest(weight), 1e-5)


def test_sigma_reparam_follows_the_weights() -> None:
    """One step of the power iteration an update; the estimate comes to the largest singular value."""
    model = reparametrised("one").train()
    disturb(model, 0.2)
    for update in range(1, 200):
        for weight, form in matrices(model):
            form(weight)  # as a forward pass reads it
        for part in model.modules():
            if isinstance(part, Part):
                part.after_update(update)
    for weight, form in matrices(model):
        (gamma,) = form.parameters()
        assert_equal(largest(form(weight)), gamma.abs().squeeze(), 2e-3)


def test_sigma_reparams_gradient_is_that_of_the_equation() -> None:
    """The vectors u and v are constants to the gradient, and sigma = u^T W v: the derivative of the true sigma."""
    for weight, form in matrices(reparametrised("spectral"))[:4]:
        leaf, direction = weight.detach().clone().requires_grad_(), torch.randn_like(weight)
        (gamma,) = (parameter.detach() for parameter in form.parameters())
        (found,) = torch.autograd.grad((form(leaf) * direction).sum(), leaf)
        expected = gamma * leaf / torch.linalg.matrix_norm(leaf, 2)
        (expected,) = torch.autograd.grad((expected * direction).sum(), leaf)
        assert_equal(found, expected, 1e-4)


def test_sigma_reparam_moves_only_after_an_update() -> None:
    model = reparametrised("one").train()
    disturb(model, 0.2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    source, target = torch.randint(4, 20, (2, 5)), torch.randint(4, 20, (2, 6))
    assert model(source, target).equal(model(source, target))
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


KINDS = [
    PlainAttention(),
    QKNorm("head"),
    QKNorm("projection"),
    RealFormer(),
    RealFormer(running_mean=True),
    SoftCap(5.0),
    CosineAttention(),
    ValueResidual(),
    SigmaReparam(),
]


@PLACES
@pytest.mark.parametrize("chosen", KINDS, ids=lambda chosen: type(chosen).__name__)
def test_the_logits_that_diagnostics_see_are_those_of_the_softmax(
    place: tuple[str, int], chosen: AttentionStabilizer
) -> None:
    """With the unit matrix for values, the mixture is the weights themselves."""
    attention, seen, _, x = at_place(chosen, place)
    query, key, _ = attention._query_key_value(x, seen)
    rows = key.size(2)
    identity = torch.eye(rows).expand(*key.shape[:2], rows, rows)
    carried = torch.randn(*query.shape[:3], rows) if isinstance(chosen, RealFormer) else None
    mask = seen.memory_mask if place[1] else seen.mask
    weights, _ = attention.stabilizer(query, key, identity, mask, 0.0, carried)
    logits, looked_at = attention.observe_logits((x, seen, carried))
    expected = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    real = seen.real[:, None, :, None].expand_as(expected)
    assert_equal(weights[real], expected[real], 1e-5)
    assert looked_at.expand_as(logits)[~real].logical_not().all()
