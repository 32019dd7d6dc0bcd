"""Axis `placement`: where the norms stand around the branches, on the levels of sublayer, layer and stack."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor, nn

from stabilize.strategies.residual import Stream
from stabilize.strategies.site import Site
from stabilize.strategies.strategy import Part

if TYPE_CHECKING:
    from stabilize.strategies.stabilizer import Stabilizer


class Step(Protocol):
    """One branch as a placement sees it: the branch itself, its norms, and its residual."""

    def __call__(self, x: Tensor) -> Tensor:
        """f(x), with dropout."""

    def norm(self, x: Tensor) -> Tensor:
        """The slot `norm` of this branch; the identity where the placement gave none."""

    def out(self, x: Tensor) -> Tensor:
        """The slot `out` of this branch; the identity where the placement gave none."""

    def read(self, stream: Stream) -> Tensor:
        """`Residual.read`."""

    def write(self, stream: Stream, branch: Tensor) -> Stream:
        """`Residual.write`."""

    def start(self, x: Tensor) -> Stream:
        """`Residual.start`."""

    def end(self, stream: Stream) -> Tensor:
        """`Residual.end`."""


class Placement(Part):
    """Base of all placements. Override only what differs."""

    normalizes_stream: ClassVar[bool] = False
    """True where a norm stands on the stream itself, not only on what a branch reads or gives."""
    widens_stream: ClassVar[bool] = False
    """True where the placement keeps more than the residual's stream."""

    def slots(self, site: Site, norm: Callable[..., nn.Module]) -> dict[str, nn.Module]:
        """Norms and gains of the branch at `site`, or of the stack's end (role `final`), by slot.

        `norm(site, width=None)` makes one. Outer slots: `norm`, `out`. Inner slots of attention: `query`, `key`,
        `value`, `mixed` (each `[batch, heads, length, head width]`); of the feed-forward: `hidden_in`, `hidden`.
        """
        return {"norm": norm(site)}

    @abstractmethod
    def sublayer(self, stream: Stream, step: Step) -> Stream:
        """The stream after one branch."""

    def layer(self, stream: Stream, steps: Sequence[Step]) -> Stream:
        """The stream after all branches of a layer."""
        for step in steps:
            stream = self.sublayer(stream, step)
        return stream

    def enter(self, x: Tensor, end: Step) -> Stream:
        """The stream at the bottom of a stack, from the embedding `[batch, length, width]`."""
        return end.start(x)

    def leave(self, stream: Stream, end: Step) -> Tensor:
        """The stack's output `[batch, length, width]`."""
        return end.end(stream)

    def observe(self, stream: Stream) -> Stream:
        """The part of the stream that the residual knows; diagnostics look at it."""
        return stream

    def refusals(self, stabilizer: Stabilizer) -> list[str]:
        residual, here = stabilizer.residual, type(self).__name__
        if self.normalizes_stream and not residual.plain_in_layers:
            why = f"its stream is more than one tensor, and {here} normalises the stream itself"
        elif self.widens_stream and not residual.plain_between_layers:
            why = "both keep more than the stream"
        else:
            return []
        name = type(residual).__name__
        return [f"{name} cannot be combined with {here}: {why}; model.stabilizer.placement: PreNorm would do"]


class PreNorm(Placement):
    """Normalise what a branch reads; the stream itself stays free.

        x <- x ⊕ f(norm(x));  at the end of the stack x <- norm(x)

    Paper: Xiong et al. 2020, arXiv:2002.04745
    """

    def sublayer(self, stream: Stream, step: Step) -> Stream:
        return step.write(stream, step(step.norm(step.read(stream))))

    def leave(self, stream: Stream, end: Step) -> Tensor:
        return end.norm(end.end(stream))


class PostNorm(Placement):
    """Normalise the stream after each sum, as the original Transformer.

        x <- norm(x ⊕ f(x));  no norm at the end

    Also: needs warm-up, and without a depth-aware residual or initialisation stops training at about ten layers.
    Paper: Vaswani et al. 2017, arXiv:1706.03762
    """

    normalizes_stream = True

    def slots(self, site: Site, norm: Callable[..., nn.Module]) -> dict[str, nn.Module]:
        return {} if site.role == "final" else {"norm": norm(site)}

    def sublayer(self, stream: Stream, step: Step) -> Stream:
        return step.norm(step.write(stream, step(step.read(stream))))

    def warnings(self, stabilizer: Stabilizer, site: Site, precision: str) -> list[str]:
        if site.layers < 10 or any(part.helps_depth for part in stabilizer.axes.values()):
            return []
        return [
            f"{type(self).__name__} over the {site.layers} layers of the {site.stack}: post-norm is unstable with ten "
            "or more (Takase et al. 2022, arXiv:2206.00330); B2T, PreNorm or configs/strategies/deepnorm.yaml help"
        ]


class B2T(PostNorm):
    """Post-norm, and each layer's input skips to just before the layer's last norm.

        x <- norm(x ⊕ f(x)), in a layer's last branch x <- norm(bottom + (x ⊕ f(x))), bottom the layer's input

    Also: the authors' released code multiplies every layer weight by depth^-1/2, the paper does not; this is the paper.
    Paper: Takase et al. 2022, arXiv:2206.00330
    """

    helps_depth = True

    def layer(self, stream: Stream, steps: Sequence[Step]) -> Stream:
        bottom, (*inner, last) = stream, steps
        for step in inner:
            stream = self.sublayer(stream, step)
        return last.norm(bottom + last.write(stream, last(last.read(stream))))


class ResiDual(PostNorm):
    """A post-norm stream, and beside it a second one that only sums the branches up and is normed once, at the end.

        h = f(x);  x <- norm(x ⊕ h), r <- r + h, r = x at the start;  at the end x + norm(r)

    Also: r is kept in float32, for it grows with depth. The released code uses epsilon 1e-7 in the last norm; here the
    epsilon axis decides.
    Paper: Xie et al. 2023, arXiv:2304.14802
    """

    helps_depth = True
    widens_stream = True

    def slots(self, site: Site, norm: Callable[..., nn.Module]) -> dict[str, nn.Module]:
        return {"norm": norm(site)}

    def enter(self, x: Tensor, end: Step) -> Stream:
        return end.start(x), x.float()

    def sublayer(self, stream: Stream, step: Step) -> Stream:
        x, dual = stream
        branch = step(step.read(x))
        return step.norm(step.write(x, branch)), dual + branch

    def leave(self, stream: Stream, end: Step) -> Tensor:
        x, dual = stream
        return end.end(x) + end.norm(dual).to(x.dtype)

    def observe(self, stream: Stream) -> Stream:
        return stream[0]


class NoNorm(Placement):
    """No norm at all, for methods that live by their initialisation or branch scales.

        x <- x ⊕ f(x)

    Paper: Bachlechner et al. 2020, arXiv:2003.04887, among others
    """

    def slots(self, site: Site, norm: Callable[..., nn.Module]) -> dict[str, nn.Module]:
        return {}

    def sublayer(self, stream: Stream, step: Step) -> Stream:
        return step.write(stream, step(step.read(stream)))
