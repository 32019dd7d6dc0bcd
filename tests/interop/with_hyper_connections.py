"""Hyper-connections, against the package of that name."""

from __future__ import annotations

import pytest
import torch
from hyper_connections import HyperConnections as Theirs
from torch import Tensor, nn

from stabilize.model import Sizes
from stabilize.strategies import HyperConnections
from tests.interop.weights import HEADS, HIDDEN, WIDTH
from tests.models import assert_equal, disturb

BATCH, LENGTH = 2, 3
streams = pytest.mark.parametrize("streams", [2, 4])


def pair(streams: int, layer: int, role: str, dynamic: bool) -> tuple[HyperConnections, Theirs, nn.Module]:
    """Ours and theirs at a branch of the encoder, with the branch's function."""
    site = Sizes(3, 3, WIDTH, HEADS, HIDDEN).site("encoder", layer, role)
    mine = HyperConnections(streams, dynamic).at(site, norm=None)
    function = nn.Linear(WIDTH, WIDTH)
    return mine, Theirs(streams, dim=WIDTH, layer_index=site.position - 1, branch=function), function


def give_weights(target: Theirs, source: HyperConnections) -> None:
    with torch.no_grad():
        target.static_alpha.copy_(torch.cat([source.read_weight[:, None], source.mix_weight], dim=1))
        target.static_beta.copy_(source.write_weight)
        if source.dynamic:
            target.dynamic_alpha_fn.copy_(torch.cat([source.read_by_token[:, None], source.mix_by_token], dim=1))
            target.dynamic_beta_fn.copy_(source.write_by_token)
            target.dynamic_alpha_scale.copy_(source.mix_scale[0])
            target.dynamic_beta_scale.copy_(source.write_scale[0])


def as_theirs(stream: Tensor) -> Tensor:
    """The streams in their layout: beside each other in the batch, a sentence's together."""
    return stream.transpose(0, 1).flatten(0, 1)


@streams
@pytest.mark.parametrize("start", [True, False], ids=["at_the_start", "later"])
def test_a_stack_of_branches(streams: int, start: bool) -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    stream, expected = HyperConnections(streams).start(x), x.repeat_interleave(streams, 0)
    for layer in (1, 2, 3):
        for role in ("self_attention", "feed_forward"):
            mine, theirs, function = pair(streams, layer, role, dynamic=False)
            if not start:
                disturb(mine, 0.3)
                give_weights(theirs, mine)
            stream, expected = mine.write(stream, function(mine.read(stream))), theirs(expected)
            assert_equal(as_theirs(stream), expected, 1e-5)
    assert_equal(mine.end(stream), expected.unflatten(0, (BATCH, streams)).sum(1), 1e-5)


@streams
def test_weights_that_depend_on_the_token(streams: int) -> None:
    """Their norm is RMSNorm, the paper's and ours LayerNorm: the same for streams without a mean."""
    mine, theirs, function = pair(streams, 2, "feed_forward", dynamic=True)
    disturb(mine, 0.3)
    give_weights(theirs, mine)
    stream = torch.randn(streams, BATCH, LENGTH, WIDTH)
    stream = stream - stream.mean(-1, keepdim=True)
    assert_equal(as_theirs(mine.write(stream, function(mine.read(stream)))), theirs(as_theirs(stream)), 1e-5)
