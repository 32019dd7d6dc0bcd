"""Dropout falls on what a branch puts out, before it is written, and never on the stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stabilize import kernels
from tests.models import assert_equal, disturb, model_of
from tests.strategies.wiring import WIDTH, run, with_known_branches

WIRED = ["pre_norm", "post_norm", "b2t", "residual", "scaled_sum", "deep_norm", "hyper_connections", "dlcl", "sandwich"]


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("name", WIRED)
def test_what_it_does_to_a_number_it_does_to_branches_alone(
    name: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it would triple what it is given, the stack is that whose branches are three times as large."""
    stack = with_known_branches(getattr(model_of(name, width=WIDTH, dropout=0.1), side))
    disturb(stack)
    x = torch.randn(2, 5, WIDTH)
    monkeypatch.setattr(kernels, "dropout", lambda output, rate: 3 * output)
    dropped = run(stack.train(), x)

    def triple(branch: Any, inputs: Any, output: Any) -> Any:
        return 3 * output[0], output[1]

    assert not dropped.allclose(run(stack.eval(), x))
    for layer in stack.layers:
        for branch in layer.branches:
            branch.function.register_forward_hook(triple)
    assert_equal(run(stack, x), dropped)
