"""Norms whose statistics run over all real tokens of a batch, against their papers' equations.

MaskedBatchNorm against torch's BatchNorm1d over the real tokens; PowerNorm against the formulas of Shen et al. 2020
(arXiv:2003.07845) and of its released code.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stabilize.model import Sizes
from stabilize.strategies import Norm, Stabilizer
from stabilize.strategies.norm import MaskedBatchNorm, PowerNorm
from tests.models import SOURCE, TARGET, assert_equal, disturb, model_of

WIDTH, EPSILON = 8, 1e-5

both = pytest.mark.parametrize("norm", [MaskedBatchNorm(), PowerNorm()], ids=lambda norm: type(norm).__name__)
sides = pytest.mark.parametrize("side", ["encoder", "decoder"])
dtypes = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)


def placed(norm: Norm, side: str = "encoder") -> Norm:
    """With its gains and biases moved, in training."""
    found = norm.at(Sizes(2, 3, WIDTH, 2, 16).site(side, 1, "feed_forward"), epsilon=EPSILON).train()
    disturb(found, 0.3, update=0)
    return found


def batch(seed: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    """States, and the mask of the real ones: 7, 5 and 2 tokens; what stands at padding is large."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 + 3 * torch.randn(rows, 7, WIDTH, generator=generator)
    real = torch.arange(7) < torch.tensor([7, 5, 2])[:rows, None]
    return torch.where(real[..., None], x, 1e3), real


def torchs(norm: Norm, momentum: float = 0.1) -> nn.BatchNorm1d:
    """torch's BatchNorm1d with the same gain and bias."""
    other = nn.BatchNorm1d(WIDTH, eps=EPSILON, momentum=momentum)
    other.load_state_dict({"weight": norm.gain, "bias": norm.bias}, strict=False)
    return other


