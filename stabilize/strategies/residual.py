"""Axis `residual`: how a stream starts, is read by a branch and written back, what stands between layers, how it ends.

The equations write `x ⊕ f` for joining a branch's output f to the stream x; a placement says what f is and where the
norms stand.
"""

from __future__ import annotations

import contextlib
import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize.errors import UserError
from stabilize.strategies.epsilon import number_format
from stabilize.strategies.norm import refuse_without_mask
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

    @property
    def label(self) -> str:
        """What messages call it."""
        return type(self).__name__

    def build(self, site: Site, **needs: Any) -> None:
        if site.role in ("layer", "final"):
            self.build_link(site, **needs)
        else:
            self.build_branch(site, **needs)

    def build_branch(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        """Parameters of the copy at one branch."""

    def build_link(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        """Parameters of the copy around a layer, or at the end of the stack, where the layer's number is one more."""

    def share_with(self, branches: Sequence[Residual]) -> None:
        """Give the copies at the branches of a layer what they have in common with this one around it."""

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
        if sum_scale != "rsqrt2" and not 0 < sum_scale < math.inf:
            raise UserError(f"model.stabilizer.residual.sum_scale is {sum_scale}; above zero, or rsqrt2, would do")
        self.sum_scale = sum_scale
        self.factor = math.sqrt(0.5) if sum_scale == "rsqrt2" else float(sum_scale)

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return self.factor * (stream + branch)

    def constants(self, site: Site) -> dict[str, float]:
        return {"sum_scale": self.factor}

    def warnings(self, stabilizer: Stabilizer, site: Site, precision: str) -> list[str]:
        placement = stabilizer.placement
        if placement.normalizes_sums:
            name = type(placement).__name__
            return [f"ScaledSum under {name}: a norm follows the sum at once and takes the scale out again"]
        sums = placement.free_sums(site)
        left = self.factor**sums
        if not left < 0.01:
            return []
        return [
            f"ScaledSum over {sums} sums of the {site.stack} without a norm between them leaves {left:.1e} of the skip "
            "path, and of the gradient by it; the scale comes from shallow convolutional models (arXiv:1705.03122)"
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


class AdminResidual(Residual):
    """The skip is scaled, channel by channel, by how much the branches below it add to the stream before training.

        x ⊕ f = omega x + f;  omega_1 = 1, omega_i^2 = sum over j < i of Var f_j, taken where every omega is one

    Also: published with PostNorm and RAdam; where no norm follows, the omegas multiply. omega is learnt; it is set once
    by a forward in training mode on the first batch, from the variance of all entries, each stack by itself. Trained
    100+100 layers with batches of 8 x 4096 tokens, not with 128 x 4096 (notes of admin-torch).
    Paper: Liu et al. 2020, arXiv:2004.08249

    Args:
        profile: `paper` as above, by a reading note on the paper, whose own text was not at hand; `released` as the
            authors' code, which was read, and in which the skip's own variance counts too:
            omega_(i+1)^2 = Var(omega_i x) + Var f_i, omega_i in place when the next branch is measured.
    """

    helps_depth = True

    def __init__(self, profile: Literal["paper", "released"] = "paper") -> None:
        super().__init__()
        self.profile = profile

    def build_branch(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        self.stack = site.stack
        self.omega = nn.Parameter(torch.ones(site.width))

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return (self.omega * stream).to(stream.dtype) + branch

    def prepare(self, model: nn.Module, batch: Any) -> None:
        branches = [part for part in model.modules() if isinstance(part, AdminResidual) and hasattr(part, "omega")]
        if branches[0] is not self:
            return  # one forward serves them all
        omegas: dict[AdminResidual, Tensor] = {}
        square: dict[str, Tensor] = {}  # of a stack's next omega

        def measure(part: AdminResidual, stream: Tensor, branch: Tensor) -> Tensor:
            below = square.get(part.stack)
            omegas[part] = omega = stream.new_ones((), dtype=torch.float32) if below is None else below.sqrt()
            if part.profile == "released":
                part.omega.fill_(omega)
                below = (omega * stream.float()).var(correction=0)
            variance = branch.float().var(correction=0)
            square[part.stack] = variance if below is None else below + variance
            return type(part).write(part, stream, branch)

        with _rehearsal(model, batch.source.device):
            for part in branches:
                part.omega.fill_(1.0)
                vars(part)["write"] = functools.partial(measure, part)
            model(batch.source, batch.target[:, :-1])
            for part in branches:
                del vars(part)["write"]
                if torch.distributed.is_available() and torch.distributed.is_initialized():
                    torch.distributed.broadcast(omegas[part], 0)
                part.omega.fill_(omegas[part].item())


@contextlib.contextmanager
def _rehearsal(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the model as in training, and leave no trace in gradients, random numbers, modes and compiled graphs."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [] if device.type == "cpu" else [device]
    random = torch.random.fork_rng(devices, device_type=device.type)
    with torch.no_grad(), random, torch.compiler.set_stance("force_eager"):
        model.train()
        yield
    for module, mode in modes:
        module.training = mode


class AdminClosedForm(Residual):
    """The skip is scaled up with the depth of the stack, by Admin's rule without a profile.

        x ⊕ f = omega x + f;  omega = sqrt((n + 1) / ln(n + 1) - 1), n the branches of the stack: 2N or 3M

    Also: published with PostNorm; where no norm follows, the omegas multiply. The form stands in the authors' second
    code, admin-torch, not in the paper; omega is a constant as by default there. That a decoder has n = 3M is read from
    its "number of residual layers".
    Paper: Liu et al. 2020, arXiv:2004.08249

    Args:
        output_change: how the change of the output by an update grows with n: `logarithmic` as above; `constant` with
            omega = sqrt(n); `linear` with omega = 1, plain post-norm.
    """

    helps_depth = True

    def __init__(self, output_change: Literal["logarithmic", "constant", "linear"] = "logarithmic") -> None:
        super().__init__()
        self.output_change = output_change

    def build_branch(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        self.omega = self.constants(site)["omega"]

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return self.omega * stream + branch

    def constants(self, site: Site) -> dict[str, float]:
        n = site.layers * len(site.roles)
        square = {"logarithmic": (n + 1) / math.log(n + 1) - 1, "constant": n, "linear": 1}[self.output_change]
        return {"omega": math.sqrt(square)}


class ReZero(Residual):
    """The branches of a layer are scaled by one learnt number, zero at first, so that training starts at the identity.

        x ⊕ f = x + alpha f;  one alpha a layer, zero at the start

    Also: published without norms and without warm-up; configs/strategies/rezero.yaml sets all three. At the first
    update alpha alone has a gradient.
    Paper: Bachlechner et al. 2020, arXiv:2003.04887
    """

    def build_link(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        if site.role == "layer":
            self.alpha = nn.Parameter(torch.zeros(1))

    def share_with(self, branches: Sequence[Residual]) -> None:
        for branch in branches:
            branch.alpha = self.alpha

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return stream + self.alpha * branch

    def warnings(self, stabilizer: Stabilizer, site: Site, precision: str) -> list[str]:
        if number_format(precision) != torch.float16:
            return []
        return [
            f"ReZero under precision {precision}: unstable in float16 even where shallow, and diverges with 18+18 "
            "layers (Wang et al. 2022, arXiv:2203.00555)"
        ]


class SkipInit(Residual):
    """Each branch is scaled by a learnt number, zero or small at the start.

        x ⊕ f = x + alpha f;  alpha = initial

    Also: published for convolutional models, in place of their norms.
    Paper: De and Smith 2020, arXiv:2002.10444

    Args:
        initial: alpha before training; `rsqrt_branches` is 1/sqrt(n), n the branches of the stack: 2N or 3M.
    """

    def __init__(self, initial: float | Literal["rsqrt_branches"] = 0.0) -> None:
        super().__init__()
        self.initial = initial

    def build_branch(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        self.alpha = nn.Parameter(torch.tensor([self.constants(site)["alpha"]]))

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return stream + self.alpha * branch

    def constants(self, site: Site) -> dict[str, float]:
        branches = site.layers * len(site.roles)
        return {"alpha": branches**-0.5 if self.initial == "rsqrt_branches" else float(self.initial)}


class LayerScale(Residual):
    """Each branch is scaled channel by channel, by learnt gains that start small.

        x ⊕ f = x + gain f, gain a vector;  gain = initial

    Also: published for pre-norm vision models, whose authors' code starts by the model's size, not by its depth alone.
    Paper: Touvron et al. 2021, arXiv:2103.17239

    Args:
        initial: gain before training; none: by the depth of the stack, 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond.
    """

    def __init__(self, initial: float | None = None) -> None:
        super().__init__()
        self.initial = initial

    def build_branch(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        self.gain = nn.Parameter(torch.full((site.width,), self.constants(site)["gain"]))

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return stream + (self.gain * branch).to(stream.dtype)

    def constants(self, site: Site) -> dict[str, float]:
        by_depth = 0.1 if site.layers <= 18 else 1e-5 if site.layers <= 24 else 1e-6
        return {"gain": by_depth if self.initial is None else self.initial}


class BranchNorm(Residual):
    """The branches fade in over the first updates.

        x ⊕ f = x + alpha f;  alpha = min(1, t / updates), t the number of updates made

    Also: published with PostNorm, which is what it becomes. The paper's text was not at hand: the form is taken from
    Chen et al. 2026, arXiv:2603.05369, who name BranchNorm as this case (table 5, note 3), and fits its abstract. How
    many updates the paper takes, its "maximum norm step", is not known; 4000 is the length of a usual warm-up.
    Paper: Liu et al. 2023, arXiv:2305.02790

    Args:
        updates: the updates until a branch counts in full.
    """

    helps_depth = True
    alpha: Tensor

    def __init__(self, updates: int = 4000) -> None:
        super().__init__()
        if updates < 1:
            raise UserError(f"model.stabilizer.residual.updates is {updates}; it counts updates, so use 1 or more")
        self.updates = updates

    def build_branch(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        self.register_buffer("alpha", torch.zeros(()))

    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return stream + self.alpha * branch

    def after_update(self, update: int) -> None:
        for alpha in self.buffers():  # a branch has one, a link none
            alpha.fill_(min(1.0, update / self.updates))


class NoResidual(Residual):
    """No skip at all: the branch takes the stream's place.

        x ⊕ f = f

    Also: here to be measured, not to be used.
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
        if not 1 <= streams <= 64:
            raise UserError(f"model.stabilizer.residual.streams is {streams}; from 1 to 64 would do, 4 is usual")
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
            self.mix_scale, self.write_scale = (nn.Parameter(torch.tensor([0.01])) for _ in range(2))

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
    x_1 = w_0 y_0; configs/strategies/dlcl_post.yaml sets both. The placement's norm at the end of the stack stays.
    Keeps the output of every layer: time grows with depth squared.
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

    def refusals(self, stabilizer: Stabilizer) -> list[str]:
        return refuse_without_mask(self, stabilizer.norm)


class StochasticDepth(Residual):
    """In training a sentence skips each branch with a probability that rises with depth; kept branches make up for it.

        x ⊕ f = around(x, f k / (1 - p)), k = 0 with probability p, else 1;  p = rate l / L in layer l of L

    Also: one draw a sentence and branch; in evaluation x ⊕ f = around(x, f). Published for vision models.
    Paper: Huang et al. 2016, arXiv:1603.09382

    Args:
        around: how a branch that is not skipped joins the stream.
        rate: the probability in the last layer.
        first: `dropped` as above; `kept` never skips the first layer's branches, p = rate (l - 1) / (L - 1), as timm
            and torchscale do.
    """

    skip: Tensor

    def __init__(
        self,
        around: Residual = Sum(),  # noqa: B008  a template, only copied
        rate: float = 0.1,
        first: Literal["dropped", "kept"] = "dropped",
    ) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise UserError(f"model.stabilizer.residual.rate is {rate}; a probability from 0 to below 1 would do")
        self.around = around
        self.rate = rate
        self.first = first
        self.helps_depth = around.helps_depth
        self.plain_in_layers = around.plain_in_layers
        self.plain_between_layers = around.plain_between_layers

    @property
    def label(self) -> str:
        return f"{super().label} around {self.around.label}"

    def build_branch(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        self.around.build(site, norm=norm)
        kept = 1 if self.first == "kept" else 0
        share = (site.layer - kept) / max(1, site.layers - kept)
        self.register_buffer("skip", torch.tensor(self.rate * share), persistent=False)

    def build_link(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:
        self.around.build(site, norm=norm)

    def share_with(self, branches: Sequence[Residual]) -> None:
        self.around.share_with([branch.around for branch in branches if isinstance(branch, StochasticDepth)])

    def start(self, x: Tensor) -> Stream:
        return self.around.start(x)

    def read(self, stream: Stream) -> Tensor:
        return self.around.read(stream)

    def write(self, stream: Stream, branch: Tensor) -> Stream:
        if self.training:
            kept = torch.rand(branch.size(0), 1, 1, device=branch.device) >= self.skip
            branch = branch * kept / (1 - self.skip)
        return self.around.write(stream, branch)

    def link(self, stream: Stream, layer: Callable[[Stream], Stream]) -> Stream:
        return self.around.link(stream, layer)

    def end(self, stream: Stream) -> Tensor:
        return self.around.end(stream)

    def observe(self, stream: Stream) -> Tensor:
        return self.around.observe(stream)

    def constants(self, site: Site) -> dict[str, float]:
        return self.around.constants(site)

    def refusals(self, stabilizer: Stabilizer) -> list[str]:
        if stabilizer.placement.widens_stream:
            placement = type(stabilizer.placement).__name__
            return [
                f"{self.label} cannot be combined with {placement}: that sums the branches up itself, skipped or not; "
                "model.stabilizer.placement: PreNorm would do"
            ]
        return self.around.refusals(stabilizer)

    def warnings(self, stabilizer: Stabilizer, site: Site, precision: str) -> list[str]:
        return self.around.warnings(stabilizer, site, precision)
