"""Residuals that weigh the branch, the skip or the chance of a branch, against their published equations.

Formulas from the papers: Admin arXiv:2004.08249 (and its released code), ReZero arXiv:2003.04887, SkipInit
arXiv:2002.10444, LayerScale arXiv:2103.17239, BranchNorm arXiv:2305.02790, stochastic depth arXiv:1603.09382.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from stabilize.data.batch import Batch
from stabilize.errors import UserError
from stabilize.model import EncoderDecoder, Sizes, Stack
from stabilize.strategies import (
    B2T,
    DLCL,
    DeepNormResidual,
    HyperConnections,
    NoNorm,
    Part,
    PostNorm,
    PreNorm,
    ResiDual,
    Residual,
    Stabilizer,
    Sum,
)
from stabilize.strategies.norm import MaskedBatchNorm
from stabilize.strategies.residual import (
    AdminClosedForm,
    AdminResidual,
    BranchNorm,
    LayerScale,
    ReZero,
    SkipInit,
    StochasticDepth,
)
from stabilize.strategies.site import DECODER_ROLES, ENCODER_ROLES
from tests.models import assert_equal, disturb, model_of, sentences
from tests.strategies.wiring import (
    DECODER_LAYERS,
    ENCODER_LAYERS,
    WIDTH,
    branches,
    final_norm,
    run,
    stack_of,
    with_known_branches,
)

sides = pytest.mark.parametrize("side", ["encoder", "decoder"])


def placed(residual: Residual, side: str, layers: int = 3, layer: int = 1, role: str = "feed_forward") -> Residual:
    """The copy at one branch of a stack of so many layers, the other stack one deeper."""
    depths = (layers, layers + 1) if side == "encoder" else (layers + 1, layers)
    site = Sizes(*depths, WIDTH, 3).site(side, layer, role)
    return residual.at(site, norm=functools.partial(Stabilizer().make_norm, precision="32-true"))


def moved(stack: Stack, update: int = 2) -> tuple[Stack, Tensor]:
    disturb(stack, 0.3, update)
    return stack, torch.randn(2, 5, WIDTH)


# ---------------------------------------------------------------- Admin


def chain(x: Tensor, stack: Stack, profile: str) -> Iterator[float]:
    """The omegas that a profile gives, branch by branch.

    Paper: omega_1 = 1, omega_i = sqrt(sum of Var f_j over j < i), profiled with every omega at 1.
    Released code: omega_1 = 1, omega_(i+1) = sqrt(Var(omega_i x_(i-1)) + Var f_i), profiled as they come.
    """
    omega, total = 1.0, 0.0
    for f, norm, *_ in branches(*stack.layers):
        yield omega
        branch = f(x)
        if profile == "paper":
            total += branch.var(unbiased=False).item()
            x, omega = norm(x + branch), math.sqrt(total)
        else:
            skip = omega * x
            omega = math.sqrt(skip.var(unbiased=False).item() + branch.var(unbiased=False).item())
            x = norm(skip + branch)


def omegas(stack: Stack) -> list[Tensor]:
    """One vector a branch."""
    found = [list(weights.parameters()) for *_, weights in branches(*stack.layers)]
    assert all(len(parameters) == 1 for parameters in found)
    return [omega for (omega,) in found]


def profiled(profile: str) -> tuple[EncoderDecoder, Batch]:
    """A model of known branches, prepared as a run prepares it: every part of it is asked in turn."""
    stabilizer = Stabilizer(PostNorm(), AdminResidual(profile))
    model = model_of(stabilizer, ENCODER_LAYERS, DECODER_LAYERS, width=WIDTH, heads=3)
    for stack in (model.encoder, model.decoder):
        with_known_branches(stack)
    for parameter in model.parameters():
        parameter.data.mul_(1.7)  # no branch as strong as the next one
    for stack in (model.encoder, model.decoder):
        for omega in omegas(stack):
            omega.data.fill_(1.0)
    batch = Batch(sentences(24, 16), sentences(24, 17), torch.arange(24))
    for part in list(model.modules()):
        if isinstance(part, Part):
            part.prepare(model, batch)
    return model, batch


@pytest.mark.parametrize("profile", ["paper", "released"])
@torch.no_grad()
def test_admin_profiles_both_stacks(profile: str) -> None:
    model, batch = profiled(profile)
    inputs = (model.source_embedding(batch.source), model.target_embedding(batch.target[:, :-1]))
    for stack, x in zip((model.encoder, model.decoder), inputs, strict=True):
        expected = list(chain(x, stack, profile))
        assert expected[0] == 1
        assert max(expected) > 1.5
        for omega, value in zip(omegas(stack), expected, strict=True):
            torch.testing.assert_close(omega.data, torch.full((WIDTH,), value), rtol=2e-3, atol=0)
            assert omega.requires_grad


@pytest.mark.parametrize("profile", ["paper", "released"])
def test_a_profile_leaves_no_trace_but_the_omegas(profile: str) -> None:
    model = model_of(Stabilizer(PostNorm(), AdminResidual(profile)), dropout=0.3).train()
    batch = Batch(sentences(6, 5), sentences(6, 7), torch.arange(6))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for part in list(model.modules()):
        if isinstance(part, Part):
            part.prepare(model, batch)
    assert torch.get_rng_state().equal(state)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    found = {id(parameter) for layer in model.layers for b in layer.branches for parameter in b.residual.parameters()}
    changed = {name for name, value in model.named_parameters() if not value.equal(before[name])}
    assert changed <= {name for name, value in model.named_parameters() if id(value) in found}
    assert len(changed) >= 2 * 2 + 3 * 3 - 2  # all but the first of each stack, which stays at one
    assert all(value.equal(before[name]) for name, value in model.named_buffers() if name in before)
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in model.modules())


@sides
def test_admin_scales_the_skip_by_a_vector(side: str) -> None:
    """x <- norm(omega x + f(x)), omega one before the profile."""
    stack = stack_of(Stabilizer(PostNorm(), AdminResidual()), side)
    assert all(omega.eq(1).all() and omega.shape == (WIDTH,) for omega in omegas(stack))
    stack, first = moved(stack)
    x = first
    for (f, norm, *_), omega in zip(branches(*stack.layers), omegas(stack), strict=True):
        x = norm(omega * x + f(x))
    assert_equal(run(stack, first), x, 3e-6)


OUTPUT_CHANGES = {
    "logarithmic": lambda n: math.sqrt((n + 1) / math.log(n + 1) - 1),
    "constant": lambda n: math.sqrt(n),
    "linear": lambda n: 1.0,
}


@sides
@pytest.mark.parametrize("change", OUTPUT_CHANGES)
@pytest.mark.parametrize("layers", [1, 6, 37])
def test_admins_closed_form_counts_the_branches_of_its_stack(change: str, layers: int, side: str) -> None:
    """omega of n = 2 N branches in the encoder, 3 M in the decoder; no parameter."""
    residual = placed(AdminClosedForm(change), side, layers)
    x, f = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    n = layers * (2 if side == "encoder" else 3)
    assert not list(residual.parameters())
    assert_equal(residual.write(x, f), OUTPUT_CHANGES[change](n) * x + f)


@pytest.mark.parametrize(
    ("depth", "omega"), [(6, 2.0170), (12, 2.6013), (18, 3.0408), (50, 4.5700), (100, 6.0746), (500, 11.995)]
)
def test_admins_closed_form_to_four_digits(depth: int, omega: float) -> None:
    residual = placed(AdminClosedForm(), "encoder", depth)
    found = residual.write(torch.ones(1, 1, WIDTH), torch.zeros(1, 1, WIDTH))
    assert found.flatten()[0].item() == pytest.approx(omega, abs=5.1e-5 if omega < 10 else 5.1e-4)


# ---------------------------------------------------------------- scales of the branch


@sides
def test_rezero_shares_one_scalar_a_layer(side: str) -> None:
    """x <- x + a_l f(x), no norm; the branches of a layer share a_l, zero at the start."""
    stack = stack_of(Stabilizer(NoNorm(), ReZero()), side)
    x = torch.randn(2, 5, WIDTH)
    assert run(stack, x).equal(x)
    scales = [list(layer.link.parameters()) for layer in stack.layers]
    assert [scale.numel() for (scale,) in scales] == [1] * len(stack.layers)
    for layer, (scale,) in zip(stack.layers, scales, strict=True):
        assert all(parameter is scale for *_, weights in branches(layer) for parameter in weights.parameters())
    assert not list(stack.end.parameters())

    stack, first = moved(stack)
    x = first
    for layer, (scale,) in zip(stack.layers, scales, strict=True):
        for f, *_ in branches(layer):
            x = x + scale.squeeze() * f(x)
    assert_equal(run(stack, first), x, 3e-6)


@sides
def test_rezero_under_pre_norm(side: str) -> None:
    stack, first = moved(stack_of(Stabilizer(PreNorm(), ReZero()), side))
    x = first
    for layer in stack.layers:
        (scale,) = layer.link.parameters()
        for f, norm, *_ in branches(layer):
            x = x + scale.squeeze() * f(norm(x))
    assert_equal(run(stack, first), final_norm(stack)(x), 3e-6)


@sides
@pytest.mark.parametrize("wrapped", [False, True])
def test_rezero_under_post_norm(side: str, wrapped: bool) -> None:
    """x <- norm(x + a_l f(x)), around which nothing is skipped in evaluation."""
    residual = StochasticDepth(ReZero(), 0.5) if wrapped else ReZero()
    stack, first = moved(stack_of(Stabilizer(PostNorm(), residual), side).eval())
    x = first
    for layer in stack.layers:
        (scale,) = layer.link.parameters()
        for f, norm, *_ in branches(layer):
            x = norm(x + scale.squeeze() * f(x))
    assert_equal(run(stack, first), x, 3e-6)


@sides
@pytest.mark.parametrize("start", [0.0, 0.7, "rsqrt_branches"])
def test_skip_init_has_one_scalar_a_branch(start: float | str, side: str) -> None:
    """x <- x + a f(norm(x)); a starts at 0 or one over the root of the stack's number of branches."""
    stack = stack_of(Stabilizer(PreNorm(), SkipInit(start)), side)
    scales = [list(weights.parameters()) for *_, weights in branches(*stack.layers)]
    count = 2 * ENCODER_LAYERS if side == "encoder" else 3 * DECODER_LAYERS
    expected = 1 / math.sqrt(count) if start == "rsqrt_branches" else start
    assert len(scales) == count
    assert all(scale.numel() == 1 and scale.item() == pytest.approx(expected) for (scale,) in scales)

    stack, first = moved(stack)
    x = first
    for (f, norm, *_), (scale,) in zip(branches(*stack.layers), scales, strict=True):
        x = x + scale.squeeze() * f(norm(x))
    assert_equal(run(stack, first), final_norm(stack)(x), 3e-6)


