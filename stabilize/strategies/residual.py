"""Axis `residual`: how a stream starts, is read by a branch and written back, what stands between layers, how it ends.

The equations write `x ⊕ f` for joining a branch's output f to the stream x; a placement says what f is and where the
norms stand.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize.errors import UserError
from stabilize.strategies.site import Site
from stabilize.strategies.strategy import Part

if TYPE_CHECKING:
    from stabilize.strategies.stabilizer import Stabilizer

Stream: TypeAlias = Any
"""What runs through a stack: mostly `[batch, length, width]`; a residual or placement may carry more."""


class Residual(Part):
    """Base of all residuals. Override only what differs.

    One copy is placed at every branch (`build`); one around every layer, the link, and one at the end of the stack
    (`build_link`). All get `norm`, which makes a norm for a site.
    """

    plain_in_layers: bool = True
    """Whether the stream is one tensor `[batch, length, width]` within a layer, so that a norm can stand on it."""
    plain_between_layers: bool = True
    """The same between layers."""

    def build(self, site: Site, **needs: Any) -> None:
        if site.role in ("layer", "final"):
            self.build_link(site, **needs)
        else:
            self.build_branch(site, **needs)

    def build_branch(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        """Parameters of the copy at one branch."""

    def build_link(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        """Parameters of the copy around a layer, or at the end of the stack, where the layer's number is one more."""

    def start(self, x: Tensor) -> Stream:
        """The stream that begins with the embedding x `[batch, length, width]`."""
        return x

    def read(self, stream: Stream) -> Tensor:
        """What a branch sees of the stream, `[batch, length, width]`."""
        return stream

    @abstractmethod
    def write(self, stream: Stream, branch: Tensor) -> Stream:
        """The stream with a branch's output `[batch, length, width]` joined to it."""

    def link(self, stream: Stream, layer: Callable[[Stream], Stream]) -> Stream:
        """One layer run on the stream, and what stands between this layer and the next."""
        return layer(stream)

    def end(self, stream: Stream) -> Tensor:
        """The stack's output `[batch, length, width]`, before a final norm."""
        return stream

    def observe(self, stream: Stream) -> Tensor:
        """The stream as diagnostics see it, `[batch, length, width]`."""
        return stream


class Sum(Residual):
    """The branch is added to the stream.

        x ⊕ f = x + f

    Paper: He et al. 2016, arXiv:1512.03385
    """

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return stream + branch


class ScaledSum(Residual):
    """The sum is scaled, so that two parts of variance one give a sum of variance one.

        x ⊕ f = sum_scale (x + f)

    Also: after k sums the skip path alone has shrunk by sum_scale^k, and with it the gradient.
    Paper: Gehring et al. 2017 (convolutional, with weight norm), arXiv:1705.03122

    Args:
        sum_scale: multiplies x + f; `rsqrt2` is 1/sqrt(2).
    """

    def __init__(self, sum_scale: float | Literal["rsqrt2"] = "rsqrt2") -> None:
        super().__init__()
        self.sum_scale = sum_scale
        self.factor = math.sqrt(0.5) if sum_scale == "rsqrt2" else float(sum_scale)

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return self.factor * (stream + branch)

    def constants(self, site: Site) -> dict[str, float]:
        return {"sum_scale": self.factor}

    def warnings(self, stabilizer: Stabilizer, site: Site, precision: str) -> list[str]:
        if stabilizer.placement.normalizes_stream:
            name = type(stabilizer.placement).__name__
            return [f"ScaledSum under {name}: a norm follows the sum at once and takes the scale out again"]
        left = self.factor ** (site.layers * len(site.roles))
        if not left < 0.01:
            return []
        return [
            f"ScaledSum over the {site.layers} layers of the {site.stack} leaves {left:.1e} of the skip path, and of "
            "the first layer's gradient by it; the scale comes from shallow convolutional models (arXiv:1705.03122)"
        ]


