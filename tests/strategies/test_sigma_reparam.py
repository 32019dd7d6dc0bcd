"""The power iteration of sigma-Reparam over updates of the weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from stabilize.errors import UserError
from stabilize.model import EncoderDecoder, Sizes
from stabilize.strategies import Part, PostNorm, Stabilizer
from stabilize.strategies.attention import SigmaReparam, SpectralWeight
from stabilize.strategies.initialization import Fixup
from tests.models import SOURCE, TARGET, VOCABULARY, assert_equal


def largest(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix.double(), 2).float()


def small_model() -> EncoderDecoder:
    stabilizer = Stabilizer(PostNorm(), attention=SigmaReparam())
    return EncoderDecoder(VOCABULARY, Sizes(2, 2, 16, 2, 32, dropout=0.0), stabilizer)


def after_update(model: nn.Module, update: int) -> None:
    for part in model.modules():
        if isinstance(part, Part):
            part.after_update(update)


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24), (1, 5), (5, 1)])
def test_it_starts_from_the_largest_singular_value(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    spectral, one = SpectralWeight(weight, "spectral"), SpectralWeight(weight, "one")
    assert_equal(spectral.gamma.detach()[0], largest(weight), 1e-5)
    assert_equal(spectral(weight).detach(), weight, 1e-5)
    assert_equal(one(weight).detach(), weight / largest(weight), 1e-5)


@pytest.mark.parametrize("shape", [(12, 12), (24, 8), (8, 24)])
def test_it_follows_a_weight_that_moves(shape: tuple[int, int]) -> None:
    """A slow walk to a matrix that has nothing to do with the first, then a rest."""
    start, end = torch.randn(shape), torch.randn(shape)
    form = SpectralWeight(start, "one").train()
    worst = 0.0
    for update in range(1, 401):
        weight = start.lerp(end, min(update / 200, 1.0))
        worst = max(worst, abs(largest(form(weight)).item() - 1))
        form.after_update(update)
    assert worst < 0.1
    assert_equal(largest(form(end)), torch.tensor(1.0), 1e-4)


def test_evaluation_and_repetition_move_nothing() -> None:
    form, weight = SpectralWeight(torch.randn(6, 4), "one"), torch.randn(6, 4)
    start = form.v.clone()
    form.eval()(weight)
    form.after_update(1)
    assert form.v.equal(start)
    form.train()
    first, again = form(weight), form(weight)
    assert first.equal(again)
    assert form.v.equal(start)
    form.after_update(2)
    assert not form.v.equal(start)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_sigma_in_float32(dtype: torch.dtype) -> None:
    form, weight = SpectralWeight(torch.randn(16, 16), "one"), torch.randn(16, 16)
    with torch.autocast("cpu", dtype):
        found = form(weight)
    assert found.equal(form(weight))


def test_a_layer_computed_twice_iterates_once() -> None:
    """Activation checkpointing: the same vectors after updates as without it."""
    plain = small_model()
    again = copy.deepcopy(plain)
    for layer in again.layers:
        layer.checkpointed = True
    for model in (plain, again):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for update in (1, 2, 3):
            optimizer.zero_grad()
            model(SOURCE, TARGET).square().mean().backward()
            optimizer.step()
            after_update(model, update)
    for (name, one), (_, other) in zip(plain.state_dict().items(), again.state_dict().items(), strict=True):
        assert_equal(one, other), name


def test_weights_that_start_at_zero_are_refused() -> None:
    with pytest.raises(UserError, match="SigmaReparam cannot be combined with Fixup"):
        Stabilizer(attention=SigmaReparam(), initialization=Fixup())
