"""The loss against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stabilize.loss import projected_cross_entropy, smoothed_cross_entropy
from tests.models import assert_equal
from tests.tasks import sentence_batch, small_task

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


# ---------------------------------------------------------------- z-loss


def by_the_formula(logits: Tensor, labels: Tensor, smoothing: float, z_loss: float) -> Tensor:
    """sum over tokens of (1 - smoothing) nll + smoothing mean_v(-log p(v)) + z_loss (log Z)^2, left to autograd."""
    log_z = logits.logsumexp(-1)
    log_p = logits - log_z[:, None]
    nll = -log_p[torch.arange(len(labels)), labels]
    return ((1 - smoothing) * nll - smoothing * log_p.mean(-1) + z_loss * log_z**2).sum()


@given(
    tokens=st.integers(1, 12),
    vocabulary=st.integers(2, 40),
    smoothing=st.floats(0, 1),
    z_loss=st.floats(1e-5, 1),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    shift=st.sampled_from([0.0, -20.0, 50.0]),
)
def test_z_loss_and_its_gradient_are_the_formulas(
    tokens: int, vocabulary: int, smoothing: float, z_loss: float, scale: float, shift: float
) -> None:
    logits = (torch.randn(tokens, vocabulary) * scale + shift).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,))
    exact = logits.detach().double().requires_grad_()
    expected = by_the_formula(exact, labels, smoothing, z_loss)
    loss, nll = smoothed_cross_entropy(logits, labels, smoothing, z_loss)
    assert_equal(loss.double(), expected, 1e-5)
    torch.testing.assert_close(nll, F.cross_entropy(logits, labels, reduction="sum"), rtol=1e-5, atol=1e-4)
    (found,), (wanted,) = (torch.autograd.grad(3 * value, x) for value, x in ((loss, logits), (expected, exact)))
    assert_equal(found.double(), wanted, 1e-5)


@smoothings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_z_loss_of_half_precision_logits_is_computed_in_float32(smoothing: float, dtype: torch.dtype) -> None:
    logits = (torch.randn(50, 30) * 5 + 10).to(dtype).requires_grad_()
    labels = torch.randint(30, (50,))
    exact = logits.detach().double().requires_grad_()
    loss, _ = smoothed_cross_entropy(logits, labels, smoothing, 1e-2)
    expected = by_the_formula(exact, labels, smoothing, 1e-2)
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32
    assert logits.grad.dtype == dtype
    assert_equal(loss.double(), expected.detach(), 1e-5)
    assert_equal(logits.grad.double(), exact.grad, torch.finfo(dtype).eps)


@smoothings
def test_no_z_loss_is_the_loss_without_it_to_the_bit(smoothing: float) -> None:
    found = []
    for weight in ((), (0.0,)):
        logits = torch.randn(9, 20, generator=torch.Generator().manual_seed(4)).requires_grad_()
        loss, nll = smoothed_cross_entropy(logits, torch.arange(9), smoothing, *weight)
        loss.backward()
        found.append((loss.detach(), nll, logits.grad))
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_z_loss_of_no_tokens_is_nothing() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    loss, _ = smoothed_cross_entropy(logits, torch.zeros(0, dtype=torch.long), 0.1, 1e-4)
    loss.backward()
    assert loss == 0
    assert logits.grad.shape == (0, 5)


def test_z_loss_is_paid_for_a_drift_of_all_logits() -> None:
    """A shift of all logits adds z_loss ((log Z + shift)^2 - (log Z)^2) a token, and changes no probability."""
    logits, labels = torch.randn(4, 10), torch.arange(4)
    (loss, nll), (drifted, same) = (smoothed_cross_entropy(x, labels, 0.1, 1e-2) for x in (logits, logits + 3))
    log_z = logits.logsumexp(-1)
    assert_equal(drifted - loss, 1e-2 * ((log_z + 3) ** 2 - log_z**2).sum(), 1e-5)
    assert_equal(same, nll, 1e-5)


def test_a_task_hands_its_z_loss_on() -> None:
    batch = sentence_batch(0, 1)
    plain, weighted = (small_task(z_loss=weight).loss(batch) for weight in (0.0, 0.1))
    assert weighted[0] > plain[0]
    assert weighted[1].equal(plain[1])


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_it_is_the_same_however_many_rows_are_taken_at_once(z_loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = torch.randn(50, 20), torch.randint(20, (50,))
    found = []
    for entries in (20, 7 * 20, 2**20):
        monkeypatch.setattr("stabilize.loss.ENTRIES_AT_ONCE", {True: entries})
        leaf = logits.clone().requires_grad_()
        loss, nll = smoothed_cross_entropy(leaf, labels, 0.1, z_loss)
        loss.backward()
        found.append((loss, nll, leaf.grad))
    for other in found[1:]:
        assert other[2].equal(found[0][2])
        torch.testing.assert_close(other[:2], found[0][:2], rtol=1e-6, atol=0)


# ---------------------------------------------------------------- with the projection


def projected(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, W, b and labels at a vocabulary of 20."""
    hidden, weight, bias = (torch.randn(size).to(dtype).requires_grad_() for size in ((tokens, 6), (20, 6), (20,)))
    return hidden, weight, bias, torch.randint(20, (tokens,))