@sides
def test_layer_scale_has_a_vector_a_branch(side: str) -> None:
    stack, first = moved(stack_of(Stabilizer(PreNorm(), LayerScale()), side))
    x = first
    for f, norm, _, weights in branches(*stack.layers):
        (scale,) = weights.parameters()
        assert scale.shape == (WIDTH,)
        x = x + scale * f(norm(x))
    assert_equal(run(stack, first), final_norm(stack)(x), 3e-6)


@sides
@pytest.mark.parametrize(
    ("layers", "start", "expected"),
    [
        (1, None, 0.1),
        (18, None, 0.1),
        (19, None, 1e-5),
        (24, None, 1e-5),
        (25, None, 1e-6),
        (100, None, 1e-6),
        (3, 0.3, 0.3),
        (48, 1e-4, 1e-4),
    ],
)
def test_layer_scale_starts_by_the_depth_of_its_stack(
    layers: int, start: float | None, expected: float, side: str
) -> None:
    """0.1 up to 18 layers, 1e-5 up to 24, 1e-6 deeper."""
    (scale,) = placed(LayerScale(start), side, layers).parameters()
    assert scale.tolist() == pytest.approx([expected] * WIDTH)


@sides
def test_branch_norm_grows_the_branch_with_the_update(side: str) -> None:
    """x <- norm(x + alpha_t f(x)), alpha_t = min(1, t / T): post-norm from T on."""
    stack, first = moved(stack_of(Stabilizer(PostNorm(), BranchNorm(8)), side), update=0)
    for done in [0, 1, 2, 5, 7, 8, 9, 100]:
        if done:
            for part in stack.modules():
                if isinstance(part, Part):
                    part.after_update(done)
        alphas = [alpha(weights) for *_, weights in branches(*stack.layers)]
        # The next update is number done + 1. The paper does not say which of the two it calls t.
        assert alphas == [alphas[0]] * len(alphas)
        assert alphas[0] in (pytest.approx(min(1, done / 8)), pytest.approx(min(1, (done + 1) / 8)))
        x = first
        for f, norm, *_ in branches(*stack.layers):
            x = norm(x + alphas[0] * f(x))
        assert_equal(run(stack, first), x, 3e-6)
        assert_equal(run(stack.eval(), first), x, 3e-6)


