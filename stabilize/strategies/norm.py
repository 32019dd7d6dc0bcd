"""Axis `norm`: the normaliser. Called `norm(x, real)`, `real` the mask `[batch, length]` of real tokens."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize.errors import UserError
from stabilize.stats import layer_norm_variance
from stabilize.strategies.site import Site
from stabilize.strategies.strategy import Part, Strategy

if TYPE_CHECKING:
    from stabilize.strategies.stabilizer import Stabilizer


def _checked(key: str, value: float, will_do: bool, would_do: str) -> float:
    if not will_do:
        raise UserError(f"model.stabilizer.norm.{key} is {value}; {would_do} would do")
    return value


class StandardNorm(NamedTuple):
    """A norm that other toolkits have too, as numbers.

    y = gain (x - mean) / sqrt(var + epsilon) + bias;  not centred: y = gain x / sqrt(mean(x^2) + epsilon)
    """

    centred: bool
    gain: Tensor
    bias: Tensor
    """Zero where it is not centred."""
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[..., width]` normed."""
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) + self.bias


class Norm(Part):
    """Base of all normalisers over the last dimension. Statistics are taken in float32, whatever the input."""

    needs_mask: ClassVar[bool] = False
    """True where the norm has to know which tokens are real; parts that cannot tell it refuse such a norm."""
    width: int
    epsilon: float

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        """`width`: size of the last dimension where it is not the stream's (a head's, the hidden layer's)."""
        self.width = width or site.width
        self.epsilon = epsilon

    def with_epsilon(self, x: Tensor) -> tuple[Tensor, float]:
        """`x` in float32, and the epsilon that belongs to its variance.

        While layers compile, x is stretched until that epsilon is 1e-5 for all of them, which normed is the same:
        torch's norms take it as a constant, and one that differed would compile each layer anew.
        """
        if torch.compiler.is_compiling():
            return x.float() * (1e-5 / self.epsilon) ** 0.5, 1e-5
        return x.float(), self.epsilon

    @abstractmethod
    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """`x` normalised over its last dimension, in its own dtype."""

    def guarded(self, x: Tensor, output: Tensor) -> Tensor | None:
        """The number that epsilon keeps away from zero, one a position, or none; diagnostics compare the two.

        `output` is what `forward` has made of `x`.
        """
        return None

    def standard(self) -> StandardNorm | None:
        """This norm in the form that other toolkits have; none where it computes something else."""
        return None


def _variance(x: Tensor) -> Tensor:
    """Of each position, in float32."""
    x = x.float()
    return torch.linalg.vector_norm(x - x.mean(-1, keepdim=True), dim=-1).square() / x.size(-1)


def refuse_without_mask(part: Strategy, norm: Norm) -> list[str]:
    """Why `part`, which calls its norms without a mask, cannot be combined with `norm`; nothing where it can."""
    if not norm.needs_mask:
        return []
    here, name = type(part).__name__, type(norm).__name__
    return [
        f"{here} cannot be combined with {name}: {name} has to know which tokens are real, which {here} does not tell "
        "it; model.stabilizer.norm: LayerNorm would do"
    ]


