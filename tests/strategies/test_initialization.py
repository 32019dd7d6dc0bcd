"""Gains by role, the papers' tables, and the spread of what is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stabilize.errors import UserError
from stabilize.model import EncoderDecoder, Sizes
from stabilize.model.embedding import sinusoids
from stabilize.strategies import (
    DeepNormInit,
    DeepNormResidual,
    Initialization,
    NoNorm,
    PostNorm,
    Stabilizer,
    Xavier,
)
from stabilize.strategies.initialization import (
    GPT2,
    B2TInit,
    DepthScaled,
    FixNorm,
    Fixup,
    SmallInit,
    SubNormInit,
    TFixup,
)
from tests.models import DEEP_NORM, SOURCE, TARGET, assert_equal, disturb, query_key_value

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


# ---------------------------------------------------------------- the rest of the menu

NUMBERS = """
  6  1.5473 1.7001  .4281 .3689  .4082
 12  1.9484 1.8930  .3600 .3102  .2887
 18  2.1829 1.9972  .3253 .2803  .2357
 50  2.7734 2.2384  .2520 .2171  .1414
100  3.1739 2.3883  .2119 .1826  .1000
500  4.1036 2.7043  .1417 .1221  .0447
"""
"""Depth of both stacks; Sub-LN's gamma of encoder and decoder, T-Fixup's factor of both, the factor of B2T's code."""


def gains(initialization: Initialization, n: int, m: int, role: str = "feed_forward_in") -> list[float]:
    """Of a feed-forward matrix in the last layer of either stack."""
    sizes = Sizes(n, m)
    sites = (sizes.site("encoder", n, "feed_forward"), sizes.site("decoder", m, "feed_forward"))
    return [initialization.gain(site, role) for site in sites]


@pytest.mark.parametrize("row", NUMBERS.strip().splitlines())
@pytest.mark.parametrize("role", ["feed_forward_in", "feed_forward_out"])
def test_published_factors_of_equal_stacks(row: str, role: str) -> None:
    depth, sub_e, sub_d, fixup_e, fixup_d, b2t = map(float, row.split())
    n = int(depth)
    assert gains(SubNormInit(), n, n, role) == pytest.approx([sub_e, sub_d], abs=5.1e-5)
    assert gains(TFixup(), n, n, role) == pytest.approx([fixup_e, fixup_d], abs=5.1e-5)
    assert gains(B2TInit(), n, n, role) == pytest.approx([b2t, b2t], abs=5.1e-5)


@given(n=st.integers(1, 600), m=st.integers(1, 600))
def test_published_factors_of_unequal_stacks(n: int, m: int) -> None:
    sub_e, sub_d = math.sqrt(math.log(3 * m) * math.log(2 * n) / 3), math.sqrt(math.log(3 * m))
    assert gains(SubNormInit(), n, m) == pytest.approx([sub_e, sub_d])
    assert gains(TFixup(), n, m) == pytest.approx([0.67 * n**-0.25, (9 * m) ** -0.25])
    assert gains(B2TInit(), n, m) == pytest.approx([n**-0.5, m**-0.5])


@pytest.mark.parametrize(
    ("initialization", "expected"),
    [
        # By hand: sqrt(ln 9 ln 36 / 3), sqrt(ln 9); 0.67 / 18^(1/4), 27^(-1/4); 18^(-1/2), 3^(-1/2).
        (SubNormInit(), [1.6201, 1.4823]),
        (TFixup(), [0.3253, 0.4387]),
        (B2TInit(), [0.2357, 0.5774]),
    ],
)
def test_published_factors_of_eighteen_and_three_layers(initialization: Initialization, expected: list[float]) -> None:
    assert gains(initialization, 18, 3) == pytest.approx(expected, abs=5.1e-5)


ATTENTION = ("query", "key", "value", "output")
FEED_FORWARD = ("feed_forward_in", "feed_forward_out")
N, M = 6, 4
"""Depths of the models below."""