class DeepNormResidual(Residual):
    """The skip is scaled up with depth, so that an update changes the model by a bounded amount.

        x ⊕ f = alpha x + f;  encoder alpha = 0.81 (N^4 M)^(1/16), decoder alpha = (3M)^(1/4)

    Also: published with PostNorm and DeepNormInit; configs/strategies/deepnorm.yaml sets all three.
    Paper: Wang et al. 2022, arXiv:2203.00555
    """

    helps_depth = True

    def build_branch(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        self.alpha = self.constants(site)["alpha"]

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return self.alpha * stream + branch

    def constants(self, site: Site) -> dict[str, float]:
        n, m = site.encoder_layers, site.decoder_layers
        return {"alpha": 0.81 * (n**4 * m) ** (1 / 16) if site.stack == "encoder" else (3 * m) ** 0.25}


class NoResidual(Residual):
    """No skip at all: the branch takes the stream's place. Here to be measured, not to be used.

    x ⊕ f = f
    """

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return branch

    def warnings(self, stabilizer: Stabilizer, site: Site, precision: str) -> list[str]:
        return [
            "NoResidual: attention without skips loses rank doubly exponentially with depth "
            "(Dong et al. 2021, arXiv:2103.03404); it is here to be measured"
        ]


class HyperConnections(Residual):
    """Several parallel streams; a branch reads a mixture of them and is written to each with a weight of its own.

        h = a . H;  H <- R^T H + b f(h), H the n streams; each starts as x, the end is their sum

    Also: a = e_(position mod n), R = I and b = 1 at the start, which equals the plain sum. Dynamic weights add, per
    token, a += s tanh(norm(H) W_a), R += s tanh(norm(H) W_R), b += t tanh(norm(H) W_b); W zero, s and t 0.01 at first.
    Paper: Zhu et al. 2024, arXiv:2409.19606

    Args:
        streams: n; the paper finds 4 best and 1 of no help.
        dynamic: let the weights depend on the token.
    """

    plain_in_layers = plain_between_layers = False

    def __init__(self, streams: int = 4, dynamic: bool = False) -> None:
        super().__init__()
        if streams < 1:
            raise UserError(f"model.stabilizer.residual.streams is {streams}; 1 is the least that will do, 4 is usual")
        self.streams = streams
        self.dynamic = dynamic

    def build_branch(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        n = self.streams
        self.read_weight = nn.Parameter(F.one_hot(torch.tensor((site.position - 1) % n), n).float())
        self.mix_weight = nn.Parameter(torch.eye(n))
        self.write_weight = nn.Parameter(torch.ones(n))
        if self.dynamic:
            self.read_by_token = nn.Parameter(torch.zeros(site.width))
            self.mix_by_token = nn.Parameter(torch.zeros(site.width, n))
            self.write_by_token = nn.Parameter(torch.zeros(site.width))
            self.mix_scale, self.write_scale = (nn.Parameter(torch.tensor(0.01)) for _ in range(2))

    def start(self, x: Tensor) -> Tensor:
        return x.expand(self.streams, *x.shape).contiguous()

    def read(self, stream: Tensor) -> Tensor:
        if not self.dynamic:
            return torch.einsum("nbld,n->bld", stream, self.read_weight)
        shift = torch.einsum("nbld,d->nbl", self._normed(stream), self.read_by_token)
        weight = self.read_weight[:, None, None] + self.mix_scale * torch.tanh(shift)
        return torch.einsum("nbld,nbl->bld", stream, weight)

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        if not self.dynamic:
            mixed = (self.mix_weight.t() @ stream.flatten(1)).view_as(stream)
            return mixed + self.write_weight[:, None, None, None] * branch
        normed = self._normed(stream)
        shift = torch.einsum("nbld,dm->nmbl", normed, self.mix_by_token)
        mix = self.mix_weight[:, :, None, None] + self.mix_scale * torch.tanh(shift)
        gain = torch.tanh(torch.einsum("nbld,d->nbl", normed, self.write_by_token))
        write = self.write_weight[:, None, None] + self.write_scale * gain
        mixed = torch.einsum("nbld,nmbl->mbld", stream, mix) + write[..., None] * branch
        return mixed.contiguous()  # one memory layout from layer to layer, or each would compile anew

    @staticmethod
    def _normed(stream: Tensor) -> Tensor:
        return F.layer_norm(stream.float(), stream.shape[-1:]).to(stream.dtype)

    def end(self, stream: Tensor) -> Tensor:
        return stream.sum(0)

    def observe(self, stream: Tensor) -> Tensor:
        return stream.sum(0)


class DLCL(Sum):
    """Each layer reads a learnt combination of the outputs of all layers below it.

        x_(l+1) = sum_k w_k norm_k(y_k), y_0 the embedding, unnormed;  within a layer x ⊕ f = x + f

    Also: w = 1/(l+1) at the start. With `normalize: sum`, for post-norm layers, x_(l+1) = norm(sum_k w_k y_k), but
    x_1 = w_0 y_0. The placement's norm at the end of the stack stays. Keeps the output of every layer: time grows with
    depth squared.
    Paper: Wang et al. 2019, arXiv:1906.01787

    Args:
        normalize: `each` normalises each layer's output (published with pre-norm), `sum` their sum (with post-norm).
    """

    plain_between_layers = False

    def __init__(self, normalize: Literal["each", "sum"] = "each") -> None:
        super().__init__()
        self.normalize = normalize

    def build_link(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        self.weight = nn.Parameter(torch.full((site.layer,), 1 / site.layer))
        if site.layer > 1 if self.normalize == "sum" else site.role == "layer":
            self.norm = norm(site)

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def link(self, history: tuple[Tensor, ...], layer: Callable[[Stream], Stream]) -> tuple[Tensor, ...]:
        output = layer(self.end(history))
        return (*history, self.norm(output) if self.normalize == "each" else output)

    def end(self, history: tuple[Tensor, ...]) -> Tensor:
        combined = torch.einsum("kbld,k->bld", torch.stack(history), self.weight)
        return self.norm(combined) if self.normalize == "sum" and len(history) > 1 else combined