@pytest.mark.parametrize("tokens", [0, 1, 50])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("entries", [20, 7 * 20, 2**20])
def test_loss_of_a_projection_is_that_of_its_logits(
    tokens: int, biased: bool, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stabilize.loss.LOGITS_AT_ONCE", {True: entries})
    monkeypatch.setattr("stabilize.loss.ROWS_AT_ONCE", 1)
    hidden, weight, bias, labels = projected(tokens)
    leaves = [hidden, weight, bias] if biased else [hidden, weight]
    plain = smoothed_cross_entropy(F.linear(*leaves), labels, 0.1, 1e-2)
    found = projected_cross_entropy(hidden, weight, bias if biased else None, labels, 0.1, 1e-2)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    assert not found[1].requires_grad
    for mine, wanted in zip(*(torch.autograd.grad(3 * loss, leaves) for loss, _ in (found, plain)), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_loss_of_a_projection_in_half_precision(dtype: torch.dtype, autocast: bool) -> None:
    hidden, weight, bias, labels = projected(70, torch.float32 if autocast else dtype)
    leaves, found = [hidden, weight, bias], []
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        loss, _ = projected_cross_entropy(hidden, weight, bias, labels, 0.1)
    wanted, _ = smoothed_cross_entropy(F.linear(*exact), labels, 0.1)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted.double(), rtol=1e-2, atol=0)
    found = torch.autograd.grad(loss, leaves)
    for mine, true in zip(found, torch.autograd.grad(wanted, exact), strict=True):
        assert mine.dtype == hidden.dtype
        torch.testing.assert_close(mine.double(), true, rtol=0, atol=0.02 * true.abs().max().item())


def test_never_more_logits_are_there_than_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stabilize.loss.LOGITS_AT_ONCE", {True: 7 * 20})
    monkeypatch.setattr("stabilize.loss.ROWS_AT_ONCE", 1)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            largest = max(largest, made.numel() if isinstance(made, Tensor) else 0)
            return made

    hidden, weight, bias, labels = projected(50)
    with Watch():
        loss, _ = projected_cross_entropy(hidden, weight, bias, labels, 0.1)
        loss.backward()
    assert largest == hidden.numel() == 300 < 50 * 20


class Products(TorchDispatchMode):
    """Counts the products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "linear", "_linear_pointwise")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_evaluation_makes_no_gradient(off: Any) -> None:
    hidden, weight, bias, labels = projected(9)
    with Products() as training:
        projected_cross_entropy(hidden, weight, bias, labels, 0.0)
    with off(), Products() as evaluation:
        loss, nll = projected_cross_entropy(hidden, weight, bias, labels, 0.0)
    assert not loss.requires_grad
    assert loss == nll
    assert (training.count, evaluation.count) == (3, 1)


def test_sums_over_many_parts_lose_nothing_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, of eight binary digits, a sum of 400 parts would stop growing."""
    monkeypatch.setattr("stabilize.loss.LOGITS_AT_ONCE", {True: 1})
    monkeypatch.setattr("stabilize.loss.ROWS_AT_ONCE", 1)
    hidden = torch.ones(400, 6, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.zeros(size, dtype=torch.bfloat16, requires_grad=True) for size in ((20, 6), (20,)))
    loss, _ = projected_cross_entropy(hidden, weight, bias, torch.zeros(400, dtype=torch.long), 0.0)
    loss.backward()
    torch.testing.assert_close(bias.grad[0].item(), -400 * 19 / 20, rtol=0.01, atol=0)
    torch.testing.assert_close(weight.grad[:, 0].tolist(), bias.grad.tolist(), rtol=0.01, atol=0)
