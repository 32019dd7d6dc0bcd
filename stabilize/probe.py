"""Before any training: what each layer makes of the signal on its way up, and of the gradient on its way down.

One forward and one backward on one batch; no weight is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stabilize import stats
from stabilize.strategies import PostNorm, PreNorm, Stabilizer

MARGIN = 3.0
"""First and last layer may differ by this times the root of depth; the root is pre-norm's own (arXiv:2002.04745,
section 3.3), the factor is for all that the derivation leaves out: width, data, the ends of the stack."""

SLACK = 0.05
"""What a measured slope may be off the derived one, a layer, beside what the ends of the stack may: MARGIN over all."""

SIGNAL = 1.2
"""By what factor the measured growth of the activations may be outside the derived bounds."""

RULE = (
    f"healthy: gradient norm and activation RMS of the first and the last layer differ by no more than {MARGIN:g} √L "
    "in L layers. A gradient that differs more vanishes or explodes towards the input; a signal, towards the output."
)


# ---------------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Profile:
    """One stack on one batch: a number a layer, the layer next to the input first.

    Args:
        activation_rms: root mean square of the layer's output over real tokens.
        similarity: mean cosine between the outputs of the layer and the next; of all layers but the last.
        similarity_centered: the same after the mean over the tokens is taken off.
        gradient_norm: L2 norm of the gradient by the layer's parameters.
        activation_gradient_norm: L2 norm of the gradient by the layer's output, all its streams together.
    """

    activation_rms: list[float]
    similarity: list[float]
    similarity_centered: list[float]
    gradient_norm: list[float]
    activation_gradient_norm: list[float]

    @property
    def layers(self) -> int:
        """Depth of the stack."""
        return len(self.gradient_norm)

    @property
    def first_to_last(self) -> float:
        """The first layer's gradient norm over the last layer's."""
        return ratio(self.gradient_norm[0], self.gradient_norm[-1])

    @property
    def slope(self) -> float:
        """By how much the logarithm of the gradient norm rises from a layer to the next."""
        return log_slope(self.gradient_norm)

    @property
    def activation_slope(self) -> float:
        """The same of the gradient by the layers' outputs."""
        return log_slope(self.activation_gradient_norm)

    @property
    def rms_growth(self) -> float:
        """The last layer's activation RMS over the first layer's."""
        return ratio(self.activation_rms[-1], self.activation_rms[0])

    @property
    def mean_similarity(self) -> float:
        """Mean of `similarity` over all pairs of neighbours; NaN where one layer has none."""
        return fmean(self.similarity) if self.similarity else math.nan


