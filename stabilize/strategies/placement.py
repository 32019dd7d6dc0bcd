"""Axis `placement`: where the norms stand around the branches, on the levels of sublayer, layer and stack."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from stabilize.errors import UserError
from stabilize.strategies.norm import AcrossHeads
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
    normalizes_sums: ClassVar[bool] = False
    """True where the first thing after every sum of the stream and a branch is a norm."""
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

    def free_sums(self, site: Site) -> int:
        """How many sums of the stack of `site` follow one another without a norm on the stream between them."""
        return 0 if self.normalizes_stream else site.layers * len(site.roles)

    def refusals(self, stabilizer: Stabilizer) -> list[str]:
        residual, here = stabilizer.residual, type(self).__name__
        if self.normalizes_stream and not residual.plain_in_layers:
            why = f"its stream is more than one tensor, and {here} normalises the stream itself"
        elif self.widens_stream and not residual.plain_between_layers:
            why = "both keep more than the stream"
        else:
            return []
        return [f"{residual.label} cannot be combined with {here}: {why}; model.stabilizer.placement: PreNorm would do"]


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

    normalizes_stream = normalizes_sums = True

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
    normalizes_sums = False

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


class SandwichNorm(PreNorm):
    """Normalise what a branch reads, and once more what it gives, so that no branch can write more than its norm lets.

        x <- x ⊕ norm_out(f(norm(x)));  at the end of the stack x <- norm(x)

    Also: published for decoders without cross-attention, which is treated like the others here. CogView starts with
    output projections smaller by sqrt(2 depth), which the outer norm takes out again, and relaxes two operations for
    float16; neither belongs to the placement.
    Paper: Ding et al. 2021, arXiv:2105.13290
    """

    def slots(self, site: Site, norm: Callable[..., nn.Module]) -> dict[str, nn.Module]:
        return {"norm": norm(site)} if site.role == "final" else {"norm": norm(site), "out": norm(site)}

    def sublayer(self, stream: Stream, step: Step) -> Stream:
        return step.write(stream, step.out(step(step.norm(step.read(stream)))))


class PeriNorm(SandwichNorm):
    """Norms on what each branch reads and on what it gives, and on the embedding.

        x <- norm(x) at the start;  x <- x ⊕ norm_out(f(norm(x)));  at the end of the stack x <- norm(x)

    Also: the gains of the outer norms are learnt from one; frozen they do harm. Published for decoders without
    cross-attention, which is treated like the others here.
    Paper: Kim et al. 2025, arXiv:2502.02732

    Args:
        embedding: whether the embedding is normalised; without it this is SandwichNorm.
    """

    def __init__(self, embedding: bool = True) -> None:
        super().__init__()
        self.embedding = embedding

    def slots(self, site: Site, norm: Callable[..., nn.Module]) -> dict[str, nn.Module]:
        # The slot `out` of a stack's end is the norm of its beginning.
        return super().slots(site, norm) | ({"out": norm(site)} if self.embedding and site.role == "final" else {})

    def enter(self, x: Tensor, end: Step) -> Stream:
        return super().enter(end.out(x), end)


class SubNorm(PreNorm):
    """Pre-norm, and a second norm inside the branch, before its last projection.

        attention x <- x ⊕ W_O norm_in(mix(norm(x)));  feed-forward x <- x ⊕ W_2 norm_in(act(W_1 norm(x)))

    Also: at the end of the stack x <- norm(x). Cross-attention has no inner norm. Published with SubNormInit;
    configs/strategies/sub_ln.yaml sets both. The released code applies activation dropout before the inner norm, here
    it comes after.
    Paper: Wang et al. 2022, arXiv:2210.06423
    """

    def slots(self, site: Site, norm: Callable[..., nn.Module]) -> dict[str, nn.Module]:
        slots = {"norm": norm(site)}
        if site.role == "self_attention":
            slots["mixed"] = AcrossHeads(norm(site))
        elif site.role == "feed_forward":
            slots["hidden"] = norm(site, width=site.hidden)
        return slots


class HeadGain(Part):
    """One learnt gain a head, one at the start, in the slot `mixed` `[batch, heads, length, head width]`."""

    def build(self, site: Site, **needs: Any) -> None:
        self.gain = nn.Parameter(torch.ones(site.heads, 1, 1))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return (self.gain * x).to(x.dtype)


class NormFormer(SandwichNorm):
    """Pre-norm with a gain for each attention head, a norm after attention, and one inside the feed-forward branch.

        attention x <- x ⊕ norm_out(W_O (g_head mix(norm(x))));  feed-forward x <- x ⊕ W_2 norm_in(act(W_1 norm(x)))

    Also: at the end of the stack x <- norm(x). Cross-attention has only the norm on what it reads; the method is
    published for decoders without it, and fairseq has it in the decoder alone. fairseq scales the heads after W_O, the
    paper before it, as here; it drops out after norm_out, here before. The paper's scale on the skip (ResScale) hurt at
    1.3 billion parameters and is left out.
    Paper: Shleifer et al. 2021, arXiv:2110.09456
    """

    def slots(self, site: Site, norm: Callable[..., nn.Module]) -> dict[str, nn.Module]:
        slots = {"norm": norm(site)}
        if site.role == "self_attention":
            slots |= {"mixed": HeadGain().at(site), "out": norm(site)}
        elif site.role == "feed_forward":
            slots["hidden"] = norm(site, width=site.hidden)
        return slots


class HybridNorm(PreNorm):
    """Norms on queries, keys and values in attention, post-norm shifted by one branch in the feed-forward.

        attention x <- x ⊕ W_O mix(norm(q), norm(k), norm(v));  feed-forward n = norm(x), x <- n ⊕ f(n)

    Also: at the end of the stack x <- norm(x). The norms inside attention are of a head's width, one gain shared by
    the heads. Published for decoders without cross-attention, which is treated like self-attention here. Published with
    RMSNorm, epsilon 1e-5 and N(0, 1/(2.5 width)) weights; configs/strategies/hybrid_norm.yaml sets all, the weights by
    SmallInit, which is that where the hidden layer is four times as wide, but not cut off at three deviations.
    Paper: Zhuo et al. 2025, arXiv:2503.04598

    Args:
        first_layer_pre_norm: HybridNorm*: each branch of the first layer is x <- x ⊕ f(norm(x)), queries, keys and
            values normed as elsewhere.
    """

    normalizes_stream = True

    def __init__(self, first_layer_pre_norm: bool = False) -> None:
        super().__init__()
        self.first_layer_pre_norm = first_layer_pre_norm

    def _pre_norm(self, site: Site) -> bool:
        return self.first_layer_pre_norm and site.layer == 1

    def build(self, site: Site, **needs: Any) -> None:
        self.pre_norm = self._pre_norm(site)

    def slots(self, site: Site, norm: Callable[..., nn.Module]) -> dict[str, nn.Module]:
        if site.role in ("feed_forward", "final"):
            return {"norm": norm(site)}
        slots = {name: norm(site, width=site.head_width) for name in ("query", "key", "value")}
        return slots | {"norm": norm(site)} if self._pre_norm(site) else slots

    def layer(self, stream: Stream, steps: Sequence[Step]) -> Stream:
        *attention, feed_forward = steps
        stream = super().layer(stream, attention)
        if self.pre_norm:
            return self.sublayer(stream, feed_forward)
        normed = feed_forward.norm(stream)
        return feed_forward.write(normed, feed_forward(feed_forward.read(normed)))


class MixNorm(PreNorm):
    """Post-norm in the first layers of a stack, pre-norm in all others.

        x <- norm(x ⊕ f(x)) up to layer floor(post_share depth);  then x <- x ⊕ f(norm(x)), at the end x <- norm(x)

    Also: called Mix-LN. Published for decoders without cross-attention; here each stack counts its own layers.
    Paper: Li et al. 2024, arXiv:2412.13795

    Args:
        post_share: share of a stack's layers that are post-norm.
    """

    normalizes_stream = True

    def __init__(self, post_share: float = 0.25) -> None:
        super().__init__()
        if not 0 <= post_share <= 1:
            raise UserError(f"model.stabilizer.placement.post_share is {post_share}; a share from 0 to 1 would do")
        self.post_share = post_share

    def _post_layers(self, site: Site) -> int:
        return int(self.post_share * site.layers)

    def build(self, site: Site, **needs: Any) -> None:
        self.post_norm = site.layer <= self._post_layers(site)

    def sublayer(self, stream: Stream, step: Step) -> Stream:
        if self.post_norm:
            return step.norm(step.write(stream, step(step.read(stream))))
        return super().sublayer(stream, step)

    def free_sums(self, site: Site) -> int:
        return (site.layers - self._post_layers(site)) * len(site.roles)

    def constants(self, site: Site) -> dict[str, float]:
        return {"post-norm layers": self._post_layers(site)}


class NoNorm(Placement):
    """No norm at all, for methods that live by their initialisation or branch scales.

        x <- x ⊕ f(x)

    Paper: Bachlechner et al. 2020, arXiv:2003.04887, among others
    """

    def slots(self, site: Site, norm: Callable[..., nn.Module]) -> dict[str, nn.Module]:
        return {}

    def sublayer(self, stream: Stream, step: Step) -> Stream:
        return step.write(stream, step(step.read(stream)))
