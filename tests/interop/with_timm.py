"""LayerScale and stochastic depth, against timm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stabilize.model import Sizes
from stabilize.strategies import LayerScale, Residual, StochasticDepth
from tests.interop.weights import HEADS, HIDDEN, WIDTH, give, pass_over
from tests.models import assert_equal, disturb

pass_over("timm", "timm.layers")  # they ask for torchvision

from timm.layers.drop import DropPath, calculate_drop_path_rates  # noqa: E402
from timm.layers.layer_scale import LayerScale as TheirLayerScale  # noqa: E402

DEPTH = 5
SIZES = Sizes(DEPTH, DEPTH, WIDTH, HEADS, HIDDEN)


def placed(residual: Residual, layer: int) -> Residual:
    return residual.at(SIZES.site("encoder", layer, "feed_forward"), norm=None)


@pytest.mark.parametrize("start", [0.1, 1e-5])
def test_layer_scale(start: float) -> None:
    mine, theirs = placed(LayerScale(start), 1), TheirLayerScale(WIDTH, start)
    x, branch = torch.randn(2, 4, 3, WIDTH)
    assert_equal(mine.write(x, branch), x + theirs(branch), 1e-5)
    disturb(mine, 0.5)
    (gain,) = mine.parameters()
    give(theirs, gamma=gain)
    assert_equal(mine.write(x, branch), x + theirs(branch), 1e-5)


def joined(residual: Residual, branch: Tensor) -> Tensor:
    """What is joined to the stream."""
    return residual.write(torch.zeros_like(branch), branch)


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("layer", range(1, DEPTH + 1))
def test_stochastic_depth(layer: int, rate: float) -> None:
    """Draws are compared by the values they can take, and by how often."""
    mine = placed(StochasticDepth(rate=rate, first="kept"), layer).train()
    probability = calculate_drop_path_rates(rate, DEPTH)[layer - 1]
    theirs = DropPath(probability).train()
    ones = torch.ones(20_000, 3, 2)
    found, expected = joined(mine, ones), theirs(ones)
    assert_equal(found.unique(), expected.unique(), 1e-5)
    for each in (found, expected):
        assert (each == each[:, :1, :1]).all()
        assert (each[:, 0, 0] == 0).double().mean() == pytest.approx(probability, abs=0.015)
    mine.eval()
    theirs.eval()
    assert torch.equal(joined(mine, ones), theirs(ones))
