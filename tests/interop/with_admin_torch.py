"""Admin's closed form, against the package of its authors."""

from __future__ import annotations

import admin_torch
import pytest
import torch

from stabilize.model import Sizes
from stabilize.strategies import AdminClosedForm
from tests.interop.weights import HEADS, HIDDEN, WIDTH
from tests.models import assert_equal


@pytest.mark.parametrize(("ours", "theirs"), [("logarithmic", "O(logn)"), ("constant", "O(1)"), ("linear", "O(n)")])
@pytest.mark.parametrize(("encoder_layers", "decoder_layers"), [(1, 1), (6, 6), (18, 6), (12, 50), (100, 100)])
def test_the_skip_is_scaled_alike(encoder_layers: int, decoder_layers: int, ours: str, theirs: str) -> None:
    sizes = Sizes(encoder_layers, decoder_layers, WIDTH, HEADS, HIDDEN)
    for stack, branches in (("encoder", 2 * encoder_layers), ("decoder", 3 * decoder_layers)):
        residual = AdminClosedForm(ours).at(sizes.site(stack, 1, "feed_forward"), norm=None)
        x, branch = torch.randn(2, 2, 3, WIDTH)
        assert_equal(residual.write(x, branch), admin_torch.as_module(branches, theirs)(x, branch), 1e-5)