@sides
@dtypes
@pytest.mark.parametrize("rows", [1, 3])
def test_batch_norm_is_torchs_over_the_real_tokens(rows: int, side: str, dtype: torch.dtype, tolerance: float) -> None:
    norm = placed(MaskedBatchNorm(), side).to(dtype)
    x, real = batch(0, rows)
    found = norm(x.to(dtype), real)
    expected = torchs(norm)(x.to(dtype)[real].float())
    assert found.dtype == dtype
    torch.testing.assert_close(found[real].float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("momentum", [0.1, 0.4])
def test_batch_norm_remembers_as_torch_does(momentum: float) -> None:
    norm = placed(MaskedBatchNorm(momentum))
    other = torchs(norm, momentum)
    for update in range(1, 5):
        x, real = batch(update)
        other(x[real])
        norm(x, real)
        norm(x, real)  # the second time as a checkpointed layer runs: it counts once
        norm.after_update(update)
    x, real = batch(9)
    assert_equal(norm.eval()(x, real)[real], other.eval()(x[real]), 3e-6)
    assert_equal(norm(x[:1, :1], real[:1, :1])[0], other(x[0, :1]), 3e-6)  # one token alone, as in decoding


@both
def test_without_a_mask_all_tokens_are_real(norm: Norm) -> None:
    found, (x, _) = placed(norm), batch(1)
    assert found(x).equal(found(x, torch.ones(3, 7, dtype=torch.bool)))


@both
def test_padding_gets_no_gradient(norm: Norm) -> None:
    found, (x, real) = placed(norm), batch(3)
    x.requires_grad_()
    found(x, real)[real].pow(3).sum().backward()
    assert not x.grad[~real].any()
    assert x.grad[real].any()


@both
def test_within_a_branch_all_heads_of_the_real_tokens_count(norm: Norm) -> None:
    """Of `[batch, heads, length, head width]` each head of a token is one more of the batch."""
    x, real = batch(4)
    heads = torch.stack([x, 2 * x, -x], dim=1)
    found, expected = placed(norm), placed(norm)
    expected.load_state_dict(found.state_dict())
    inner = found(heads, real).transpose(1, 2).flatten(1, 2)
    each = real.repeat_interleave(3, dim=1)
    assert_equal(inner[each], expected(heads.transpose(1, 2).flatten(1, 2), each)[each], 1e-5)


@both
def test_in_evaluation_a_sentence_knows_nothing_of_its_neighbours(norm: Norm) -> None:
    model = model_of(Stabilizer(norm=norm))
    disturb(model, 0.1)
    together = model(SOURCE, TARGET)
    for row in range(2):
        assert_equal(model(SOURCE[row : row + 1], TARGET[row : row + 1])[0], together[row], 1e-5)


# ---------------------------------------------------------------- PowerNorm


def power(norm: Norm, x: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """z = x / sqrt(psi + epsilon) for the mean square psi, and g z + b; x after its scaling by groups."""
    z = x / (square + EPSILON).sqrt()
    return z, norm.gain * z + norm.bias


def grouped(x: Tensor, groups: int) -> Tensor:
    """Each group of channels over its root mean square."""
    parts = x.unflatten(-1, (groups, -1))
    return (parts / (parts.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()).flatten(-2)


@sides
@dtypes
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_power_norm_starts_with_the_batchs_mean_square(
    groups: int, side: str, dtype: torch.dtype, tolerance: float
) -> None:
    norm = placed(PowerNorm(warmup=10, groups=groups), side).to(dtype)
    x, real = batch(0)
    scaled = grouped(x.to(dtype).float(), groups)[real]
    _, expected = power(norm.float(), scaled, scaled.pow(2).mean(0))
    found = norm.to(dtype)(x.to(dtype), real)
    torch.testing.assert_close(found[real].float(), expected, rtol=tolerance, atol=2 * tolerance)


def after(norm: Norm, updates: int, decay: float) -> Tensor:
    """Train so many updates; the mean square remembered: psi <- decay psi + (1 - decay) mean(x^2), one at first."""
    psi = torch.ones(WIDTH)
    for update in range(1, updates + 1):
        x, real = batch(update)
        norm(x, real)
        norm.after_update(update)
        psi = decay * psi + (1 - decay) * grouped(x, 1)[real].pow(2).mean(0)
    return psi


@pytest.mark.parametrize("decay", [0.9, 0.6])
def test_power_norm_goes_on_with_the_running_mean_square(decay: float) -> None:
    """From the update after the warm-up on, and in evaluation from the start."""
    norm = placed(PowerNorm(forward_decay=decay, warmup=3))
    x, real = batch(20)
    scaled = grouped(x, 1)[real]
    _, expected = power(norm, scaled, torch.ones(WIDTH))
    assert_equal(norm.eval()(x, real)[real], expected, 3e-6)
    psi = after(norm.train(), 6, decay)
    _, expected = power(norm, scaled, psi)
    assert_equal(norm(x, real)[real], expected, 3e-6)
    assert_equal(norm.eval()(x, real)[real], expected, 3e-6)


@pytest.mark.parametrize("decay", [0.9, 0.6])
def test_power_norm_has_a_backward_pass_of_its_own(decay: float) -> None:
    """dx = (g - nu z) / sqrt(psi + epsilon), g = gain dy; nu <- nu (1 - (1 - decay) mean z^2) + (1 - decay) mean(g z).

    nu is zero at first. In the warm-up psi is the batch's, in paper and code alike.
    """
    norm = placed(PowerNorm(backward_decay=decay, warmup=100))
    nu = torch.zeros(WIDTH)
    for update in range(1, 5):
        x = (2 + 3 * torch.randn(3, 7, WIDTH)).requires_grad_()
        dy = torch.randn(3, 7, WIDTH)
        norm(x).backward(dy)

        leaf = x.detach().requires_grad_()
        scaled = grouped(leaf, 1)
        square = scaled.detach().pow(2).mean((0, 1))
        z, _ = power(norm, scaled.detach(), square)
        g = norm.gain.detach() * dy
        (expected,) = torch.autograd.grad(scaled, leaf, (g - nu * z) / (square + EPSILON).sqrt())
        assert_equal(x.grad, expected, 3e-6)

        norm.after_update(update)
        nu = nu * (1 - (1 - decay) * z.pow(2).mean((0, 1))) + (1 - decay) * (g * z).mean((0, 1))
    assert nu.abs().max() > 0.01


def test_power_norms_backward_pass_after_the_warm_up() -> None:
    """The paper divides by the root of the running psi, the same that the forward pass divided by (algorithm 2)."""
    norm = placed(PowerNorm(warmup=2))
    psi = after(norm, 5, 0.9)  # without a backward pass, so that nu is still zero
    x = (2 + 3 * torch.randn(3, 7, WIDTH)).requires_grad_()
    dy = torch.randn(3, 7, WIDTH)
    norm(x).backward(dy)
    leaf = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(grouped(leaf, 1), leaf, norm.gain.detach() * dy / (psi + EPSILON).sqrt())
    assert_equal(x.grad, expected, 3e-6)


def test_power_norms_gain_and_bias_have_the_usual_gradient() -> None:
    norm, (x, real) = placed(PowerNorm()), batch(2)
    dy = torch.randn_like(x) * real[..., None]
    norm(x, real).backward(dy)
    scaled = grouped(x, 1)[real]
    z, _ = power(norm, scaled, scaled.pow(2).mean(0))
    assert_equal(norm.gain.grad, (dy[real] * z).sum(0), 1e-5)
    assert_equal(norm.bias.grad, dy[real].sum(0), 1e-5)
