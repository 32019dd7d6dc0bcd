"""Stacks whose branches anyone can repeat, and the formulas that several references share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize.model import Context, Layer, Stack
from stabilize.model.attention import Attention
from stabilize.strategies import LayerNorm, Stabilizer
from tests.models import model_of, query_key_value

ENCODER_LAYERS, DECODER_LAYERS = 3, 4
WIDTH, HEADS, HIDDEN = 12, 3, 8
SOURCE_LENGTH, LENGTH = 4, 6

Map = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x


class Known(nn.Module):
    """A branch that anyone can repeat: tanh(W x + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, context: Context, carried: None) -> tuple[Tensor, None]:
        return self.linear(x).tanh(), None


class Written(NamedTuple):
    """A branch as an equation has it."""

    f: Map
    norm: Map
    out: Map
    weights: nn.Module


def layer_norm(module: nn.Module) -> Map:
    """The LayerNorm that is, or is in, a module."""
    (norm,) = (part for part in module.modules() if isinstance(part, LayerNorm))
    return lambda x: F.layer_norm(x, x.shape[-1:], norm.gain, norm.bias, 1e-5)


def branches(*layers: Layer) -> Iterator[Written]:
    for layer in layers:
        for branch in layer.branches:
            norm, out = (
                layer_norm(branch.slots[name]) if name in branch.slots else identity for name in ("norm", "out")
            )
            yield Written(lambda x, f=branch.function: f.linear(x).tanh(), norm, out, branch.residual)


def final_norm(stack: Stack) -> Map:
    return layer_norm(stack.end.slots["norm"])


def with_known_branches(stack: Stack) -> Stack:
    for layer in stack.layers:
        for branch in layer.branches:
            branch.function = Known()
    return stack


def stack_of(name: str | Stabilizer, side: str) -> Stack:
    """A stack whose branches are known functions."""
    return with_known_branches(getattr(model_of(name, ENCODER_LAYERS, DECODER_LAYERS, width=WIDTH, heads=HEADS), side))


def run(stack: Stack, x: Tensor) -> Tensor:
    real = torch.ones(x.shape[:2], dtype=torch.bool)
    return stack(x, Context(real, real[:, None, None]))


# ---------------------------------------------------------------- attention


def split(x: Tensor) -> Tensor:
    """`[batch, length, width]` to `[batch, heads, length, head width]`."""
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """`[batch, heads, length, head width]` to `[batch, length, width]`, heads side by side."""
    return x.transpose(1, 2).flatten(2)


def heads_of(attention: Attention, x: Tensor, source: Tensor) -> list[Tensor]:
    """Query, key and value of each head."""
    inputs = zip((x, source, source), query_key_value(attention), strict=True)
    return [split(F.linear(origin, *parameters)) for origin, parameters in inputs]


def attended(logits: Tensor, value: Tensor, mask: Tensor, attention: Attention, inner: Map = identity) -> Tensor:
    """W_o inner(softmax(logits) v) + b_o, heads side by side."""
    mixed = inner(logits.masked_fill(~mask, -torch.inf).softmax(-1) @ value)
    return F.linear(joined(mixed), *attention.output.parameters())


def context(side: str) -> Context:
    """The second of two sentences ends early; the decoder looks back only."""
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, -2:] = False
    memory_mask = torch.tensor([[True] * 4, [True, True, False, False]])[:, None, None]
    mask = real[:, None, None] if side == "encoder" else torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return Context(real, mask, torch.randn(2, SOURCE_LENGTH, WIDTH), memory_mask)
