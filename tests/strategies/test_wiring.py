"""Placements and residuals against their published equations, written down once more over branches of one line.

The references follow the papers, not the classes: plain loops over all branches of a stack.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stabilize.model import Stack
from tests.models import STARTS, assert_equal, disturb
from tests.strategies.wiring import (
    DECODER_LAYERS,
    ENCODER_LAYERS,
    WIDTH,
    branches,
    final_norm,
    layer_norm,
    run,
    stack_of,
)


def pre_norm(x: Tensor, stack: Stack) -> Tensor:
    for f, norm, *_ in branches(*stack.layers):
        x = x + f(norm(x))
    return final_norm(stack)(x)


def post_norm(x: Tensor, stack: Stack) -> Tensor:
    for f, norm, *_ in branches(*stack.layers):
        x = norm(x + f(x))
    return x


def b2t(x: Tensor, stack: Stack) -> Tensor:
    for layer in stack.layers:
        bottom, (*inner, last) = x, branches(layer)
        for f, norm, *_ in inner:
            x = norm(x + f(x))
        x = last.norm(bottom + x + last.f(x))
    return x


def residual(x: Tensor, stack: Stack) -> Tensor:
    summed = x
    for f, norm, *_ in branches(*stack.layers):
        h = f(x)
        summed, x = summed + h, norm(x + h)
    return x + final_norm(stack)(summed)


def no_norm(x: Tensor, stack: Stack) -> Tensor:
    for f, *_ in branches(*stack.layers):
        x = x + f(x)
    return x


def fixup(x: Tensor, stack: Stack) -> Tensor:
    for f, *_, weights in branches(*stack.layers):
        x = x + weights.alpha * f(x)
    return x


def scaled_sum(x: Tensor, stack: Stack) -> Tensor:
    for f, norm, *_ in branches(*stack.layers):
        x = (x + f(norm(x))) * 0.5**0.5
    return final_norm(stack)(x)


def deep_norm(x: Tensor, stack: Stack) -> Tensor:
    n, m = ENCODER_LAYERS, DECODER_LAYERS
    alpha = 0.81 * (n**4 * m) ** (1 / 16) if len(stack.layers) == n else (3 * m) ** (1 / 4)
    for f, norm, *_ in branches(*stack.layers):
        x = norm(alpha * x + f(x))
    return x


def no_residual(x: Tensor, stack: Stack) -> Tensor:
    for f, norm, *_ in branches(*stack.layers):
        x = f(norm(x))
    return final_norm(stack)(x)


def hyper_connections(x: Tensor, stack: Stack) -> Tensor:
    """h = A_m^T H; H' = A_r^T H + B^T f(norm(h)), H `[batch, length, streams, width]`."""
    streams = torch.stack([x] * 4, dim=2)
    for f, norm, _, weights in branches(*stack.layers):
        a_m, a_r, b = weights.read_weight[:, None], weights.mix_weight, weights.write_weight[None]
        streams = a_r.mT @ streams + b.mT @ f(norm(a_m.mT @ streams))
    return final_norm(stack)(streams.sum(2))


def dynamic_hyper_connections(x: Tensor, stack: Stack) -> Tensor:
    """The same with A_m + s_a tanh(H W_m), A_r + s_a tanh(H W_r), B + s_b tanh(H W_b), H normed, for each token."""
    streams = torch.stack([x] * 4, dim=2)
    for f, norm, _, weights in branches(*stack.layers):
        normed = F.layer_norm(streams, [WIDTH])
        s_a, s_b = weights.mix_scale, weights.write_scale
        a_m = weights.read_weight[:, None] + s_a * torch.tanh(normed @ weights.read_by_token[:, None])
        a_r = weights.mix_weight + s_a * torch.tanh(normed @ weights.mix_by_token)
        b = (weights.write_weight[:, None] + s_b * torch.tanh(normed @ weights.write_by_token[:, None])).mT
        streams = a_r.mT @ streams + b.mT @ f(norm(a_m.mT @ streams))
    return final_norm(stack)(streams.sum(2))


