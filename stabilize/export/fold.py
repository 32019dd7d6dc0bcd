"""Scales of skips and branches, and epsilons, folded into weights: the same function, with neither.

What makes it possible is a change of units. Where the stream is kept as u = t x, whatever reads it is divided by t, and
whatever writes it is multiplied by t. A norm does not see the units but for its epsilon,

    norm_e(x) = norm_(e c^2)(c x)

so that a post-norm stack can choose new units after every norm, and equals one whose skips and branches are scaled by
one and whose norms all have the epsilon that the target has. A pre-norm stream keeps its units from skip to skip: they
can be chosen once, and where its skips are scaled, or its epsilons differ, those of the target's norms would have to
differ from layer to layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stabilize.errors import UserError
from stabilize.export.plain import ADVICE, Linear, Plain, PlainBranch, PlainStack
from stabilize.strategies.norm import StandardNorm


def fold(plain: Plain, epsilon: float, fixed_positions: bool = False) -> Plain:
    """The same Transformer with every skip and scale one.

    Its norms say the epsilon that they need; it is `epsilon` for all wherever the algebra allows.

    Args:
        plain: with skips and scales.
        epsilon: of the target's norms.
        fixed_positions: the target adds sinusoids that cannot be scaled, so that a stack starts in units of one.

    Raises:
        UserError: scales by channel where a norm reads the stream.
    """
    stacks = (_post_norm, _pre_norm)
    folded = [stacks[stack.pre_norm](stack, epsilon, fixed_positions) for stack in plain.stacks]
    return replace(plain, encoder=folded[0], decoder=folded[1])


def remarks(plain: Plain, epsilon: float) -> list[str]:
    """Which norms of a folded model need another epsilon than the target's, in words."""
    needed = [norm.epsilon for stack in plain.stacks for norm in stack.norms]
    others = [value for value in needed if not math.isclose(value, epsilon, rel_tol=1e-6)]
    if not others:
        return []
    span = f"{min(others):.2g}" if min(others) == max(others) else f"{min(others):.2g} to {max(others):.2g}"
    return [f"{len(others)} of {len(needed)} norms have the epsilon {epsilon:g} where {span} would be exact"]


def _post_norm(stack: PlainStack, epsilon: float, fixed_positions: bool) -> PlainStack:
    branches = [branch for layer in stack.layers for branch in layer]
    stretches = [math.sqrt(epsilon / branch.norm.epsilon) for branch in branches]  # of each sum, the c above
    if fixed_positions:
        stretches[0] = 1 / _one_for_all(branches[0].skip, "the first skip", "positions cannot be scaled")
    units = [stretch * branch.skip for stretch, branch in zip(stretches, branches, strict=True)]
    units.append(torch.ones_like(units[0]))
    folded = []
    for branch, stretch, unit, following in zip(branches, stretches, units[:-1], units[1:], strict=True):
        centred, gain, bias, its_epsilon = branch.norm
        norm = StandardNorm(centred, following * gain, following * bias, its_epsilon * stretch**2)
        reads = {name: linear.inputs_over(unit) for name, linear in branch.reads.items()}
        folded.append(_with_scales_of_one(branch, norm, reads, branch.output.times(stretch * branch.scale)))
    return _rebuilt(stack, units[0], folded, None)


def _pre_norm(stack: PlainStack, epsilon: float, fixed_positions: bool) -> PlainStack:
    branches = [branch for layer in stack.layers for branch in layer]
    unit = start = 1.0 if fixed_positions else math.sqrt(epsilon / branches[0].norm.epsilon)
    folded = []
    for branch in branches:
        norm = branch.norm._replace(epsilon=branch.norm.epsilon * unit**2)
        unit /= _one_for_all(branch.skip, "a skip", "a norm reads the stream")
        folded.append(_with_scales_of_one(branch, norm, branch.reads, branch.output.times(unit * branch.scale)))
    final = stack.final and stack.final._replace(epsilon=stack.final.epsilon * unit**2)
    return _rebuilt(stack, torch.full_like(branches[0].skip, start), folded, final)


def _with_scales_of_one(
    branch: PlainBranch, norm: StandardNorm, reads: dict[str, Linear], output: Linear
) -> PlainBranch:
    one = torch.ones_like(branch.skip)
    return PlainBranch(branch.role, norm, one, one, reads, branch.memory, output)


def _rebuilt(
    stack: PlainStack, start: Tensor, branches: Sequence[PlainBranch], final: StandardNorm | None
) -> PlainStack:
    rest = iter(branches)
    return replace(
        stack,
        embedding=stack.embedding * start,
        positions=stack.positions * start,
        layers=[[next(rest) for _ in layer] for layer in stack.layers],
        final=final,
    )


def _one_for_all(skip: Tensor, what: str, why: str) -> float:
    """The scale of a skip, which has to be the same for all channels, and above zero."""
    first = float(skip[0])
    if first <= 0 or not torch.allclose(skip, skip[0].expand_as(skip), rtol=1e-6, atol=0):
        raise UserError(f"{what} scales each channel by itself, which cannot be folded where {why}; {ADVICE}")
    return first