class LayerNorm(Norm):
    """Centre and scale each position, then gain and bias.

        y = g (x - mean) / sqrt(var + epsilon) + b

    Paper: Ba et al. 2016, arXiv:1607.06450
    """

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        self.gain = nn.Parameter(torch.ones(self.width))
        self.bias = nn.Parameter(torch.zeros(self.width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        x32, epsilon = self.with_epsilon(x)
        return F.layer_norm(x32, (self.width,), self.gain.float(), self.bias.float(), epsilon).to(x.dtype)

    def guarded(self, x: Tensor, output: Tensor) -> Tensor:
        kept = layer_norm_variance(output, self.epsilon)
        return _variance(x) if kept is None else kept.squeeze(-1)

    def standard(self) -> StandardNorm:
        return StandardNorm(True, self.gain, self.bias, self.epsilon)


class RMSNorm(Norm):
    """Scale each position by its root mean square; no centring, no bias.

        y = g x / sqrt(mean(x^2) + epsilon)

    Paper: Zhang and Sennrich 2019, arXiv:1910.07467
    """

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        self.gain = nn.Parameter(torch.ones(self.width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        x32, epsilon = self.with_epsilon(x)
        return F.rms_norm(x32, (self.width,), self.gain.float(), epsilon).to(x.dtype)

    def guarded(self, x: Tensor, output: Tensor) -> Tensor:
        return x.float().square().mean(-1)

    def standard(self) -> StandardNorm:
        return StandardNorm(False, self.gain, torch.zeros_like(self.gain), self.epsilon)


class ScaleNorm(Norm):
    """Give every position the same length, which is learnt.

        y = g x / max(|x|, epsilon);  g is one number, sqrt(width) at the start

    Also: published with pre-norm and FixNorm; configs/strategies/scale_norm.yaml sets all three.
    Paper: Nguyen and Salazar 2019, arXiv:1910.05895
    """

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        self.gain = nn.Parameter(torch.tensor([math.sqrt(self.width)]))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        length = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).clamp(min=self.epsilon)
        return (self.gain * x.float() / length).to(x.dtype)

    def guarded(self, x: Tensor, output: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x.float(), dim=-1)


class AdaNorm(Norm):
    """Centre and scale each position, then damp its largest entries by a factor that passes no gradient.

        y = (x - mean) / (deviation + epsilon);  z = scale (1 - k stopgrad(y)) y

    Also: no gain, no bias. As in the released code, the deviation is the unbiased one and epsilon stands outside its
    root.
    Paper: Xu et al. 2019, arXiv:1911.07013

    Args:
        scale: of the output, the paper's C; the released code has 2, and 1 in the commands of its README.
        k: how strongly large entries are damped.
    """

    def __init__(self, scale: float = 2.0, k: float = 0.1) -> None:
        super().__init__()
        self.scale = _checked("scale", scale, 0 < scale < math.inf, "a number above zero, such as 2,")
        self.k = _checked("k", k, 0 <= k < math.inf, "zero or more, such as 0.1,")

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        deviation, mean = torch.std_mean(x.float(), dim=-1, keepdim=True)
        y = (x.float() - mean) / (deviation + self.epsilon)
        return (self.scale * (1 - self.k * y.detach()) * y).to(x.dtype)

    def guarded(self, x: Tensor, output: Tensor) -> Tensor:
        return x.float().std(-1)


class AdaptiveLayerNorm(Norm):
    """LayerNorm whose gain and bias are computed from the position that it norms.

        y = (1 + s) n + b, (s, b) = W silu(n) + w, n = (x - mean) / sqrt(var + epsilon);  W and w are 0 at the start

    Also: the published adaLN-Zero computes s and b from a condition of its own, and from it a gate on the branch; here
    the input is the condition, and there is no gate. W has 2 width^2 entries.
    Paper: after Peebles and Xie 2022, arXiv:2212.09748
    """

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        self.weight = nn.Parameter(torch.zeros(2 * self.width, self.width))
        self.bias = nn.Parameter(torch.zeros(2 * self.width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        x32, epsilon = self.with_epsilon(x)
        n = F.layer_norm(x32, (self.width,), eps=epsilon)
        s, b = F.linear(F.silu(n), self.weight.float(), self.bias.float()).chunk(2, dim=-1)
        return (n + s * n + b).to(x.dtype)

    def guarded(self, x: Tensor, output: Tensor) -> Tensor:
        return _variance(x)


class DynamicTanh(Norm):
    """No statistics at all: squash each entry.

        y = g tanh(alpha x) + b;  alpha is one number, learnt

    Also: takes the place of LayerNorm one for one, and has no epsilon. The paper's language models also learn a scale
    of the embedding, sqrt(width) at the start, which is left out here, where the embedding is scaled by sqrt(width).
    Paper: Zhu et al. 2025, arXiv:2503.10622

    Args:
        alpha: where it starts; 0.5 is for vision and speech, 0.2 for a language model of width 4096.
        attention_alpha: the same before attention, there 0.8; none: `alpha`.
    """

    alpha: float | nn.Parameter  # a number in the template, what is learnt from there where it is placed

    def __init__(self, alpha: float = 0.5, attention_alpha: float | None = None) -> None:
        super().__init__()
        self.alpha = _checked("alpha", alpha, 0 < alpha < math.inf, "a number above zero, such as 0.5,")
        if attention_alpha is not None:
            would_do = "none, or a number above zero such as 0.8,"
            _checked("attention_alpha", attention_alpha, 0 < attention_alpha < math.inf, would_do)
        self.attention_alpha = attention_alpha

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        own = self.attention_alpha if site.role in ("self_attention", "cross_attention") else None
        self.alpha = nn.Parameter(torch.tensor([self.alpha if own is None else own]))
        self.gain = nn.Parameter(torch.ones(self.width))
        self.bias = nn.Parameter(torch.zeros(self.width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return (self.gain * torch.tanh(self.alpha * x.float()) + self.bias).to(x.dtype)


class DynamicErf(Norm):
    """DynamicTanh with the error function, and a shift.

        y = g erf(alpha x + s) + b;  alpha and s are one number each, learnt;  s is 0 at the start

    Also: takes the place of LayerNorm one for one, and has no epsilon.
    Paper: Chen et al. 2025, arXiv:2512.10938

    Args:
        alpha: where it starts.
    """

    alpha: float | nn.Parameter  # a number in the template, what is learnt from there where it is placed

    def __init__(self, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = _checked("alpha", alpha, 0 < alpha < math.inf, "a number above zero, such as 0.5,")

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        self.alpha = nn.Parameter(torch.tensor([self.alpha]))
        self.shift = nn.Parameter(torch.zeros(1))
        self.gain = nn.Parameter(torch.ones(self.width))
        self.bias = nn.Parameter(torch.zeros(self.width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return (self.gain * torch.erf(self.alpha * x.float() + self.shift) + self.bias).to(x.dtype)


class ScaledLayerNorm(LayerNorm):
    """LayerNorm whose output shrinks with the layer, so that the variance of a pre-norm stream grows less.

        y = LayerNorm(x) / sqrt(l) in layer l, counted in each stack by itself;  not at the end of a stack

    Also: published with pre-norm, for decoders alone, over weights N(0, 0.02^2). Norms inside a branch are scaled too.
    Not meant to go with GPT2, which shrinks branches by depth as well, say the authors. Their released code does not
    come to this formula.
    Paper: Sun et al. 2025, arXiv:2502.05795
    """

    share: Tensor

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        share = 1.0 if site.role in ("embedding", "final") else site.layer**-0.5
        self.register_buffer("share", torch.tensor(share), persistent=False)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return super().forward(x, real) * self.share

    def standard(self) -> StandardNorm:
        whole = super().standard()
        return whole._replace(gain=whole.gain * self.share, bias=whole.bias * self.share)


# ---------------------------------------------------------------- statistics over the tokens of a batch


class BatchStatistics(Norm):
    """Base of norms that norm each channel, by statistics over all real tokens of a batch, and in evaluation by running
    ones. x is `[batch, length, width]`, or `[batch, heads, length, head width]` with one statistic for all heads.

    What padding holds does not matter: it comes in as zeros and leaves as the bias.
    """

    needs_mask = True

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        self.gain = nn.Parameter(torch.ones(self.width))
        self.bias = nn.Parameter(torch.zeros(self.width))

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Wherever the weights go, and in whatever format, statistics stay in float32, and leaves of autograd."""
        super()._apply(function, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                self._buffers[name] = buffer.detach().float().requires_grad_(buffer.requires_grad)
        return self

    def warnings(self, stabilizer: Stabilizer, site: Site, precision: str) -> list[str]:
        if site.stack == "encoder":
            return []
        return [
            f"{type(self).__name__} in the decoder: in training its statistics know of the tokens to come, in "
            "evaluation they do not; Shen et al. 2020, arXiv:2003.07845, keep LayerNorm there"
        ]

    @staticmethod
    def real_tokens(x: Tensor, real: Tensor | None) -> Tensor:
        """True at the real positions of x: its shape, but for a last dimension of one."""
        if real is None:
            return torch.ones_like(x[..., :1], dtype=torch.bool)
        return (real if x.dim() == 3 else real[:, None])[..., None].expand(*x.shape[:-1], 1)

    @staticmethod
    def mean(x: Tensor, count: Tensor) -> Tensor:
        """Mean of each channel over `count` tokens, x being zero at all others; zero where there are none."""
        return x.sum(tuple(range(x.dim() - 1))) / count.clamp(min=1)


class MaskedBatchNorm(BatchStatistics):
    """Batch normalisation over the real tokens: centre and scale each channel, not each position.

        y = g (x - mean) / sqrt(var + epsilon) + b, mean and var of a channel over the batch, in evaluation running

    Also: running <- running + momentum (batch - running) once an update, by the last batch of those accumulated, with
    the unbiased variance; a batch of one token moves nothing. Each rank norms by its own batch, and torch's DDP hands
    all of them the first one's running statistics. In training, statistics in the decoder know of the tokens to come.
    Paper: Ioffe and Szegedy 2015, arXiv:1502.03167; on real tokens alone as in Shen et al. 2020, arXiv:2003.07845

    Args:
        momentum: how far an update moves the running statistics.
    """

    running_mean: Tensor
    running_variance: Tensor
    next_mean: Tensor
    next_variance: Tensor

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.momentum = _checked("momentum", momentum, 0 < momentum <= 1, "above zero and at most one, such as 0.1,")

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        zeros = torch.zeros(self.width, dtype=torch.float32)  # whatever the default: a checkpoint is copied into these
        for name, start in (("mean", zeros), ("variance", zeros + 1)):
            self.register_buffer(f"running_{name}", start)
            self.register_buffer(f"next_{name}", start.clone(), persistent=False)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        tokens = self.real_tokens(x, real)
        x32, count = x.float().masked_fill(~tokens, 0.0), tokens.sum()
        mean = self.mean(x32, count) if self.training else self.running_mean
        centred = (x32 - mean).masked_fill(~tokens, 0.0)
        variance = self.mean(centred.square(), count) if self.training else self.running_variance
        if self.training:
            self._propose(mean.detach(), variance.detach(), count)
        return (self.gain * centred * torch.rsqrt(variance + self.epsilon) + self.bias).to(x.dtype)

    def _propose(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        share = self.momentum * (count > 1)
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.next_mean.copy_(self.running_mean + share * (mean - self.running_mean))
        self.next_variance.copy_(self.running_variance + share * (unbiased - self.running_variance))

    def after_update(self, update: int) -> None:
        self.running_mean.copy_(self.next_mean)
        self.running_variance.copy_(self.next_variance)


class PowerNorm(BatchStatistics):
    """Scale each channel by a running quadratic mean over the real tokens, forward and, approximately, backward.

        z = x / sqrt(psi + epsilon), y = g z + b;  dx = (dz - nu z) / sqrt(psi + epsilon), batch = mean(x^2);
        psi <- a psi + (1 - a) batch;  nu <- nu (1 - (1 - c) mean(z^2)) + (1 - c) mean(dz z), once an update

    where x is first divided by the quadratic mean of its group of channels, a and c are the decays, and psi in the
    first line is the batch's own during warm-up.

    Also: published in the encoder alone; configs/strategies/power_norm.yaml keeps LayerNorm in the decoder, where in
    training the statistics would know of the tokens to come. The released code was read, the paper's algorithm was not:
    that the backward pass divides by the root that the forward pass took is from another public implementation of it.
    The released one divides by the batch's root after warm-up as well, and takes its means over padding too; during
    warm-up its psi follows the mean of all batches so far. torch's DDP hands every rank the first one's psi and nu.
    Paper: Shen et al. 2020, arXiv:2003.07845

    Args:
        forward_decay: of psi, a.
        backward_decay: of nu, c.
        warmup: updates in which the batch's own quadratic mean is used; the released recipe has those of the learning
            rate.
        groups: of channels that are scaled together at each position, before anything else.
    """

    quadratic_mean: Tensor
    next_quadratic_mean: Tensor
    nu: Tensor
    warm: Tensor
    gathered: Tensor

    def __init__(
        self, forward_decay: float = 0.9, backward_decay: float = 0.9, warmup: int = 4000, groups: int = 1
    ) -> None:
        super().__init__()
        would_do = "zero or more and below one, such as 0.9,"
        self.forward_decay = _checked("forward_decay", forward_decay, 0 <= forward_decay < 1, would_do)
        self.backward_decay = _checked("backward_decay", backward_decay, 0 <= backward_decay < 1, would_do)
        self.warmup = int(_checked("warmup", warmup, warmup >= 0, "zero updates or more"))
        self.groups = int(_checked("groups", groups, groups >= 1, "one or more"))

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        _checked("groups", self.groups, self.width % self.groups == 0, f"a divisor of the width {self.width}")
        zeros = torch.zeros(self.width, dtype=torch.float32)  # whatever the default: a checkpoint is copied into these
        self.register_buffer("quadratic_mean", zeros + 1)
        self.register_buffer("next_quadratic_mean", zeros + 1, persistent=False)
        self.register_buffer("nu", zeros)
        # A number, because averages of weights are of buffers too.
        self.register_buffer("warm", torch.tensor(float(self.warmup == 0), dtype=torch.float32))
        self.register_buffer("gathered", torch.stack([zeros] * 3).requires_grad_(), persistent=False)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        tokens = self.real_tokens(x, real)
        groups = x.float().masked_fill(~tokens, 0.0).reshape(*x.shape[:-1], self.groups, -1)
        scaled = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.epsilon)).flatten(-2)
        if self.training:
            count = tokens.sum()
            batch = self.mean(scaled.detach().square(), count)
            share = (1 - self.forward_decay) * (count > 0)
            self.next_quadratic_mean.copy_(self.quadratic_mean + share * (batch - self.quadratic_mean))
            used = torch.where(self.warm > 0, self.quadratic_mean, batch)
            rest = torch.rsqrt(used + self.epsilon), self.nu, self.gathered, count
            z = PowerScaling.apply(scaled, *rest)  # type: ignore[no-untyped-call]
        else:
            z = scaled * torch.rsqrt(self.quadratic_mean + self.epsilon)
        return (self.gain * z + self.bias).to(x.dtype)

    def after_update(self, update: int) -> None:
        self.quadratic_mean.copy_(self.next_quadratic_mean)
        self.warm.fill_(update >= self.warmup)
        gathered, self.gathered.grad = self.gathered.grad, None
        if gathered is not None:
            squares, products, count = gathered
            share = (1 - self.backward_decay) / count.clamp(min=1)
            nu = self.nu * (1 - share * squares) + share * products
            self.nu.copy_(torch.where(nu.isfinite(), nu, self.nu))  # a half-precision gradient may have overflowed

    def drop_update(self) -> None:
        self.gathered.grad = None


class PowerScaling(torch.autograd.Function):
    """scale x, with PowerNorm's backward pass, where nu stands for what the batch's statistics would pass on.

    The sums for the next nu leave as the "gradient" of `gathered`: autograd adds them up over the batches of an update,
    and a layer that is computed twice passes backward once.

    g and nu are on one scale in every batch: losses are summed and divided by a constant, and nu is a mean over tokens.
    Gradients are divided by the tokens of the update later, and only those of parameters. A loss scale (16-mixed) is in
    both; in the few updates after it has changed nu lags behind.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, nu: Tensor, gathered: Tensor, count: Tensor) -> Tensor:
        z = x * scale
        ctx.save_for_backward(z, scale, nu, count)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z, scale, nu, count = ctx.saved_tensors
        positions = tuple(range(z.dim() - 1))
        gathered = torch.stack(((z * z).sum(positions), (g * z).sum(positions), count.to(z.dtype).expand_as(nu)))
        return (g - nu * z) * scale, None, None, gathered, None


class AcrossHeads(nn.Module):
    """A norm over all heads together, on what is split into heads.

    Args:
        norm: of width heads times head width.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """`x` `[batch, heads, length, head width]` normed over heads and head width."""
        return self.norm(x.transpose(1, 2).flatten(2), real).unflatten(-1, (x.size(1), -1)).transpose(1, 2)
