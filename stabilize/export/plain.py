"""A model as the plain Transformer that it equals, where it equals one, in numbers that other toolkits take.

Nothing here goes by what a strategy is called. A part is what it computes: a placement is run on symbols, which write
its equation down, a residual, a norm and an attention on numbers. So a strategy of one's own is read like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from stabilize.errors import UserError
from stabilize.model import EncoderDecoder, Layer, Sizes, Stack
from stabilize.model.attention import Attention
from stabilize.model.embedding import Embedding, sinusoids
from stabilize.model.feed_forward import FeedForward
from stabilize.model.layer import Branch
from stabilize.model.projection import Projection
from stabilize.strategies import AttentionStabilizer, Norm, Placement, Residual
from stabilize.strategies.norm import StandardNorm

POSITIONS = 1024
"""Positions that are written where they have no end."""

ADVICE = "--to safetensors takes every model"


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b, `weight` `[outputs, inputs]`."""

    weight: Tensor
    bias: Tensor

    def inputs_over(self, scale: Tensor) -> Linear:
        """The same y for an x that is `scale` times as large, channel by channel."""
        return replace(self, weight=self.weight / scale)

    @staticmethod
    def stacked(parts: Sequence[Linear]) -> Linear:
        """Several of the same x as one."""
        return Linear(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts]))

    def times(self, scale: Tensor) -> Linear:
        """`scale` y, channel by channel."""
        return Linear(scale[:, None] * self.weight, scale * self.bias)


@dataclass(frozen=True)
class PlainBranch:
    """x <- norm(skip x + scale f(x)), or x <- skip x + scale f(norm(x)) in a stack that is pre-norm.

    Args:
        role: `self_attention`, `cross_attention` or `feed_forward`.
        norm: the only one.
        skip, scale: `[width]`.
        reads: what f makes of what it reads: `query`, `key`, `value`; or `input`, and `gate` where there is one.
        memory: what cross-attention makes of the encoder's output: `key`, `value`.
        output: the last thing that f does.
    """

    role: str
    norm: StandardNorm
    skip: Tensor
    scale: Tensor
    reads: dict[str, Linear]
    memory: dict[str, Linear]
    output: Linear


@dataclass(frozen=True)
class PlainStack:
    """Encoder or decoder.

    Args:
        pre_norm: where the norms stand; see `PlainBranch`.
        embedding: `[vocabulary, width]`, its factor sqrt(width) in it.
        positions: `[length, width]`, added to the embedding.
        layers: the branches of each, bottom first.
        final: the norm at the end; there is one where the stack is pre-norm.
    """

    pre_norm: bool
    embedding: Tensor
    positions: Tensor
    layers: list[list[PlainBranch]]
    final: StandardNorm | None

    @property
    def norms(self) -> list[StandardNorm]:
        """All of them, bottom first."""
        inner = [branch.norm for layer in self.layers for branch in layer]
        return inner + ([self.final] if self.final else [])

    @property
    def centred(self) -> bool:
        """Whether its norms are LayerNorm; else they are RMSNorm."""
        return self.norms[0].centred


@dataclass(frozen=True)
class Plain:
    """A Transformer as Vaswani et al. 2017, arXiv:1706.03762, or with its norms before the branches; all in float64."""

    encoder: PlainStack
    decoder: PlainStack
    projection: Linear
    sizes: Sizes

    @property
    def stacks(self) -> tuple[PlainStack, PlainStack]:
        """Encoder and decoder."""
        return self.encoder, self.decoder


@torch.no_grad()
def read(model: EncoderDecoder, sizes: Sizes) -> Plain:
    """What a model in evaluation and float32 computes.

    Raises:
        UserError: something else than a plain Transformer, by what it is built of.
    """
    target = model.target_embedding
    projection = (
        Linear(_number(target.matrix()), torch.zeros(len(target.weight), dtype=torch.float64))
        if model.output is None
        else _rows(model.output)["output"]
    )
    return Plain(
        _stack("encoder", model.encoder, model.source_embedding),
        _stack("decoder", model.decoder, target),
        projection,
        sizes,
    )


