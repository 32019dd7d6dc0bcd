"""Norms with statistics over the real tokens of a batch: what they learn from it, and when."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from stabilize.errors import UserError
from stabilize.model import EncoderDecoder, Sizes
from stabilize.strategies import DLCL, Part, QKNorm, Stabilizer
from stabilize.strategies.norm import AcrossHeads, LayerNorm, MaskedBatchNorm, Norm, PowerNorm
from tests.models import SOURCE, TARGET, VOCABULARY, assert_equal, disturb

WIDTH, EPSILON = 6, 1e-5
SITE = Sizes(2, 2, WIDTH, 2, 8).site("encoder", 1, "feed_forward")
REAL = torch.tensor([[True, True, True, True], [True, True, False, False], [True, False, False, False]])

both = pytest.mark.parametrize("norm", [MaskedBatchNorm(), PowerNorm(), PowerNorm(warmup=0, groups=2)], ids=repr)


def placed(norm: Norm, deviation: float = 0.3) -> Norm:
    found = norm.at(SITE, epsilon=EPSILON)
    disturb(found, deviation, update=0)
    return found


def batches(count: int = 4) -> list[Tensor]:
    return [0.5 + 2 * torch.randn(*REAL.shape, WIDTH) for _ in range(count)]


# ---------------------------------------------------------------- batch norm


@pytest.mark.parametrize("momentum", [0.1, 0.5])
def test_batch_norm_is_torchs_over_the_real_tokens(momentum: float) -> None:
    """Outputs, gradients and running statistics over several updates, then evaluation."""
    norm, torchs = placed(MaskedBatchNorm(momentum)), nn.BatchNorm1d(WIDTH, EPSILON, momentum)
    torchs.weight.data, torchs.bias.data = norm.gain.data.clone(), norm.bias.data.clone()
    for update, x in enumerate(batches(), 1):
        x.requires_grad_()
        weight = torch.randn_like(x)
        found, expected = norm(x, REAL)[REAL], torchs(x[REAL])
        assert_equal(found, expected, 1e-5)
        for one, other in zip(
            torch.autograd.grad((found * weight[REAL]).sum(), [x, norm.gain, norm.bias]),
            torch.autograd.grad((expected * weight[REAL]).sum(), [x, torchs.weight, torchs.bias]),
            strict=True,
        ):
            assert_equal(one, other, 1e-5)
        norm.after_update(update)
        assert_equal(norm.running_mean, torchs.running_mean)
        assert_equal(norm.running_variance, torchs.running_var)
    assert_equal(norm.eval()(x, REAL)[REAL], torchs.eval()(x[REAL]), 1e-5)


def test_batch_norm_has_one_statistic_for_all_heads() -> None:
    norm, x = placed(MaskedBatchNorm()), torch.randn(3, 2, 4, WIDTH)
    found = norm(x, REAL).transpose(1, 2)[REAL]
    assert_equal(found, norm(x.transpose(1, 2)[REAL][:, None]).squeeze(1), 1e-5)


@both
def test_across_heads_the_norm_is_that_of_the_whole_width(norm: Norm) -> None:
    x = torch.randn(3, 4, WIDTH)
    one, other = placed(norm), placed(norm)
    other.load_state_dict(one.state_dict())
    split = x.unflatten(-1, (2, 3)).transpose(1, 2)
    assert_equal(AcrossHeads(one)(split, REAL).transpose(1, 2).flatten(2), other(x, REAL))


# ---------------------------------------------------------------- power norm


class Reference:
    """PowerNorm as in its paper's algorithm 2, on real tokens `[tokens, width]`, cut down to the equations."""

    def __init__(self, norm: PowerNorm, warmup: int) -> None:
        self.gain, self.bias = norm.gain.detach(), norm.bias.detach()
        self.psi, self.ema_gz, self.update, self.warmup = torch.ones(WIDTH), torch.zeros(WIDTH), 0, warmup

    def step(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Output, and the gradient of x, for the output's gradient."""
        self.update += 1
        batch = x.square().mean(0)
        root = ((batch if self.update <= self.warmup else self.psi) + EPSILON).sqrt()
        z = x / root
        self.psi = 0.9 * self.psi + 0.1 * batch
        g = gradient * self.gain
        approximate = g - (1 - 0.9) * self.ema_gz * z
        self.ema_gz = self.ema_gz + (approximate * z).mean(0)
        return self.gain * z + self.bias, approximate / root


@pytest.mark.parametrize("warmup", [0, 2, 100])
@pytest.mark.parametrize("groups", [1, 2])
def test_power_norm_goes_forward_and_backward_as_written(warmup: int, groups: int) -> None:
    norm = placed(PowerNorm(warmup=warmup, groups=groups))
    reference = Reference(norm, warmup)
    for update, x in enumerate(batches(6), 1):
        x.requires_grad_()
        grouped = x.unflatten(-1, (groups, -1))
        scaled = (grouped / (grouped.square().mean(-1, keepdim=True) + EPSILON).sqrt()).flatten(-2)[REAL]
        weight = torch.randn_like(x)
        output, gradient = reference.step(scaled.detach(), weight[REAL])

        found = norm(x, REAL)
        assert_equal(found[REAL], output, 1e-5)
        (found * weight).sum().backward()
        assert_equal(x.grad, torch.autograd.grad((scaled * gradient).sum(), x)[0], 1e-5)
        norm.after_update(update)
        assert_equal(norm.quadratic_mean, reference.psi, 1e-5)
        assert_equal(norm.nu, 0.1 * reference.ema_gz, 1e-5)
    assert norm.nu.abs().max() > 0.01
    assert_equal(norm.eval()(x, REAL)[REAL], norm.gain * scaled / (reference.psi + EPSILON).sqrt() + norm.bias, 1e-5)


def test_power_norms_nu_is_a_mean_over_all_batches_of_an_update() -> None:
    """Six sentences at once, or in two batches of which the second has fewer real tokens."""
    norm = placed(PowerNorm(warmup=0))
    other, (first, second) = copy.deepcopy(norm), batches(2)
    weights = torch.randn(2, *first.shape)
    for x, real, weight in ((first, REAL, weights[0]), (second, REAL[[2, 2, 2]], weights[1])):
        (norm(x, real) * weight).sum().backward()
    (other(torch.cat((first, second)), torch.cat((REAL, REAL[[2, 2, 2]]))) * weights.flatten(0, 1)).sum().backward()
    norm.after_update(1)
    other.after_update(1)
    assert norm.nu.abs().max() > 0
    assert_equal(norm.nu, other.nu)


def test_power_norms_nu_outlives_a_gradient_that_overflows() -> None:
    norm, (x,) = placed(PowerNorm()), batches(1)
    (norm(x, REAL) * torch.inf).sum().backward()
    norm.after_update(1)
    assert norm.nu.isfinite().all()


def test_power_norm_in_another_format_still_gathers() -> None:
    """As on another device: the buffer that takes in the gradient has to be a leaf there too."""
    norm = copy.deepcopy(placed(PowerNorm()).bfloat16())
    norm(batches(1)[0].bfloat16(), REAL).square().sum().backward()
    norm.after_update(1)
    assert norm.nu.abs().max() > 0


# ---------------------------------------------------------------- both


@both
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 5)])
@pytest.mark.parametrize("tokens", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_tokens_are_finite(norm: Norm, shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> None:
    norm = placed(norm).to(dtype)
    assert all(value.dtype == torch.float32 for name, value in norm.named_buffers() if name != "warm")
    x = (300 * torch.randn(*shape, WIDTH)).to(dtype).requires_grad_()
    real = (torch.arange(shape[0] * shape[1]) < tokens).view(shape)
    for update in (1, 2, 3):
        output = norm(x, real)
        output.clamp(-1, 1).sum().backward()
        norm.after_update(update)
        assert output.dtype == dtype
        assert output.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(value.isfinite().all() for value in norm.state_dict().values())
    if tokens == 0:
        assert all(value.unique().numel() == 1 for name, value in norm.named_buffers() if name != "warm")


@both
@pytest.mark.parametrize("training", [True, False])
def test_what_padding_holds_changes_nothing(norm: Norm, training: bool) -> None:
    x, found = batches(1)[0], []
    for filler in (0.0, 1e4, torch.nan):
        twin = copy.deepcopy(placed(norm, 0.0)).train(training)
        leaf = torch.where(REAL[..., None], x, torch.tensor(filler)).requires_grad_()
        output = twin(leaf, REAL)
        output.square().sum().backward()
        twin.after_update(1)
        found.append((output, leaf.grad, *twin.state_dict().values()))
    for one, other in zip(found[0], found[1], strict=True):
        assert one.equal(other)
    assert all(value.isfinite().all() for value in found[2])


@both
def test_statistics_move_only_after_an_update(norm: Norm) -> None:
    norm, (x,) = placed(norm), batches(1)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    for _ in range(3):
        norm(x, REAL).square().sum().backward()
        assert all(value.equal(before[name]) for name, value in norm.state_dict().items())
    norm.after_update(1)
    moved = {name for name, value in norm.state_dict().items() if not value.equal(before[name])}
    assert moved - {"warm"} == set(before) - {"gain", "bias", "warm"}


@both
def test_a_layer_computed_twice_has_seen_its_batch_once(norm: Norm) -> None:
    """Activation checkpointing: the same statistics after updates as without it."""
    torch.manual_seed(0)
    plain = EncoderDecoder(VOCABULARY, Sizes(2, 2, 16, 2, 32, dropout=0.0), Stabilizer(norm=norm))
    again = copy.deepcopy(plain)
    for layer in again.layers:
        layer.checkpointed = True
    for update in (1, 2, 3):
        for model in (plain, again):
            model(SOURCE, TARGET).square().mean().backward()
            for part in model.modules():
                if isinstance(part, Part):
                    part.after_update(update)
    for (name, one), (_, other) in zip(plain.state_dict().items(), again.state_dict().items(), strict=True):
        assert one.isfinite().all()
        assert one.equal(other), name


@both
def test_a_saved_norm_goes_on_as_if_it_had_not_stopped(norm: Norm) -> None:
    first, second = placed(norm), placed(norm)
    for update, x in enumerate(batches(4), 1):
        if update == 3:
            second.load_state_dict(first.state_dict())
        for one in (first, second) if update > 2 else (first,):
            one(x, REAL).square().sum().backward()
            one.after_update(update)
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert one.equal(other)


@both
@pytest.mark.parametrize("part", [QKNorm(), DLCL()], ids=lambda part: type(part).__name__)
def test_parts_that_norm_without_a_mask_refuse_them(norm: Norm, part: Part) -> None:
    axis = "attention" if isinstance(part, QKNorm) else "residual"
    with pytest.raises(UserError, match=f"{type(part).__name__} cannot be combined with {type(norm).__name__}"):
        Stabilizer(norm=norm, **{axis: part})
    Stabilizer(norm=LayerNorm(), **{axis: part})


@both
def test_in_the_decoder_they_are_warned_about(norm: Norm) -> None:
    sizes = Sizes(2, 2, WIDTH, 2, 8)
    found = [Stabilizer(norm=norm).warnings(sizes.site(side, 1, "layer"), "32-true") for side in ("encoder", "decoder")]
    assert [len(warnings) for warnings in found] == [0, 1]
    assert type(norm).__name__ in found[1][0]


@pytest.mark.parametrize(
    ("made", "key"),
    [
        (lambda: MaskedBatchNorm(0.0), "momentum"),
        (lambda: MaskedBatchNorm(float("nan")), "momentum"),
        (lambda: PowerNorm(forward_decay=1.0), "forward_decay"),
        (lambda: PowerNorm(backward_decay=-0.1), "backward_decay"),
        (lambda: PowerNorm(warmup=-1), "warmup"),
        (lambda: PowerNorm(groups=0), "groups"),
        (lambda: PowerNorm(groups=4).at(SITE, epsilon=EPSILON), "groups"),
    ],
)
def test_what_will_not_do_is_refused_by_key(made: object, key: str) -> None:
    with pytest.raises(UserError, match=rf"norm\.{key} is"):
        made()


@pytest.mark.parametrize("norm", [MaskedBatchNorm(), PowerNorm()], ids=lambda norm: type(norm).__name__)
def test_statistics_are_float32_whatever_the_default(norm: Norm) -> None:
    """Under bf16-true a model is built in bfloat16, and a checkpoint's statistics are copied into what was built."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        floats = [buffer for buffer in norm.at(SITE, epsilon=EPSILON).buffers() if buffer.is_floating_point()]
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(floats) >= 4
    assert all(buffer.dtype == torch.float32 for buffer in floats)
