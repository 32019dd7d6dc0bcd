"""What each layer does before training: against closed forms of stacks made by hand, and against the papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize.model import EncoderDecoder
from stabilize.probe import MARGIN, Profile, judge, log_slope, profile, ratio, theory
from stabilize.strategies import B2T, PostNorm, PreNorm, ReZero, RMSNorm, ScaledSum, Stabilizer
from tests.models import PAD, SOURCE, STABILIZERS, STARTS, TARGET, every_stabilizer, model_of, sentences

ANGLE = 0.3


class Turn(nn.Module):
    """y = gain R x + b, R a turn by ANGLE in the plane, b = 0: norms go by the gain, cosines are that of ANGLE."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        cosine, sine = math.cos(ANGLE), math.sin(ANGLE)
        self.register_buffer("matrix", gain * torch.tensor([[cosine, -sine], [sine, cosine]]))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, real: Tensor) -> tuple[Tensor, str]:
        return x @ self.matrix.T + self.bias, "what is no stream"

    def observe(self, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, str]) -> tuple[Tensor, Tensor]:
        return output[0], inputs[1]


TOKENS = torch.tensor([[[3.0, 4.0], [1.0, 2.0]]])
REAL = torch.tensor([[True, False]])


def loss_of(stack: Sequence[nn.Module], weights: Sequence[float] = (0.6, 0.8)) -> Tensor:
    """The real token of the last layer's output, weighed: the gradient by it has norm 1."""
    x = TOKENS
    for layer in stack:
        x, _ = layer(x, REAL)
    return x[REAL] @ torch.tensor(weights)


@pytest.mark.parametrize("gain", [0.5, 1.0, 2.0])
def test_a_stack_of_turns_has_the_profile_that_paper_and_pencil_give(gain: float) -> None:
    stack, depth = [Turn(gain) for _ in range(5)], 5
    found = profile({"stack": stack}, lambda: loss_of(stack).sum())["stack"]
    norm = 5 / math.sqrt(2)  # of the real token, a channel
    assert found.activation_rms == pytest.approx([norm * gain**layer for layer in range(1, depth + 1)])
    assert found.similarity == pytest.approx([math.cos(ANGLE)] * (depth - 1))
    assert all(map(math.isnan, found.similarity_centered))  # one token less its mean
    coming_down = [gain ** (depth - layer) for layer in range(1, depth + 1)]
    assert found.activation_gradient_norm == pytest.approx(coming_down)
    assert found.gradient_norm == pytest.approx(coming_down)  # of a bias: that of the output
    assert found.first_to_last == pytest.approx(gain ** (depth - 1))
    assert [found.slope, found.activation_slope] == pytest.approx([-math.log(gain)] * 2, abs=1e-6)
    assert found.rms_growth == pytest.approx(gain ** (depth - 1))
    assert found.mean_similarity == pytest.approx(math.cos(ANGLE))


def test_a_stack_of_matrices() -> None:
    """|dL/dW_l| = |w| a^(L - l) |x_(l - 1)|: what falls on the way up rises on the way down."""

    class Stretch(Turn):
        def __init__(self, gain: float) -> None:
            super().__init__(gain)
            self.weight = nn.Parameter(self.matrix.clone())
            del self.bias

        def forward(self, x: Tensor, real: Tensor) -> tuple[Tensor, str]:
            return x @ self.weight.T, ""

    for gain in (0.5, 2.0):
        stack = [Stretch(gain) for _ in range(6)]
        found = profile({"stack": stack}, lambda stack=stack: loss_of(stack).sum())["stack"]
        assert found.gradient_norm == pytest.approx([5 * gain**5] * 6)
        assert found.slope == pytest.approx(0, abs=1e-6)
        assert found.activation_slope == pytest.approx(-math.log(gain))


def test_stacks_are_told_apart_and_streams_may_be_trees() -> None:
    class Two(Turn):
        def forward(self, x: Tensor, real: Tensor) -> tuple[tuple[Tensor, list[Tensor]], str]:  # type: ignore[override]
            turned, _ = super().forward(x[0] if isinstance(x, tuple) else x, real)
            return (turned, [2 * turned]), ""

        def observe(self, inputs, output):
            return output[0][0], inputs[1]

    first, second = [Turn(1.0)], [Two(1.0), Two(1.0)]

    def loss() -> Tensor:
        x, _ = first[0](TOKENS, REAL)
        x, _ = second[0](x, REAL)
        (x, (doubled,)), _ = second[1](x, REAL)
        return (x + doubled)[REAL][0, 0]

    found = profile({"first": first, "second": second}, loss)
    assert [found[name].layers for name in ("first", "second")] == [1, 2]
    assert math.isnan(found["first"].slope)
    assert found["first"].similarity == []
    assert math.isnan(found["first"].mean_similarity)
    assert found["second"].activation_gradient_norm[1] == pytest.approx(math.hypot(3, 1))  # 1 + 2 directly, and 1


def test_nothing_is_left_behind() -> None:
    stack = [Turn(1.0), Turn(1.0)]
    for layer in stack:
        layer.bias.grad = torch.full((2,), 7.0)

    def fails() -> Tensor:
        loss_of(stack)
        raise RuntimeError

    assert profile({"stack": stack}, lambda: loss_of(stack).sum())["stack"].gradient_norm == pytest.approx([1, 1])
    with pytest.raises(RuntimeError):
        profile({"stack": stack}, fails)
    assert all(layer.bias.grad is None and not layer._forward_hooks for layer in stack)


