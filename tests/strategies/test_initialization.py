"""Gains by role, DeepNorm's table, and the spread of what is drawn."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stabilize.model import EncoderDecoder, Sizes
from stabilize.strategies import DeepNormInit, DeepNormResidual, Initialization, Stabilizer, Xavier
from tests.models import DEEP_NORM, query_key_value

TABLE = """
  6  1.4179 .4970  2.0598 .3433
 12  1.7609 .4002  2.4495 .2887
 18  1.9987 .3526  2.7108 .2608
 50  2.7505 .2562  3.4996 .2021
100  3.4157 .2063  4.1618 .1699
500  5.6482 .1248  6.2233 .1136
"""
"""Depth of both stacks; the encoder's alpha and beta, the decoder's (Wang et al. 2022, arXiv:2203.00555)."""

WIDTH, HIDDEN = 128, 256


def constants(encoder_layers: int, decoder_layers: int) -> list[float]:
    """alpha and beta of the encoder, alpha and beta of the decoder."""
    sizes = Sizes(encoder_layers, decoder_layers)
    sites = [sizes.site(stack, 1, "feed_forward") for stack in ("encoder", "decoder")]
    residual, initialization = DeepNormResidual(), DeepNormInit()
    return [
        value
        for site in sites
        for value in (residual.constants(site)["alpha"], initialization.gain(site, "feed_forward_in"))
    ]


@pytest.mark.parametrize("row", TABLE.strip().splitlines())
def test_deep_norm_constants_of_equal_stacks(row: str) -> None:
    depth, *expected = map(float, row.split())
    assert constants(int(depth), int(depth)) == pytest.approx(expected, abs=5.1e-5)


@given(n=st.integers(1, 1000), m=st.integers(1, 1000))
def test_deep_norm_constants_of_unequal_stacks(n: int, m: int) -> None:
    alpha_e, beta_e = 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
    alpha_d, beta_d = (3 * m) ** (1 / 4), (12 * m) ** (-1 / 4)
    assert constants(n, m) == pytest.approx([alpha_e, beta_e, alpha_d, beta_d])


def test_the_stacks_constants_differ_where_their_depths_do() -> None:
    alpha_e, beta_e, alpha_d, beta_d = constants(18, 3)
    assert alpha_e != pytest.approx(alpha_d, rel=0.01)
    assert beta_e != pytest.approx(beta_d, rel=0.01)


def matrices(model: EncoderDecoder, stack: str) -> list[tuple[str, Tensor]]:
    """All matrices of a stack's first layer with their roles."""
    found = []
    *attentions, feed_forward = (branch.function for branch in getattr(model, stack).layers[0].branches)
    for attention in attentions:
        weights = [weight for weight, _ in query_key_value(attention)]
        found += zip(("query", "key", "value", "output"), [*weights, attention.output.weight], strict=True)
    return [*found, ("feed_forward_in", feed_forward.input.weight), ("feed_forward_out", feed_forward.output.weight)]


def spread(weight: Tensor) -> float:
    """Standard deviation in units of Xavier's, sqrt(2 / (inputs + outputs))."""
    return weight.std().item() / math.sqrt(2 / sum(weight.shape))


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize(
    "initialization", [Xavier(), Xavier("normal"), DeepNormInit()], ids=["uniform", "normal", "deep_norm"]
)
def test_a_model_draws_each_role_with_its_gain(initialization: Initialization, stack: str) -> None:
    model = EncoderDecoder(500, Sizes(6, 2, WIDTH, 4, HIDDEN), Stabilizer(initialization=initialization))
    *_, beta_e, _, beta_d = constants(6, 2)
    beta = {"encoder": beta_e, "decoder": beta_d}[stack] if isinstance(initialization, DeepNormInit) else 1.0
    for role, weight in matrices(model, stack):
        gain = 1.0 if role in ("query", "key") else beta
        assert spread(weight) == pytest.approx(gain, rel=5 / math.sqrt(2 * weight.numel())), role


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_xavier_draws_what_its_name_says(distribution: str) -> None:
    weight, site = torch.empty(300, 200), Sizes(1, 1).site("encoder", 1, "feed_forward")
    Xavier(distribution).fill(weight, site, "feed_forward_in")
    kurtosis = (weight / weight.std()).pow(4).mean().item()
    assert kurtosis == pytest.approx(1.8 if distribution == "uniform" else 3.0, rel=0.05)
    if distribution == "uniform":
        assert weight.abs().max().item() == pytest.approx(math.sqrt(6 / 500), rel=1e-3)


@pytest.mark.parametrize("stabilizer", [Stabilizer(), DEEP_NORM], ids=["xavier", "deep_norm"])
def test_embeddings_are_as_wide_as_their_root_and_biases_zero(stabilizer: Stabilizer) -> None:
    model = EncoderDecoder(2000, Sizes(1, 1, WIDTH, 4, HIDDEN), stabilizer)
    assert model.source_embedding.weight.std().item() == pytest.approx(WIDTH**-0.5, rel=0.01)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        if name.endswith("gain"):
            assert parameter.eq(1).all(), name