def alpha(residual: nn.Module) -> float:
    return residual.write(torch.zeros(1, 1, WIDTH), torch.ones(1, 1, WIDTH)).flatten()[0].item()


def test_branch_norms_clock_is_saved() -> None:
    stack, other = (stack_of(Stabilizer(PostNorm(), BranchNorm(8)), "encoder") for _ in range(2))
    for part in stack.modules():
        if isinstance(part, Part):
            part.after_update(3)
    other.load_state_dict(stack.state_dict())
    assert [alpha(weights) for *_, weights in branches(*other.layers)] == [
        alpha(weights) for *_, weights in branches(*stack.layers)
    ]


# ---------------------------------------------------------------- stochastic depth


def roles(side: str) -> tuple[str, ...]:
    return ENCODER_ROLES if side == "encoder" else DECODER_ROLES


def rates(side: str, layers: int, rate: float, first: str = "kept") -> list[float]:
    """The chance to be dropped of each branch, as its scale says and many sentences bear out."""
    shares = []
    for layer in range(1, layers + 1):
        for role in roles(side):
            residual = placed(StochasticDepth(rate=rate, first=first), side, layers, layer, role).train()
            written = residual.write(torch.zeros(6000, 2, WIDTH), torch.ones(6000, 2, WIDTH))
            assert written.eq(written[:, :1, :1]).all()  # one draw a sentence
            kept = written[:, 0, 0] > 0
            if kept.any():
                assert len(written[kept].unique()) == 1
                shares.append(1 - 1 / written[kept][0, 0, 0].item())
            assert 1 - kept.float().mean().item() == pytest.approx(shares[-1], abs=0.025)
    return shares


