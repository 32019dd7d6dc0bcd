"""One layer: branches, and the stabiliser's wiring around them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stabilize import kernels
from stabilize.model.attention import Attention
from stabilize.model.cache import Cache
from stabilize.model.feed_forward import Activation, FeedForward
from stabilize.strategies import Site, Stabilizer, Stream

OUTER_SLOTS = ("norm", "out")

MOST_GRAPHS = 64
"""That one run may compile."""


@dataclass(frozen=True)
class Context:
    """What all layers of a stack share in one call. Training writes nothing into it.

    Args:
        real: `[batch, length]`, true at tokens that are not padding.
        mask: true where self-attention may look, broadcasts to `[batch, heads, length, keys]`.
        memory: the encoder's output `[batch, source length, width]`; none in the encoder.
        memory_mask: true where cross-attention may look.
        cache: keys and values of earlier tokens while decoding.
    """

    real: Tensor
    mask: Tensor
    memory: Tensor | None = None
    memory_mask: Tensor | None = None
    cache: Cache | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of batch, length and source length."""
        return (*self.real.shape, *(() if self.memory is None else self.memory.shape[1:2]))


@dataclass(frozen=True)
class Rates:
    """Dropout rates: on a branch's output and the embedding, on attention weights, after the activation."""

    dropout: float
    attention: float
    activation: float


class Branch(nn.Module):
    """One branch with its outer slots and its residual; at the end of a stack, those alone."""

    def __init__(
        self, site: Site, stabilizer: Stabilizer, precision: str, rates: Rates, activation: Activation
    ) -> None:
        super().__init__()
        self.role = site.role
        self.dropout = rates.dropout
        norm = functools.partial(stabilizer.make_norm, precision=precision)
        slots = stabilizer.placement.slots(site, norm)
        inner = {name: slot for name, slot in slots.items() if name not in OUTER_SLOTS}
        self.slots = nn.ModuleDict({name: slot for name, slot in slots.items() if name in OUTER_SLOTS})
        self.residual = stabilizer.residual.at(site, norm=norm)
        if site.role == "feed_forward":
            self.function: nn.Module = FeedForward(site, stabilizer, inner, activation, rates.activation)
        elif site.role != "final":
            self.function = Attention(site, stabilizer, inner, norm, rates.attention)


class Bound:
    """A branch for the length of one call: what a placement calls a step."""

    def __init__(self, branch: Branch, context: Context, carried: Tensor | None = None) -> None:
        self.branch, self.context, self.carried = branch, context, carried
        self.start, self.end = branch.residual.start, branch.residual.end
        self.read, self.write = branch.residual.read, branch.residual.write

    def __call__(self, x: Tensor) -> Tensor:
        output, self.carried = self.branch.function(x, self.context, self.carried)
        return kernels.dropout(output, self.branch.dropout) if self.branch.training else output

    def _slot(self, name: str, x: Tensor) -> Tensor:
        return self.branch.slots[name](x, self.context.real) if name in self.branch.slots else x

    def norm(self, x: Tensor) -> Tensor:
        return self._slot("norm", x)

    def out(self, x: Tensor) -> Tensor:
        return self._slot("out", x)


class Layer(nn.Module):
    """All branches of one layer. `forward` is the seam: hooks stay outside it, compiling and checkpointing inside.

    Args:
        site: the layer's place; its role is `layer`.
        stabilizer: wires the branches.
        precision: Lightning's, for the epsilon.
        rates: of dropout.
        activation: of the feed-forward branch.
    """

    def __init__(
        self, site: Site, stabilizer: Stabilizer, precision: str, rates: Rates, activation: Activation
    ) -> None:
        super().__init__()
        self.compiled = False
        """Run the layer through `torch.compile`; all layers share the graphs."""
        self.checkpointed = False
        """Keep only the layer's input for the backward pass and compute the rest again."""
        self.placement = stabilizer.placement.at(site)
        self.branches = nn.ModuleList(
            Branch(replace(site, role=role), stabilizer, precision, rates, activation) for role in site.roles
        )
        self.link = stabilizer.residual.at(site, norm=functools.partial(stabilizer.make_norm, precision=precision))
        self.link.share_with([branch.residual for branch in cast(Iterable[Branch], self.branches)])

    def run(self, stream: Stream, carry: dict[str, Tensor], context: Context) -> tuple[Stream, dict[str, Tensor]]:
        """The layer itself: the stream after it, and by role what its branches hand to the layer above."""
        branches = cast(Iterable[Branch], self.branches)
        steps = [Bound(branch, context, carry.get(branch.role)) for branch in branches]
        stream = self.placement.layer(stream, steps)
        return stream, {step.branch.role: step.carried for step in steps if step.carried is not None}

    def forward(self, stream: Stream, carry: dict[str, Tensor], context: Context) -> tuple[Stream, dict[str, Tensor]]:
        """`run`, compiled or checkpointed where asked."""
        # A cache changes with every token, and a size of one is compiled for itself: both would compile anew and anew.
        compiles = self.compiled and context.cache is None and 1 not in context.sizes
        run: Callable[..., Any] = functools.partial(compiled_run(), self) if compiles else self.run
        if self.checkpointed and torch.is_grad_enabled():
            return checkpoint(run, stream, carry, context, use_reentrant=False)
        return run(stream, carry, context)

    def observe(self, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """What diagnostics look at: the layer's output `[batch, length, width]`, and the mask of real tokens."""
        return self.link.observe(self.placement.observe(output[0])), inputs[2].real

    def skip(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """What stands in the place of the layer's output where it is left out."""
        return inputs[:2]

    @property
    def roles(self) -> dict[str, nn.Module]:
        """The branches by role."""
        return {branch.role: branch for branch in cast(Iterable[Branch], self.branches)}


@functools.cache
def compiled_run() -> Callable[..., Any]:
    """`Layer.run`, compiled once for all layers: a compiled bound method would stay with the layer it was made of.

    Sizes that happen to be equal are not taken for the same size. The limit on graphs is torch's guard against endless
    compiling, which ends the run; stacks, training, evaluation and precisions together may need more than its eight.
    """
    import torch._dynamo.config as dynamo  # half a second that only who compiles should wait for
    import torch.fx.experimental._config as shapes

    run = torch.compile(Layer.run, fullgraph=True, dynamic=True)
    limited = dynamo.patch(recompile_limit=MOST_GRAPHS)(run)
    return shapes.patch(use_duck_shape=False)(limited)  # type: ignore[attr-defined]