Expected: TypeAlias = Callable[[str, int, str, str], float]
"""Deviation over Xavier's of stack, layer, branch, role."""


def depth_scaled(exponent: float) -> Expected:
    """W ~ U(-g / l^exponent, g / l^exponent), g Xavier's (Zhang et al. 2019, arXiv:1908.11365)."""
    return lambda stack, layer, branch, role: layer**-exponent


def gpt2(deviation: float) -> Expected:
    """N(0, deviation), over the root of the stack's number of branches where a branch ends."""

    def expected(stack: str, layer: int, branch: str, role: str) -> float:
        last = {"encoder": 2 * N, "decoder": 3 * M}[stack] ** -0.5 if role in ("output", "feed_forward_out") else 1.0
        return deviation * last / xavier(role)

    return expected


def t_fixup(stack: str, layer: int, branch: str, role: str) -> float:
    """Queries and keys stay Xavier's; self- and cross-attention alike."""
    return 1.0 if role in ("query", "key") else {"encoder": 0.67 * N**-0.25, "decoder": (9 * M) ** -0.25}[stack]


def fixup(stack: str, layer: int, branch: str, role: str) -> float:
    """L branches of m matrices: all but the last over L^(1 / (2 m - 2)), the last zero; attention counts four.

    L are the branches of both stacks (Zhang et al. 2019, arXiv:1901.09321; the ports for translation count alike).
    """
    total = 2 * N + 3 * M
    if role in ("output", "feed_forward_out"):
        return 0.0
    return total ** (-1 / 2 if role == "feed_forward_in" else -1 / 6)


def small(stack: str, layer: int, branch: str, role: str) -> float:
    """Attention N(0, 2 / (5 d)), feed-forward N(0, 2 / (d + d_ff)); both variances."""
    return math.sqrt(2 / (5 * WIDTH)) / xavier(role) if role in ATTENTION else 1.0


def sub_norm(stack: str, layer: int, branch: str, role: str) -> float:
    """Not in cross-attention, not on queries and keys."""
    if role in ("query", "key") or branch == "cross_attention":
        return 1.0
    return math.sqrt(math.log(3 * M) * (math.log(2 * N) / 3 if stack == "encoder" else 1))


def b2t(stack: str, layer: int, branch: str, role: str) -> float:
    """Every matrix of the layers."""
    return {"encoder": N, "decoder": M}[stack] ** -0.5


def xavier(role: str) -> float:
    return math.sqrt(2 / (WIDTH + (HIDDEN if role in FEED_FORWARD else WIDTH)))