@sides
def test_the_chance_to_be_dropped_grows_linearly_from_zero(side: str) -> None:
    """p_l = rate (l - 1) / (L - 1), every branch of a layer; a branch that is kept is divided by 1 - p_l."""
    expected = [0.6 * layer / 3 for layer in range(4) for _ in roles(side)]
    assert rates(side, 4, 0.6) == pytest.approx(expected, abs=1e-6)


@sides
def test_the_paper_drops_the_first_layer_too(side: str) -> None:
    """p_l = rate l / L (Huang et al. 2016, equation 4)."""
    expected = [0.6 * layer / 4 for layer in range(1, 5) for _ in roles(side)]
    assert rates(side, 4, 0.6, "dropped") == pytest.approx(expected, abs=1e-6)


def test_one_layer_alone_is_never_dropped() -> None:
    assert rates("encoder", 1, 0.5) == [0, 0]


AROUND = {"sum": Sum(), "deep_norm": DeepNormResidual(), "hyper_connections": HyperConnections()}
AROUND["dynamic_hyper_connections"] = HyperConnections(dynamic=True)
around = pytest.mark.parametrize("name", AROUND)


def dropping(name: str, side: str, rate: float = 0.5) -> tuple[Residual, Residual]:
    """The last layer's copy, and the residual within it on its own, with the same weights."""
    twins = []
    for residual in (StochasticDepth(AROUND[name], rate), AROUND[name]):
        torch.manual_seed(4)
        twins.append(placed(residual, side, layer=3))
        disturb(twins[-1], 0.3)
    return twins[0], twins[1]


