"""Placements against their published equations, with whole branches where norms stand inside.

Formulas from the papers: Sandwich arXiv:2105.13290, Peri arXiv:2502.02732, Sub-LN arXiv:2210.06423, NormFormer
arXiv:2110.09456, HybridNorm arXiv:2503.04598, Mix-LN arXiv:2412.13795.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize.errors import UserError
from stabilize.model import Context, Stack
from stabilize.model.layer import Branch
from stabilize.strategies import LayerNorm, Norm, RMSNorm, Stabilizer
from stabilize.strategies.norm import AcrossHeads
from stabilize.strategies.placement import (
    HybridNorm,
    MixNorm,
    NormFormer,
    PeriNorm,
    SandwichNorm,
    SubNorm,
)
from tests.models import assert_equal, disturb, model_of
from tests.strategies.wiring import (
    DECODER_LAYERS,
    ENCODER_LAYERS,
    HEADS,
    HIDDEN,
    LENGTH,
    WIDTH,
    Map,
    attended,
    branches,
    context,
    final_norm,
    heads_of,
    identity,
    joined,
    layer_norm,
    run,
    split,
    stack_of,
    with_known_branches,
)

Reference = Callable[[Tensor, Stack, Context], Tensor]

sides = pytest.mark.parametrize("side", ["encoder", "decoder"])


# ---------------------------------------------------------------- norms outside the branches


def embedding_norm(stack: Stack) -> Map:
    """The norm outside the layers that is not the last one."""
    outside = [part for module in (stack.end, stack.placement) for part in module.modules() if isinstance(part, Norm)]
    (first,) = {norm for norm in outside if norm is not stack.end.slots["norm"]}
    return layer_norm(first)


def sandwich(x: Tensor, stack: Stack) -> Tensor:
    """x <- x + norm_out(f(norm_in(x)))."""
    for f, norm, out, _ in branches(*stack.layers):
        x = x + out(f(norm(x)))
    return final_norm(stack)(x)


def peri(x: Tensor, stack: Stack) -> Tensor:
    """The same over a normed embedding."""
    return sandwich(embedding_norm(stack)(x), stack)


@sides
@pytest.mark.parametrize(
    ("placement", "reference"), [(SandwichNorm(), sandwich), (PeriNorm(), peri), (PeriNorm(embedding=False), sandwich)]
)
def test_norms_on_both_ends_of_a_branch(placement: object, reference: Callable[..., Tensor], side: str) -> None:
    stack = stack_of(Stabilizer(placement), side)
    disturb(stack, 0.3)
    x = torch.randn(2, 5, WIDTH)
    assert_equal(run(stack, x), reference(x, stack), 3e-6)


@sides
@pytest.mark.parametrize("depth", [1, 3, 4])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_mix_norm_changes_once_from_post_to_pre(share: float, depth: int, side: str) -> None:
    """The first floor(share L) layers post-norm, the others pre-norm; a norm at the end."""
    model = model_of(Stabilizer(MixNorm(share)), depth, depth, width=WIDTH, heads=HEADS)
    stack = with_known_branches(getattr(model, side))
    disturb(stack, 0.3)
    first = x = torch.randn(2, 5, WIDTH)
    for number, layer in enumerate(stack.layers, 1):
        for f, norm, *_ in branches(layer):
            x = norm(x + f(x)) if number <= int(share * depth) else x + f(norm(x))
    assert_equal(run(stack, first), final_norm(stack)(x), 3e-6)


def test_mix_norm_counts_the_layers_of_its_own_stack() -> None:
    """Four encoder layers give one of post-norm at a quarter, three decoder layers none."""
    model = model_of(Stabilizer(MixNorm()), 4, 3, width=WIDTH, heads=HEADS)
    for side, post in (("encoder", 1), ("decoder", 0)):
        stack = with_known_branches(getattr(model, side))
        first = x = torch.randn(2, 5, WIDTH)
        for number, layer in enumerate(stack.layers, 1):
            for f, norm, *_ in branches(layer):
                x = norm(x + f(x)) if number <= post else x + f(norm(x))
        assert_equal(run(stack, first), final_norm(stack)(x), 3e-6)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_outside_the_stack_is_refused(share: float) -> None:
    with pytest.raises(UserError, match=rf"placement\.post_share is {share}"):
        MixNorm(share)


# ---------------------------------------------------------------- norms inside the branches


def attention(branch: Branch, x: Tensor, seen: Context, *, inner: Map = identity, normed: bool = False) -> Tensor:
    """The branch's attention; `inner` on the mixed values before W_o; `normed`: a norm on each query, key and value."""
    function = branch.function
    source, mask = (seen.memory, seen.memory_mask) if branch.role == "cross_attention" else (x, seen.mask)
    query, key, value = heads_of(function, x, source)
    if normed:
        slots = (layer_norm(function.slots[name]) for name in ("query", "key", "value"))
        query, key, value = (norm(y) for norm, y in zip(slots, (query, key, value), strict=True))
    return attended(query @ key.mT / (WIDTH / HEADS) ** 0.5, value, mask, function, inner)


def feed_forward(branch: Branch, x: Tensor, inner: Map = identity) -> Tensor:
    """W_out inner(relu(W_in x))."""
    function = branch.function
    hidden = F.linear(x, function.input.weight, function.input.bias).relu()
    return F.linear(inner(hidden), function.output.weight, function.output.bias)


def each(stack: Stack) -> Sequence[tuple[int, Branch, Map]]:
    """Number of the layer, branch, and its input norm; the identity where it has none."""
    return [
        (number, branch, layer_norm(branch.slots["norm"]) if "norm" in branch.slots else identity)
        for number, layer in enumerate(stack.layers, 1)
        for branch in layer.branches
    ]