def _stack(name: str, stack: Stack, embedding: Embedding) -> PlainStack:
    layers = [cast(Layer, layer) for layer in stack.layers]
    forms = [_form(f"layer {number} of the {name}", layer) for number, layer in enumerate(layers, 1)]
    if len(set(forms)) > 1:
        raise _refusal(
            f"layer {forms.index(not forms[0]) + 1} of the {name} has its norms elsewhere than layer 1: one of them "
            "norms what a branch reads, the other the sum"
        )
    pre_norm, end = forms[0], stack.end
    final = _final(name, stack, pre_norm)
    if not (_unchanged(end.residual.start) and _unchanged(end.residual.end)):
        raise _refusal(f"the {name}'s residual, {end.residual.label}, carries more than one stream")
    positions = (
        sinusoids(0, POSITIONS, embedding.weight.size(1), embedding.weight.device)
        if embedding.position is None
        else embedding.position
    )
    plain = PlainStack(
        pre_norm,
        _number(embedding.matrix()) * embedding.scale,
        _number(positions),
        [
            [_branch(f"layer {number} of the {name}", branch) for branch in cast(Sequence[Branch], layer.branches)]
            for number, layer in enumerate(layers, 1)
        ],
        final,
    )
    if len({norm.centred for norm in plain.norms}) > 1:
        raise _refusal(f"the {name} has both LayerNorm and RMSNorm")
    return plain


# ---------------------------------------------------------------- where the norms stand: placements on symbols


class Symbol:
    """A term of an equation, which what a placement does with it writes down.

    Args:
        text: the term.
        is_sum: wants parentheses where it is added to something.
    """

    def __init__(self, text: str, is_sum: bool = False) -> None:
        self.text = text
        self.summand = f"({text})" if is_sum else text

    def __add__(self, other: Symbol) -> Symbol:
        return Symbol(f"{self.summand} + {other.summand}", is_sum=True)

    def float(self) -> Symbol:
        """Another number format is the same term."""
        return self


class SymbolicStep:
    """A branch as a placement sees it, on symbols.

    Args:
        slots: the names of its outer norms.
        number: tells it from the others of its layer.
    """

    def __init__(self, slots: Sequence[str], number: str = "") -> None:
        self.slots = slots
        self.number = number

    def __call__(self, x: Symbol) -> Symbol:
        return Symbol(f"f{self.number}({x.text})")

    def norm(self, x: Symbol) -> Symbol:
        return Symbol(f"norm{self.number}({x.text})") if "norm" in self.slots else x

    def out(self, x: Symbol) -> Symbol:
        return Symbol(f"norm_out{self.number}({x.text})") if "out" in self.slots else x

    def read(self, stream: Any) -> Any:
        return stream

    def write(self, stream: Symbol, branch: Symbol) -> Symbol:
        return Symbol(f"{stream.summand} ⊕ {branch.summand}", is_sum=True)

    start = end = read


def _pre_norm(step: SymbolicStep, x: Symbol) -> Symbol:
    return step.write(x, step(step.norm(x)))


def _post_norm(step: SymbolicStep, x: Symbol) -> Symbol:
    return step.norm(step.write(x, step(x)))


def _form(place: str, layer: Layer) -> bool:
    """Whether a layer is pre-norm.

    Raises:
        UserError: it is neither that nor post-norm, with its equation.
    """
    branches = list(cast(Sequence[Branch], layer.branches))
    steps = [SymbolicStep(list(branch.slots), str(number)) for number, branch in enumerate(branches, 1)]
    computed = _equation(place, layer.placement, steps)
    for form in (_pre_norm, _post_norm):
        x = Symbol("x")
        for step in steps:
            x = form(SymbolicStep(["norm"], step.number), x)
        if computed == x.text:
            return form is _pre_norm
    alone = _equation(place, layer.placement, [SymbolicStep(list(branches[-1].slots))])
    known = {form(SymbolicStep(["norm"]), Symbol("x")).text for form in (_pre_norm, _post_norm)}
    # One branch says it in fewer words.
    raise _refusal(f"{place} computes x <- {computed if alone in known else alone}")


def _equation(place: str, placement: Placement, steps: Sequence[Any]) -> str:
    try:
        return cast(Symbol, placement.layer(Symbol("x"), steps)).text
    except (AttributeError, TypeError, ValueError) as error:
        raise _refusal(f"{place} carries more than one stream, or does more than norm and add") from error


def _final(name: str, stack: Stack, pre_norm: bool) -> StandardNorm | None:
    end, placement = stack.end, cast(Any, stack.placement)
    step = SymbolicStep(list(end.slots))
    start, leaves = placement.enter(Symbol("x"), step).text, placement.leave(Symbol("x"), step).text
    if start != "x":
        raise _refusal(f"the {name} starts with x <- {start}")
    if (leaves == "norm(x)") != pre_norm:
        form = "pre-norm" if pre_norm else "post-norm"
        raise _refusal(f"the {name} is {form}, but at its end x <- {leaves}")
    return _norm(f"the end of the {name}", cast(Norm, end.slots["norm"])) if pre_norm else None


