"""Patterns, and what counts as a layer's output."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stabilize.callbacks.layers import find_layers, observe, stream_of
from stabilize.errors import UserError
from tests.callbacks.tiny import Block, TinyTask


def test_a_star_is_one_part_of_a_name():
    task = TinyTask(encoder_layers=12)
    stacks = find_layers(task, {"encoder": "model.encoder.layers.*", "inside": "model.*.layers.*.linear"})
    assert stacks["encoder"] == list(task.model.encoder.layers)
    assert stacks["inside"] == [
        layer.linear for stack in (task.model.encoder, task.model.decoder) for layer in stack.layers
    ]


def test_dots_of_a_pattern_are_dots():
    with pytest.raises(UserError, match="its lists of modules are none"):
        find_layers(nn.ModuleDict({"layers0": nn.Identity()}), {"encoder": "layers.*"})


def test_the_stream_is_the_output_or_all_in_its_first_item():
    a, b, logits = torch.randn(3, 2, 4, 8)
    assert stream_of(a) == [a]
    assert stream_of((a, {"self_attention": logits})) == [a]
    assert stream_of(((a, b), {"self_attention": logits})) == [a, b]


def test_states_and_mask_come_from_the_layer_if_it_tells():
    states, real = torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    assert observe(Block(), (states, real), {}, states) == (states, real)
    assert observe(nn.Identity(), (states, real), {}, (states, None)) == (states, None)