def weighted(states: list[Tensor], weights: Tensor) -> Tensor:
    return sum(weight * state for weight, state in zip(weights, states, strict=True))


def dlcl(x: Tensor, stack: Stack) -> Tensor:
    """Layer l + 1 reads sum_k W_k LN_k(y_k), k = 0..l; the embedding y_0 has no norm."""
    normed = [x]
    for layer in stack.layers:
        x = weighted(normed, layer.link.weight)
        for f, norm, *_ in branches(layer):
            x = x + f(norm(x))
        normed.append(layer_norm(layer.link.norm)(x))
    return final_norm(stack)(weighted(normed, stack.end.residual.weight))


def dlcl_post(x: Tensor, stack: Stack) -> Tensor:
    """Layer l + 1 reads LN(sum_k W_k y_k), k = 0..l; the embedding alone, l = 0, has no norm."""
    outputs = [x]
    for layer in stack.layers:
        x = weighted(outputs, layer.link.weight)
        x = x if len(outputs) == 1 else layer_norm(layer.link.norm)(x)
        for f, norm, *_ in branches(layer):
            x = norm(x + f(x))
        outputs.append(x)
    return layer_norm(stack.end.residual.norm)(weighted(outputs, stack.end.residual.weight))


REFERENCES: dict[str, Callable[[Tensor, Stack], Tensor]] = {
    reference.__name__: reference
    for reference in (
        pre_norm,
        post_norm,
        b2t,
        residual,
        no_norm,
        scaled_sum,
        deep_norm,
        no_residual,
        hyper_connections,
        dynamic_hyper_connections,
        dlcl,
        dlcl_post,
    )
} | {
    "t_fixup": no_norm,
    "fixup": fixup,
    "gpt2": pre_norm,
    "ds_init": post_norm,
    "small_init": post_norm,
    "b2t_released": b2t,
    "layer_epsilon": post_norm,
    "precision_epsilon": pre_norm,
}
"""By the name of the stabiliser; an initialisation, a warm-up or an epsilon leaves the equation as it is."""


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("name", REFERENCES)
def test_a_stack_follows_its_equation(name: str, side: str) -> None:
    stack = stack_of(name, side)
    disturb(stack, 0.3)
    x = torch.randn(2, 5, WIDTH)
    expected = REFERENCES[name](x, stack)
    assert_equal(run(stack, x), expected, 1e-4 if name.endswith("epsilon") else 3e-6)

    with torch.autocast("cpu", torch.bfloat16):
        half = run(stack, x)
    assert (half - expected).norm() < 0.03 * expected.norm()


def test_every_start_has_an_equation() -> None:
    assert REFERENCES.keys() >= STARTS.keys()


@pytest.mark.parametrize("name", ["hyper_connections", "dynamic_hyper_connections"])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_hyper_connections_start_as_pre_norm(name: str, side: str) -> None:
    stack = stack_of(name, side)
    x = torch.randn(2, 5, WIDTH)
    assert_equal(run(stack, x), pre_norm(x, stack), 1e-5)  # the last norm sees four times the stream, epsilon once


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_each_branch_first_reads_a_stream_of_its_own(side: str) -> None:
    weights = [residual.read_weight for *_, residual in branches(*stack_of("hyper_connections", side).layers)]
    assert [weight.argmax().item() for weight in weights] == [place % 4 for place in range(len(weights))]


@pytest.mark.parametrize("name", ["dlcl", "dlcl_post"])
def test_dlcl_starts_with_averages(name: str) -> None:
    stack = stack_of(name, "encoder")
    rows = [*(layer.link.weight for layer in stack.layers), stack.end.residual.weight]
    for number, row in enumerate(rows, 1):
        assert_equal(row, torch.full((number,), 1 / number))
