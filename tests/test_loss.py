"""The loss against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from stabilize.loss import smoothed_cross_entropy
from tests.models import assert_equal

smoothings = pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 1.0])


@given(
    tokens=st.integers(1, 12),
    vocabulary=st.integers(2, 40),
    smoothing=st.floats(0, 1),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_loss_and_gradient_are_torchs(tokens: int, vocabulary: int, smoothing: float, scale: float) -> None:
    logits = (torch.randn(tokens, vocabulary) * scale).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,))
    expected = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    loss, nll = smoothed_cross_entropy(logits, labels, smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(nll, F.cross_entropy(logits, labels, reduction="sum"), rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(3 * value, logits)[0] for value in (loss, expected)]
    assert_equal(*gradients, tolerance=2e-6)


@smoothings
def test_nll_never_has_a_gradient(smoothing: float) -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss, nll = smoothed_cross_entropy(logits, torch.tensor([0, 1, 2]), smoothing)
    assert loss.requires_grad
    assert not nll.requires_grad


@smoothings
def test_no_tokens_cost_nothing_and_push_nowhere(smoothing: float) -> None:
    """A mean over no tokens would be NaN."""
    logits = torch.zeros(0, 5, requires_grad=True)
    loss, nll = smoothed_cross_entropy(logits, torch.zeros(0, dtype=torch.long), smoothing)
    loss.backward()
    assert loss == nll == 0
    assert logits.grad.shape == (0, 5)


@smoothings
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_float32(smoothing: float, dtype: torch.dtype) -> None:
    """20,000 tokens of 5 nats are a sum above float16's greatest number."""
    logits = torch.randn(20_000, 150).to(dtype).requires_grad_()
    labels = torch.randint(150, (20_000,))
    loss, nll = smoothed_cross_entropy(logits, labels, smoothing)
    loss.backward()
    assert loss.dtype == nll.dtype == torch.float32
    assert loss > torch.finfo(torch.float16).max
    torch.testing.assert_close(
        loss, F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=smoothing), rtol=1e-5, atol=0
    )
    assert logits.grad.dtype == dtype
    assert logits.grad.isfinite().all()


def test_certainty_costs_what_smoothing_says() -> None:
    """All weight on the label among V tokens, at a logit of h: nll is 0, the loss smoothing h (V - 1) / V."""
    logits = torch.zeros(1, 8)
    logits[0, 2] = 100.0
    loss, nll = smoothed_cross_entropy(logits, torch.tensor([2]), 0.1)
    assert nll == 0
    assert loss == pytest.approx(0.1 * 100 * 7 / 8)