# ---------------------------------------------------------------- what the parts compute: on numbers


def _branch(place: str, branch: Branch) -> PlainBranch:
    function = cast(Attention | FeedForward, branch.function)
    place = f"{branch.role.replace('_', '-')} in {place}"
    if function.slots:
        raise _refusal(f"{place} has norms or gains inside the branch: {', '.join(function.slots)}")
    memory: dict[str, Linear] = {}
    if isinstance(function, FeedForward):
        both = _rows(function.input)
        reads = dict(zip(("gate", "input") if len(both) > 1 else ("input",), both.values(), strict=True))
    else:
        if not _is_plain(function.stabilizer, function.heads, function.output.weight.size(1) // function.heads):
            name = type(function.stabilizer).__name__
            raise _refusal(f"{place} computes something else than softmax(q k^T / sqrt(d_head)) v: {name}")
        if function.crosses:
            reads, memory = _rows(function.query), _rows(function.value_key)
        else:
            reads = _rows(function.query_value_key)
    norm = _norm(place, cast(Norm, branch.slots["norm"]))
    skip, scale = _scales(place, branch.residual, len(norm.gain))
    return PlainBranch(branch.role, norm, skip, scale, reads, memory, next(iter(_rows(function.output).values())))


def _number(x: Tensor) -> Tensor:
    return x.detach().cpu().double()


def _rows(projection: Projection) -> dict[str, Linear]:
    """A projection by the roles of its rows; two of one name, as of a gated layer, are numbered."""
    weight, bias = (_number(part) for part in projection.matrix())
    count = len(projection.roles)
    groups = zip(projection.roles, weight.chunk(count), bias.chunk(count), strict=True)
    return {
        role if projection.roles.count(role) == 1 else f"{role}_{number}": Linear(rows, biases)
        for number, (role, rows, biases) in enumerate(groups)
    }


def _sample(*shape: int) -> Tensor:
    """Random numbers, the same each time, that leave the caller's alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _unchanged(function: Callable[[Any], Any]) -> bool:
    """Whether it hands back what it is given."""
    given = torch.zeros(1, 1, 1)
    try:
        return function(given) is given
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False


def _scales(place: str, residual: Residual, width: int) -> tuple[Tensor, Tensor]:
    """Skip and scale of x ⊕ f = skip x + scale f, by channel.

    Raises:
        UserError: a residual that computes something else.
    """
    one, nothing = torch.ones(1, 1, width), torch.zeros(1, 1, width)
    x, f = _sample(2, 3, width), _sample(2, 3, 2 * width)[..., width:]
    if not _unchanged(residual.read):
        raise _refusal(f"the residual of {place}, {residual.label}, carries more than one stream")
    skip, scale = residual.write(one, nothing), residual.write(nothing, one)
    if skip.shape != one.shape or not torch.allclose(residual.write(x, f), skip * x + scale * f, atol=1e-5):
        raise _refusal(f"the residual of {place}, {residual.label}, computes something else than a x + b f")
    if not skip.all():
        raise _refusal(f"the residual of {place}, {residual.label}, does not add to the stream: it multiplies it by 0")
    return _number(skip[0, 0]), _number(scale[0, 0])


def _norm(place: str, norm: Norm) -> StandardNorm:
    """A norm in numbers.

    Raises:
        UserError: it is neither LayerNorm nor RMSNorm.
    """
    form = norm.standard()
    x = _sample(8, norm.width) * torch.logspace(-3, 1, 8)[:, None]  # small ones show what epsilon does
    if form is None or not torch.allclose(norm(x), form(x), rtol=1e-4, atol=1e-4):
        raise _refusal(f"the norm of {place}, {type(norm).__name__}, is neither LayerNorm nor RMSNorm")
    return form._replace(gain=_number(form.gain), bias=_number(form.bias))


def _is_plain(attention: AttentionStabilizer, heads: int, head_width: int) -> bool:
    """Whether queries, keys and values are mixed as everywhere, and nothing is handed to the layer above."""
    query, key, value = 3 * _sample(3, 1, heads, 5, head_width)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    try:
        mixed, carried = attention(query, key, value, mask, 0.0, None)
    except (RuntimeError, TypeError, ValueError):
        return False
    expected = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return carried is None and torch.allclose(mixed, expected, atol=1e-4)


def _refusal(why: str) -> UserError:
    return UserError(f"no plain Transformer equals this model: {why}; {ADVICE}")