def profile(stacks: Mapping[str, Sequence[nn.Module]], loss: Callable[[], Tensor]) -> dict[str, Profile]:
    """Measure every layer at the loss that `loss` computes by one forward through all of them.

    Afterwards the layers have no gradient and no hook.

    Args:
        stacks: name -> layers, first to last. A layer returns a tuple with its stream first, a tensor or a tree of
            them, and tells by `observe(inputs, output)` its states `[..., width]` and which of them are real.
        loss: a scalar.
    """
    layers = [layer for stack in stacks.values() for layer in stack]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    states: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}
    squares: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}

    def watch(layer: nn.Module, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        with torch.no_grad():
            states[layer] = layer.observe(inputs, output)  # type: ignore[operator]
        for tensor in (leaf for leaf in tree_leaves(output[0]) if leaf.requires_grad):
            tensor.register_hook(lambda gradient: squares[layer].append(stats.squared_norm(gradient)))

    handles = [layer.register_forward_hook(watch) for layer in layers]
    try:
        _forget_gradients(parameters)
        loss().backward()
        return {
            name: _profile([states[layer] for layer in stack], [squares[layer] for layer in stack], stack)
            for name, stack in stacks.items()
        }
    finally:
        for handle in handles:
            handle.remove()
        _forget_gradients(parameters)


def _profile(
    states: Sequence[tuple[Tensor, Tensor | None]], squares: Sequence[list[Tensor]], layers: Sequence[nn.Module]
) -> Profile:
    outputs, real = [output for output, _ in states], states[0][1]
    matrices = stats.similarity_matrix(stats.similarity_sums(outputs, real))
    similarity, similarity_centered = matrices.diagonal(1, dim1=1, dim2=2).tolist()
    return Profile(
        activation_rms=[stats.activation_rms(output, real).item() for output in outputs],
        similarity=similarity,
        similarity_centered=similarity_centered,
        gradient_norm=stats.gradient_norms(layers).tolist(),
        activation_gradient_norm=[math.sqrt(sum(square.item() for square in found)) for found in squares],
    )


def _forget_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def ratio(value: float, by: float) -> float:
    """`value / by`; infinite where only `by` is zero, NaN where both are."""
    return value / by if by else (math.inf if value else math.nan)


def log_slope(values: Sequence[float]) -> float:
    """Slope of the line fitted to the natural logarithms over the layer number; values without one are left out.

    NaN where fewer than two are left.
    """
    points = [(float(layer), math.log(value)) for layer, value in enumerate(values) if 0 < value < math.inf]
    return linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else math.nan


# ---------------------------------------------------------------------- what it is held against


class Theory(NamedTuple):
    """What is derived for the gradient of a stack before training."""

    least: float
    """Of `Profile.slope`."""
    most: float
    words: str
    signal: tuple[float, float] = (1.0, 1.0)
    """Of `Profile.rms_growth`, the least and the most."""

    def agrees(self, profile: Profile) -> bool:
        """Whether the measured slope is the derived one, up to the ends of the stack and SLACK a layer, and the growth
        of the activations too, up to SIGNAL."""
        slack = math.log(MARGIN) / max(1, profile.layers - 1) + SLACK
        least, most = self.signal
        grows = least / SIGNAL <= profile.rms_growth <= most * SIGNAL
        return grows and self.least - slack <= profile.slope <= self.most + slack


PLAIN = Stabilizer()
"""The other axes as the derivations have them."""


def theory(stabilizer: Stabilizer, stack: str, layers: int) -> Theory | None:
    """What is derived for a stack of plain post-norm or pre-norm layers; None for others and for a single layer."""
    axes = ("residual", "norm", "initialization", "attention")
    if layers == 1 or any(stabilizer.axes[axis].spec() != PLAIN.axes[axis].spec() for axis in axes):
        return None
    if type(stabilizer.placement) is PreNorm:
        root = math.log(layers) / 2
        words = "pre-norm: flat, the first layer's gradient at most √L of the last's, while the variance grows linearly"
        # The variance after l layers is from 1 + l / 2 to 1 + 3 l / 2 times that before the first.
        signal = math.sqrt((1 + layers / 2) / (1 + 3 / 2)), math.sqrt((1 + 3 * layers / 2) / (1 + 1 / 2))
        return Theory(-root / (layers - 1), 0.0, words, signal)
    if type(stabilizer.placement) is not PostNorm:
        return None
    if stack == "decoder":
        words = "post-norm, decoder: falls by √2 a layer towards the input, since a cross-attention adds about the "
        words += "stream's variance, and hands hardly any gradient down for what the norm after it takes"
        return Theory(math.log(2) / 2, math.log(2) / 2, words)
    words = (
        "post-norm, encoder: between flat, where branches hand down what the norms take, and falling by √1.5 a layer"
    )
    return Theory(0.0, math.log(1.5) / 2, words)


class Verdict(NamedTuple):
    """Whether a stack is fit for training, by RULE."""

    name: str
    words: str


def judge(profile: Profile) -> Verdict:
    """The verdict on a stack: `healthy`, or what ails it."""
    bound = MARGIN * math.sqrt(profile.layers)
    gradient, signal, last = profile.first_to_last, profile.rms_growth, f"layer {profile.layers}"
    if not all(map(math.isfinite, [*profile.activation_rms, *profile.gradient_norm])):
        return Verdict("not finite", "an activation or a gradient is infinite or no number")
    if not any(profile.gradient_norm):
        return Verdict("no gradient", "no layer receives any: a branch between it and the loss starts at zero")
    if not 1 / bound <= signal <= bound:
        name = "signal explodes" if signal > 1 else "signal vanishes"
        return Verdict(name, f"{last} puts out {signal:.2g} times what layer 1 does")
    words = f"layer 1 receives {gradient:.2g} times the gradient of {last}"
    if not 1 / bound <= gradient <= bound:
        return Verdict("exploding" if gradient > 1 else "vanishing", f"towards the input: {words}")
    return Verdict("healthy", words)