def sub(x: Tensor, stack: Stack, seen: Context) -> Tensor:
    """x + W_o norm(heads side by side), x + W_out norm(relu(W_in norm(x))); cross-attention has only the input norm."""
    for _, branch, norm in each(stack):
        slots = branch.function.slots
        if branch.role == "self_attention":
            across = layer_norm(slots["mixed"])
            x = x + attention(branch, norm(x), seen, inner=lambda y, across=across: split(across(joined(y))))
        elif branch.role == "cross_attention":
            x = x + attention(branch, norm(x), seen)
        else:
            x = x + feed_forward(branch, norm(x), layer_norm(slots["hidden"]))
    return final_norm(stack)(x)


def norm_former(x: Tensor, stack: Stack, seen: Context) -> Tensor:
    """x + norm(W_o [g_1 h_1 .. g_n h_n]), x + W_out norm(relu(W_in norm(x))); cross-attention: pre-norm alone."""
    for _, branch, norm in each(stack):
        slots = branch.function.slots
        if branch.role == "self_attention":
            (gains,) = slots["mixed"].parameters()
            heads = attention(branch, norm(x), seen, inner=lambda y, g=gains: y * g.view(HEADS, 1, 1))
            x = x + layer_norm(branch.slots["out"])(heads)
        elif branch.role == "cross_attention":
            x = x + attention(branch, norm(x), seen)
        else:
            x = x + feed_forward(branch, norm(x), layer_norm(slots["hidden"]))
    return final_norm(stack)(x)


def hybrid(x: Tensor, stack: Stack, seen: Context, special: int = 0) -> Tensor:
    """y = x + attention with normed q, k, v; n = norm(y), out = n + ffn(n). The first `special` layers:
    y = x + attention(norm(x)), q, k, v normed too, and out = y + ffn(norm(y))."""
    for number, branch, norm in each(stack):
        if branch.role != "feed_forward":
            x = x + attention(branch, norm(x) if number <= special else x, seen, normed=True)
        else:
            n = norm(x)
            x = (x if number <= special else n) + feed_forward(branch, n)
    return final_norm(stack)(x)


def hybrid_with_a_first_layer(x: Tensor, stack: Stack, seen: Context) -> Tensor:
    return hybrid(x, stack, seen, special=1)


@sides
@pytest.mark.parametrize(
    ("placement", "reference"),
    [
        (SubNorm(), sub),
        (NormFormer(), norm_former),
        (HybridNorm(), hybrid),
        (HybridNorm(first_layer_pre_norm=True), hybrid_with_a_first_layer),
    ],
    ids=["sub", "norm_former", "hybrid", "hybrid_with_a_first_layer"],
)
def test_norms_within_a_branch(placement: object, reference: Reference, side: str) -> None:
    model = model_of(Stabilizer(placement), ENCODER_LAYERS, DECODER_LAYERS, width=WIDTH, heads=HEADS, hidden=HIDDEN)
    stack, seen = getattr(model, side), context(side)
    disturb(stack, 0.3)
    x = torch.randn(2, LENGTH, WIDTH)
    assert_equal(stack(x, seen)[seen.real], reference(x, stack, seen)[seen.real], 1e-5)


@sides
def test_norm_former_starts_with_heads_of_equal_weight(side: str) -> None:
    for layer in getattr(model_of(Stabilizer(NormFormer())), side).layers:
        (gains,) = layer.branches[0].function.slots["mixed"].parameters()
        assert gains.eq(1).all()
        assert gains.numel() == 2  # one a head


@pytest.mark.parametrize(("side", "layers"), [("encoder", ENCODER_LAYERS), ("decoder", DECODER_LAYERS)])
@pytest.mark.parametrize(
    ("placement", "encoder", "decoder"),
    [
        (SandwichNorm(), (4, 1), (6, 1)),
        (PeriNorm(), (4, 2), (6, 2)),
        (SubNorm(), (4, 1), (5, 1)),
        (NormFormer(), (4, 1), (5, 1)),
        (HybridNorm(), (4, 1), (7, 1)),
        (MixNorm(0.5), (2, 1), (3, 1)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_no_norm_that_no_equation_uses(
    placement: object, encoder: tuple[int, int], decoder: tuple[int, int], side: str, layers: int
) -> None:
    """Norms of a layer, and outside the layers."""
    stack = getattr(model_of(Stabilizer(placement), ENCODER_LAYERS, DECODER_LAYERS), side)
    inside, outside = encoder if side == "encoder" else decoder
    assert sum(isinstance(part, LayerNorm) for part in stack.modules()) == layers * inside + outside


@pytest.mark.parametrize("chosen", [LayerNorm(), RMSNorm()], ids=["layer_norm", "rms_norm"])
def test_a_norm_across_heads_is_one_of_the_whole_width(chosen: Norm) -> None:
    placed = model_of(Stabilizer(norm=chosen), width=WIDTH, heads=HEADS).encoder.end.slots["norm"]
    disturb(placed, 0.3)
    x = torch.randn(2, HEADS, LENGTH, WIDTH // HEADS)
    assert_equal(AcrossHeads(placed)(x), split(placed(joined(x))))


def test_a_norm_across_heads_hands_the_mask_on() -> None:
    class Remembers(nn.Module):
        def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
            self.seen = real
            return x

    real, norm = torch.ones(2, LENGTH, dtype=torch.bool), Remembers()
    AcrossHeads(norm)(torch.randn(2, HEADS, LENGTH, WIDTH // HEADS), real)
    assert norm.seen is real