def test_slopes_and_ratios_of_what_has_no_logarithm() -> None:
    assert log_slope([1.0, math.e, math.e**2]) == pytest.approx(1)
    assert log_slope([0.0, math.nan, 1.0, math.inf, math.e**4]) == pytest.approx(2)
    assert math.isnan(log_slope([0.0, 1.0]))
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(1.0, 0.0) == math.inf
    assert math.isnan(ratio(0.0, 0.0))


# ---------------------------------------------------------------------- verdicts


def made(gradient: Sequence[float], rms: Sequence[float] | None = None) -> Profile:
    return Profile(list(rms or [1.0] * len(gradient)), [], [], list(gradient), list(gradient))


BOUND = MARGIN * 2  # of four layers
VERDICTS = {
    "healthy": [made([1, 2, 3, 1]), made([0.99 * BOUND, 1, 1, 1]), made([1, 1, 1, 0.99 * BOUND]), made([1])],
    "vanishing": [made([1, 1, 1, 1.01 * BOUND]), made([0, 0, 0, 1])],
    "exploding": [made([1.01 * BOUND, 1, 1, 1]), made([1, 1, 1, 0])],
    "signal explodes": [made([9, 1, 1, 1], [1, 1, 1, 1.01 * BOUND])],
    "signal vanishes": [made([1] * 4, [1.01 * BOUND, 1, 1, 1])],
    "no gradient": [made([0.0] * 4)],
    "not finite": [made([1, math.nan, 1, 1]), made([1] * 4, [1, 1, 1, math.inf])],
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name: str) -> None:
    for found in VERDICTS[name]:
        assert judge(found).name == name
        assert len(judge(found).words.split()) > 3
    assert "towards the input: layer 1 receives 0.1 times" in judge(made([1, 1, 1, 10.0])).words


# ---------------------------------------------------------------------- against the papers


def look_at(model: EncoderDecoder, source: Tensor, target: Tensor) -> dict[str, Profile]:
    """The profile of a model in training mode at the loss on its target."""

    def loss() -> Tensor:
        logits = model.train().project(model(source, target[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)

    return profile({stack: list(getattr(model, stack).layers) for stack in ("encoder", "decoder")}, loss)


@pytest.mark.parametrize("depth", [8, 24])
@pytest.mark.parametrize("placement", [PostNorm(), PreNorm()], ids=lambda placement: type(placement).__name__)
def test_post_norm_and_pre_norm_are_as_derived(placement: PostNorm | PreNorm, depth: int) -> None:
    stabilizer = Stabilizer(placement)
    model = model_of(stabilizer, depth, depth, width=64, heads=4, hidden=256)
    found = look_at(model, sentences(16, 12), sentences(16, 13))
    for stack in ("encoder", "decoder"):
        derived = theory(stabilizer, stack, depth)
        assert derived is not None
        assert derived.agrees(found[stack])
    decoder = found["decoder"]
    if type(placement) is PostNorm:
        assert decoder.slope > 0.2
        assert decoder.activation_slope > 0.2
        assert decoder.rms_growth == pytest.approx(1, rel=1e-3)
        assert depth == 8 or judge(decoder).name == "vanishing"
    else:
        assert -0.2 < decoder.slope <= 0.01
        assert -0.2 < decoder.activation_slope <= 0.01
        assert 1.5 < decoder.rms_growth < math.sqrt((1 + 1.5 * depth) / 1.5)
        assert judge(decoder).name == "healthy"
        assert all(low < high for low, high in pairwise(decoder.similarity[:: depth // 4]))  # less and less is changed
    assert judge(found["encoder"]).name == "healthy"


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("depth", [6, 24])
def test_each_theory_is_at_odds_with_the_other_placement(depth: int, stack: str) -> None:
    """In an encoder the gradient is flat before training under both, and the size of the stream tells them apart."""
    for mine, others in ((PostNorm(), PreNorm()), (PreNorm(), PostNorm())):
        model = model_of(Stabilizer(mine), depth, depth, width=64, heads=4, hidden=256)
        found = look_at(model, sentences(16, 12), sentences(16, 13))
        own, other = (theory(Stabilizer(placement), stack, depth) for placement in (mine, others))
        assert own is not None
        assert own.agrees(found[stack])
        assert other is not None
        assert not other.agrees(found[stack])


def test_the_derivations_hold_for_plain_stacks_alone() -> None:
    for stabilizer in (
        Stabilizer(B2T()),
        Stabilizer(PostNorm(), ScaledSum(0.5)),
        Stabilizer(PreNorm(), norm=RMSNorm()),
        STARTS["gpt2"][0],
        STABILIZERS["qk_norm"][0],
    ):
        assert theory(stabilizer, "decoder", 12) is None
    assert theory(Stabilizer(PreNorm()), "encoder", 1) is None
    flat = theory(Stabilizer(PreNorm()), "encoder", 9)
    assert flat is not None
    assert (flat.least, flat.most) == (pytest.approx(-math.log(3) / 8), 0)


@every_stabilizer
def test_every_stabilizer_has_a_profile(name: str) -> None:
    found = look_at(model_of(name), SOURCE, F.pad(TARGET, (0, 1)))
    for stack, depth in (("encoder", 2), ("decoder", 3)):
        assert found[stack].layers == len(found[stack].activation_gradient_norm) == depth
        assert len(found[stack].similarity) == len(found[stack].similarity_centered) == depth - 1
        assert judge(found[stack]).name != "not finite"


def test_branches_that_start_at_zero_hand_the_encoder_no_gradient() -> None:
    found = look_at(model_of(Stabilizer(PreNorm(), ReZero())), SOURCE, F.pad(TARGET, (0, 1)))
    assert judge(found["encoder"]).name == "no gradient"
    assert all(norm > 0 for norm in found["decoder"].gradient_norm)
