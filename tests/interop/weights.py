"""Models of ours whose weights are given to other packages' modules, and how."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stabilize.model import EncoderDecoder, Sizes
from stabilize.model.attention import Attention
from stabilize.strategies import Stabilizer
from tests.models import VOCABULARY, disturb, query_key_value

WIDTH, HEADS, HIDDEN = 16, 4, 32


def ours(stabilizer: Stabilizer, encoder_layers: int = 3, decoder_layers: int = 2, **shape: str) -> EncoderDecoder:
    """A model in evaluation, none of its parameters where it starts."""
    sizes = Sizes(encoder_layers, decoder_layers, WIDTH, HEADS, HIDDEN, **shape)
    model = EncoderDecoder(VOCABULARY, sizes, stabilizer).eval()
    disturb(model, 0.1)
    return model


@torch.no_grad()
def without(biases: Iterable[nn.Parameter]) -> None:
    """Take these biases out, for a package that has none there."""
    for bias in biases:
        bias.zero_()


@torch.no_grad()
def give(target: nn.Module, **values: Tensor) -> None:
    """Fill all of a module's own parameters, by name; what it lacks has to be zero."""
    own = dict(target.named_parameters(recurse=False))
    for name, value in values.items():
        if name in own:
            parameter = own.pop(name)
            parameter.copy_(value if value.numel() > 1 else value.reshape(parameter.shape))  # a number has no shape
        else:
            assert not value.any(), f"{type(target).__name__} has no {name}"
    assert not own


def give_attention(source: Attention, query: nn.Module, key: nn.Module, value: nn.Module, output: nn.Module) -> None:
    """Fill the four projections of another package's attention."""
    for target, (weight, bias) in zip((query, key, value), query_key_value(source), strict=True):
        give(target, weight=weight, bias=bias)
    give(output, weight=source.output.weight, bias=source.output.bias)


def pass_over(*packages: str) -> None:
    """Let modules of these packages be imported without the packages' own `__init__`, which asks for more of them."""
    for name in packages:
        spec = importlib.util.find_spec(name)
        sys.modules[name] = importlib.util.module_from_spec(spec)