DRAWN: dict[str, tuple[Initialization, Expected]] = {
    "depth_scaled": (DepthScaled(), depth_scaled(0.5)),
    "depth_scaled_as_released": (DepthScaled(0.25), depth_scaled(0.25)),
    "gpt2": (GPT2(), gpt2(0.02)),
    "gpt2_with_another_deviation": (GPT2(0.05), gpt2(0.05)),
    "t_fixup": (TFixup(), t_fixup),
    "fixup": (Fixup(), fixup),
    "small": (SmallInit(), small),
    "sub_norm": (SubNormInit(), sub_norm),
    "b2t": (B2TInit(), b2t),
    "fix_norm": (FixNorm(), lambda *_: 1.0),
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_every_role_of_every_layer_is_drawn_as_published(name: str, stack: str) -> None:
    """The deviation of what is drawn, within five of its own deviations; nothing between layers."""
    initialization, expected = DRAWN[name]
    sizes = Sizes(N, M, WIDTH, 4, HIDDEN)
    for layer in {1, 2, M if stack == "decoder" else N}:
        branches = ("self_attention", "cross_attention", "feed_forward")
        for branch in branches if stack == "decoder" else branches[::2]:
            for role in FEED_FORWARD if branch == "feed_forward" else ATTENTION:
                rows = {"feed_forward_in": HIDDEN}.get(role, WIDTH)
                weight = torch.empty(rows, HIDDEN if role == "feed_forward_out" else WIDTH)
                initialization.fill(weight, sizes.site(stack, layer, branch), role)
                wanted = expected(stack, layer, branch, role)
                place = (layer, branch, role)
                assert spread(weight) == pytest.approx(wanted, rel=5 / math.sqrt(2 * weight.numel())), place
                assert abs(weight.mean().item()) <= 5 * weight.std().item() / math.sqrt(weight.numel()), place


EMBEDDINGS = {
    "t_fixup": ((9 * N) ** -0.25 * WIDTH**-0.5, (9 * M) ** -0.25 * WIDTH**-0.5),
    "gpt2": (0.02, 0.02),
    "depth_scaled": (WIDTH**-0.5, WIDTH**-0.5),
    "small": (WIDTH**-0.5, WIDTH**-0.5),
    "sub_norm": (WIDTH**-0.5, WIDTH**-0.5),
    "b2t": (WIDTH**-0.5, WIDTH**-0.5),
    "fixup": (WIDTH**-0.5, WIDTH**-0.5),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_are_drawn_as_published(name: str) -> None:
    """Deviation of the source's and the target's; T-Fixup's have a factor of their own, one matrix for both has N's."""
    stabilizer, expected = Stabilizer(initialization=DRAWN[name][0]), EMBEDDINGS[name]
    untied = EncoderDecoder(2000, Sizes(N, M, WIDTH, 4, HIDDEN, tied=False), stabilizer)
    found = [untied.source_embedding.weight.std().item(), untied.target_embedding.weight.std().item()]
    assert found == pytest.approx(expected, rel=0.01)
    tied = EncoderDecoder(2000, Sizes(N, M, WIDTH, 4, HIDDEN), stabilizer)
    assert tied.target_embedding.weight.std().item() == pytest.approx(expected[0], rel=0.01)


def test_fixup_zeroes_the_classifier() -> None:
    untied = EncoderDecoder(50, Sizes(1, 1, WIDTH, 4, HIDDEN, tied=False), Stabilizer(initialization=Fixup()))
    assert not untied.output.weight.any()


def test_fix_norm_reads_embeddings_of_length_one() -> None:
    """E ~ U(-0.01, 0.01), read as e / |e|, by the softmax too; times sqrt(width) where it enters the stream."""
    model = EncoderDecoder(500, Sizes(1, 1, WIDTH, 4, HIDDEN, dropout=0.0), Stabilizer(initialization=FixNorm()))
    weight, tokens = model.source_embedding.weight, torch.arange(4, 16)[None]
    assert 0.0099 < weight.abs().max() <= 0.01
    assert weight.std().item() == pytest.approx(0.01 / math.sqrt(3), rel=0.01)
    weight.data.mul_(torch.rand(500, 1) + 0.5)
    unit = weight / weight.norm(dim=1, keepdim=True)
    embedded = model.source_embedding(tokens) - sinusoids(0, 12, WIDTH, weight.device)
    torch.testing.assert_close(embedded, math.sqrt(WIDTH) * unit[tokens])
    hidden = torch.randn(2, WIDTH)
    torch.testing.assert_close(model.project(hidden), hidden @ unit.mT)


@pytest.mark.parametrize("name", ["depth_scaled", "t_fixup", "b2t"])
def test_what_is_published_over_uniform_xavier_is_uniform(name: str) -> None:
    weight, site = torch.empty(400, 300), Sizes(2, 2).site("encoder", 2, "feed_forward")
    DRAWN[name][0].fill(weight, site, "feed_forward_in")
    assert (weight / weight.std()).pow(4).mean().item() == pytest.approx(1.8, rel=0.05)


@pytest.mark.parametrize("name", ["gpt2", "small"])
def test_what_is_published_as_normal_is_normal(name: str) -> None:
    weight, site = torch.empty(400, 300), Sizes(2, 2).site("encoder", 2, "feed_forward")
    DRAWN[name][0].fill(weight, site, "feed_forward_in")
    assert (weight / weight.std()).pow(4).mean().item() == pytest.approx(3.0, rel=0.05)


# ---------------------------------------------------------------- in a model, and on the card


def test_the_card_has_what_each_formula_gives() -> None:
    site = Sizes(12, 6).site("encoder", 1, "layer")
    assert TFixup().constants(site) == pytest.approx({"gain": 0.35998, "embedding gain": 0.31020}, abs=1e-5)
    assert SubNormInit().constants(site) == pytest.approx({"gamma": math.sqrt(math.log(18) * math.log(24) / 3)})
    assert B2TInit().constants(site) == pytest.approx({"gain": 12**-0.5})
    assert DepthScaled().constants(site) == pytest.approx({"gain of the last layer": 12**-0.5})
    assert GPT2().constants(site) == pytest.approx({"output deviation": 0.02 / math.sqrt(24)})
    attention, feed_forward = 42 ** (-1 / 6), 42**-0.5
    expected = {"L": 42, "attention gain": attention, "feed-forward gain": feed_forward}
    assert Fixup().constants(site) == pytest.approx(expected)


@pytest.mark.parametrize(
    "initialization",
    [DeepNormInit(), SubNormInit(), TFixup(), DepthScaled(), B2TInit(), SmallInit(), FixNorm()],
    ids=lambda initialization: type(initialization).__name__,
)
def test_an_output_projection_of_its_own_belongs_to_no_layer(initialization: Initialization) -> None:
    sizes = Sizes(4, 4, WIDTH, 4, HIDDEN, tied=False)
    model = EncoderDecoder(500, sizes, Stabilizer(initialization=initialization))
    assert spread(model.output.weight) == pytest.approx(1, rel=0.02)


def test_gpt2_draws_an_output_projection_of_its_own_like_all_else() -> None:
    model = EncoderDecoder(500, Sizes(4, 4, WIDTH, 4, HIDDEN, tied=False), Stabilizer(initialization=GPT2()))
    assert model.output.weight.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
def test_fixup_starts_as_the_identity(tied: bool) -> None:
    """No branch adds anything, so a stack without norms gives its embedding; a classifier of its own gives zeros."""
    stabilizer = Stabilizer(NoNorm(), initialization=Fixup())
    model = EncoderDecoder(20, Sizes(3, 2, 16, 2, 32, tied=tied), stabilizer).eval()
    hidden = model(SOURCE, TARGET)
    assert hidden.equal(model.target_embedding(TARGET))
    assert bool(model.project(hidden).any()) is tied


@pytest.mark.parametrize("initialization", [DepthScaled(), B2TInit(), DeepNormInit()], ids=lambda i: type(i).__name__)
def test_cures_of_deep_post_norm_silence_its_warning(initialization: Initialization) -> None:
    site = Sizes(18, 18).site("encoder", 1, "layer")
    assert Stabilizer(PostNorm(), initialization=initialization).warnings(site, "32-true") == []
    assert Stabilizer(PostNorm(), initialization=SmallInit()).warnings(site, "32-true") != []


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_numbers_that_draw_nothing_are_refused(value: float) -> None:
    with pytest.raises(UserError, match=r"initialization\.exponent is "):
        DepthScaled(value)
    with pytest.raises(UserError, match=r"initialization\.deviation is "):
        GPT2(value)


def test_fix_norm_keeps_its_lengths_whatever_the_updates() -> None:
    model = EncoderDecoder(20, Sizes(1, 1, 16, 2, 32), Stabilizer(initialization=FixNorm()))
    disturb(model)
    embedding = model.source_embedding
    assert_equal(embedding.form(embedding.weight).norm(dim=-1), torch.ones(20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_zeros_has_a_finite_gradient_under_fix_norm(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 8).to(dtype)
    weight[1] = 0
    weight.requires_grad_()
    unit = FixNorm().form(weight, Sizes(1, 1).site("encoder", 0, "embedding"), "embedding")
    rows = unit(weight)
    (0.01 * rows).sum().backward()
    assert rows.dtype == dtype
    assert not rows[1].any()
    assert weight.grad.isfinite().all()