@sides
@around
def test_a_dropped_branch_is_one_of_zeros(name: str, side: str) -> None:
    residual, inner = dropping(name, side)
    x, f = torch.randn(64, 3, WIDTH), torch.randn(64, 3, WIDTH)
    stream = inner.start(x)
    written = residual.train().write(residual.start(x), f)
    dropped, kept = inner.write(stream, torch.zeros_like(f)), inner.write(stream, f / 0.5)
    batch = stream.ndim - 3  # the dimension of the sentences
    count = {"dropped": 0, "kept": 0}
    for found, one, other in zip(*(y.unbind(batch) for y in (written, dropped, kept)), strict=True):
        is_dropped = torch.allclose(found, one, atol=1e-5)
        count["dropped" if is_dropped else "kept"] += 1
        assert is_dropped or torch.allclose(found, other, atol=1e-5)
    assert min(count.values()) > 15


@sides
@around
def test_evaluation_drops_nothing(name: str, side: str) -> None:
    residual, inner = dropping(name, side)
    x, f = torch.randn(8, 3, WIDTH), torch.randn(8, 3, WIDTH)
    stream = residual.eval().start(x)
    assert residual.read(stream).equal(inner.read(inner.start(x)))
    assert residual.write(stream, f).equal(inner.write(inner.start(x), f))
    assert residual.end(stream).equal(inner.end(inner.start(x)))


@around
def test_the_mean_over_many_draws_is_the_whole_branch(name: str) -> None:
    residual, inner = dropping(name, "encoder", rate=0.3)
    x, f = torch.randn(1, 3, WIDTH).expand(20_000, 3, WIDTH), torch.randn(1, 3, WIDTH).expand(20_000, 3, WIDTH)
    written, whole = residual.train().write(residual.start(x), f), inner.write(inner.start(x), f)
    batch = written.ndim - 3
    assert_equal(written.mean(batch), whole.select(batch, 0), 0.05)


@sides
@pytest.mark.parametrize("residual", [Sum(), DeepNormResidual(), HyperConnections(), DLCL(), ReZero(), LayerScale()])
def test_all_else_is_the_residual_within(residual: Residual, side: str) -> None:
    """A stack of many kinds of stream is in evaluation what it is without stochastic depth."""
    outputs = []
    for chosen in (StochasticDepth(residual, 0.5), residual):
        torch.manual_seed(5)
        stack = stack_of(Stabilizer(PreNorm(), chosen), side)
        stack, x = moved(stack)
        outputs.append(run(stack.eval(), x))
    assert_equal(*outputs)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_outside_its_range_is_refused(rate: float) -> None:
    with pytest.raises(UserError, match=rf"residual\.rate is {rate}"):
        StochasticDepth(rate=rate)


@pytest.mark.parametrize(
    ("inner", "others", "named"),
    [
        (HyperConnections(), {"placement": PostNorm()}, ("HyperConnections", "PostNorm")),
        (HyperConnections(), {"placement": B2T()}, ("HyperConnections", "B2T")),
        (DLCL(), {"placement": ResiDual()}, ("DLCL", "ResiDual")),
        (DLCL(), {"norm": MaskedBatchNorm()}, ("DLCL", "MaskedBatchNorm")),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, tuple) else "",
)
def test_what_the_residual_within_cannot_join_is_refused_around_it_too(
    inner: Residual, others: dict, named: tuple[str, str]
) -> None:
    with pytest.raises(UserError) as caught:
        Stabilizer(residual=StochasticDepth(inner), **others)
    assert all(name in str(caught.value) for name in named)
