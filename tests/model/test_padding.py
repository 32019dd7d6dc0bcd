"""A source that is nothing but padding leaves the other sentences alone (and is no source of NaN;
FIELD_REPORTS 1.5)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stabilize import kernels
from stabilize.strategies.residual import StochasticDepth
from tests.models import PAD, SOURCE, STABILIZERS, TARGET, assert_equal, disturb, gradients, model_of

ALONE = [name for name, stacks in STABILIZERS.items() if not any(stack.norm.needs_mask for stack in stacks)]
"""Those under which sentences of a batch know nothing of each other; batch statistics are not among them."""


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("attention_dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_empty_source_gives_its_neighbour_the_same_gradients(
    name: str, attention_dropout: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rate above zero attention takes the path with explicit weights; what is dropped there is held back here,
    for two batches of different size draw different numbers."""
    monkeypatch.setattr(kernels, "_kept", lambda x, rate: torch.ones_like(x))
    model = model_of(name, attention_dropout=attention_dropout).train()
    for part in model.modules():
        part.train(not isinstance(part, StochasticDepth))
    disturb(model)
    source, target = F.pad(SOURCE[:1], (0, 2)), TARGET[:1]
    with_empty = torch.cat([source, torch.full_like(source, PAD)]), target.repeat(2, 1)

    found = []
    for batch in ((source, target), with_empty):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = model(*batch)
        assert hidden.isfinite().all()
        found.append(gradients(hidden[:1].float().pow(2).mean(), model))

    alone, beside = found
    scale = max(gradient.abs().max().item() for gradient in alone.values())
    for parameter, gradient in beside.items():
        assert gradient.isfinite().all()
        assert_equal(gradient / scale, alone[parameter] / scale, 1e-6 if dtype == torch.float32 else 2e-2)
