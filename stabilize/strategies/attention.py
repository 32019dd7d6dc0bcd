"""Axis `attention`: what tames the attention logits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize import kernels
from stabilize.errors import UserError
from stabilize.strategies.initialization import Role
from stabilize.strategies.norm import AcrossHeads, refuse_without_mask
from stabilize.strategies.site import Site
from stabilize.strategies.strategy import Part

if TYPE_CHECKING:
    from stabilize.strategies.stabilizer import Stabilizer


class AttentionStabilizer(Part):
    """Base of all attention stabilisers: from queries, keys and values to their mixture, one copy a branch."""

    key_bias: ClassVar[bool] = False
    """True where the logits depend on a bias of the keys; the softmax of plain logits cancels it."""

    def build(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:  # type: ignore[override]
        """`norm(site, width=None)` makes a norm."""

    @abstractmethod
    def logits(self, query: Tensor, key: Tensor, carried: Tensor | None) -> Tensor:
        """What the softmax is taken of, before the mask: `[batch, heads, length, source length]`. Diagnostics ask too.

        Args as for `forward`.
        """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Mix the values; a method whose logits are those of other queries and keys has a faster way.

        Args:
            query: `[batch, heads, length, head width]`.
            key, value: `[batch, heads, source length, head width]`.
            mask: true where a query may look, broadcasts to `[batch, heads, length, source length]`.
            dropout: rate on the attention weights, 0 in evaluation.
            carried: what the same branch of the layer below handed up; none at the bottom.

        Returns:
            The mixture `[batch, heads, length, head width]`, and what to hand to the layer above, or none.
        """
        return kernels.mix(self.logits(query, key, carried), value, mask, dropout), None


class PlainAttention(AttentionStabilizer):
    """Scaled dot products.

        softmax(q k^T / sqrt(d_head)) v

    Paper: Vaswani et al. 2017, arXiv:1706.03762
    """

    def logits(self, query: Tensor, key: Tensor, carried: Tensor | None) -> Tensor:
        return kernels.logits(query, key)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return kernels.attend(query, key, value, mask, dropout), None


class QKNorm(AttentionStabilizer):
    """Normalise queries and keys, so that no logit outgrows sqrt(d_head) times the gains.

        softmax(norm(q) norm(k)^T / sqrt(d_head)) v

    Also: the norm is the stabiliser's own (LayerNorm in ViT-22B, RMSNorm in Qwen3 and OLMo 2).
    Paper: Henry et al. 2020, arXiv:2010.04245; this form Dehghani et al. 2023, arXiv:2302.05442

    Args:
        over: `head` normalises each head with one gain of size d_head shared by the heads; `projection` normalises all
            heads together before they are split, as OLMo 2. These are different functions.
    """

    key_bias = True

    def __init__(self, over: Literal["head", "projection"] = "head") -> None:
        super().__init__()
        self.over = over

    def build(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:  # type: ignore[override]
        if self.over == "head":
            self.query_norm, self.key_norm = (norm(site, width=site.head_width) for _ in range(2))
        else:
            self.query_norm, self.key_norm = (AcrossHeads(norm(site, width=site.width)) for _ in range(2))

    def logits(self, query: Tensor, key: Tensor, carried: Tensor | None) -> Tensor:
        return kernels.logits(self.query_norm(query), self.key_norm(key))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return kernels.attend(self.query_norm(query), self.key_norm(key), value, mask, dropout), None

    def refusals(self, stabilizer: Stabilizer) -> list[str]:
        return refuse_without_mask(self, stabilizer.norm)


class RealFormer(AttentionStabilizer):
    """Each layer adds its logits to those of the layer below.

        S_l = q k^T / sqrt(d_head) + S_(l-1);  softmax(S_l) v

    Also: published on post-norm. The sum is handed on before the mask; self- and cross-attention have chains of their
    own.
    Paper: He et al. 2020, arXiv:2012.11747

    Args:
        running_mean: attend with softmax(S_l / l), S_l still handed on whole; the released code offers it for thirty
            layers and more.
    """

    share: Tensor

    def __init__(self, running_mean: bool = False) -> None:
        super().__init__()
        self.running_mean = running_mean

    def build(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:  # type: ignore[override]
        if self.running_mean:
            self.register_buffer("share", torch.tensor(1 / site.layer), persistent=False)

    def _logits_and_sum(self, query: Tensor, key: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        total = kernels.logits(query, key)
        if carried is not None:
            total = total + carried
        return total * self.share if self.running_mean else total, total

    def logits(self, query: Tensor, key: Tensor, carried: Tensor | None) -> Tensor:
        return self._logits_and_sum(query, key, carried)[0]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits, total = self._logits_and_sum(query, key, carried)
        return kernels.mix(logits, value, mask, dropout), total


class SoftCap(AttentionStabilizer):
    """No logit outgrows a cap, which it comes near ever more slowly.

        softmax(cap tanh(s / cap)) v, s = q k^T / sqrt(d_head)

    Also: before the mask. Gemma 2 caps the output's logits as well, at 30; here they stay.
    Paper: Gemma Team 2024, arXiv:2408.00118

    Args:
        cap: of the size of a logit.
    """

    key_bias = True

    def __init__(self, cap: float = 50.0) -> None:
        super().__init__()
        if not 0 < cap < math.inf:
            raise UserError(f"model.stabilizer.attention.cap is {cap}; a number above zero, such as 50, would do")
        self.cap = cap

    def logits(self, query: Tensor, key: Tensor, carried: Tensor | None) -> Tensor:
        return self.cap * torch.tanh(kernels.logits(query, key) / self.cap)


class CosineAttention(AttentionStabilizer):
    """Logits know the directions of queries and keys, not their lengths; nor do lengths of values count.

        softmax(scale cos(q, k)) value_scale v / |v|

    Also: no 1 / sqrt(d_head). The 10 is from the authors' released code, which leaves values as they are. That the
    paper normalises values, and has a scale for logits and one for values, tau and nu, is from a summary of it: where
    nu stands is read from its name, and its number is not known.
    Paper: Qi et al. 2023, arXiv:2304.09856

    Args:
        scale: the largest logit.
        learned: learn one scale a branch, from `scale` on; Henry et al. 2020, arXiv:2010.04245, do so, from about 12.
        values: `paper` as above; `released` mixes v itself.
        value_scale: the length of a normalised value.
    """

    key_bias = True
    scale: float | nn.Parameter  # a number in the template, what is learnt from there where it is placed

    def __init__(
        self,
        scale: float = 10.0,
        learned: bool = False,
        values: Literal["paper", "released"] = "paper",
        value_scale: float = 1.0,
    ) -> None:
        super().__init__()
        for key, value, such_as in (("scale", scale, 10), ("value_scale", value_scale, 1)):
            if not 0 < value < math.inf:
                would_do = f"a number above zero, such as {such_as}, would do"
                raise UserError(f"model.stabilizer.attention.{key} is {value}; {would_do}")
        self.scale = scale
        self.learned = learned
        self.values = values
        self.value_scale = value_scale

    def build(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:  # type: ignore[override]
        if self.learned:
            self.scale = nn.Parameter(torch.tensor([self.scale]))

    def _directions(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys whose scaled dot products are the logits."""
        stretched = self.scale * query.size(-1) ** 0.5 * F.normalize(query.float(), dim=-1)
        return stretched.to(query.dtype), F.normalize(key.float(), dim=-1).to(key.dtype)

    def logits(self, query: Tensor, key: Tensor, carried: Tensor | None) -> Tensor:
        return kernels.logits(*self._directions(query, key))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.values == "paper":
            value = (self.value_scale * F.normalize(value.float(), dim=-1)).to(value.dtype)
        return kernels.attend(*self._directions(query, key), value, mask, dropout), None


class ValueResidual(PlainAttention):
    """Each layer mixes the first layer's values into its own.

        softmax(q k^T / sqrt(d_head)) v_l';  v_l' = (1 - share) v_l + share v_1 for l > 1, v_1' = v_1

    Also: published in decoders without cross-attention; here self- and cross-attention have first values of their own.
    Paper: Zhou et al. 2024, arXiv:2410.17897

    Args:
        share: of the first layer's values.
    """

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        if not 0 <= share <= 1:
            raise UserError(f"model.stabilizer.attention.share is {share}; from 0 to 1, such as 0.5, would do")
        self.share = share

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        first = value if carried is None else carried
        mixed, _ = super().forward(query, key, (1 - self.share) * value + self.share * first, mask, dropout, None)
        return mixed, first


class SigmaReparam(PlainAttention):
    """Every linear layer has the largest singular value that it learns, so that attention does not collapse.

        W_hat = gamma W / sigma(W), sigma(W) the largest singular value of W;  gamma is one number a matrix, learnt

    Also: for query, key and value each by itself, and not for embeddings; attention itself stays as it is. Published
    on post-norm. sigma(W) = u^T W v with u and v from one power iteration an update, constants to the gradient. Checked
    in the authors' notes and code; the paper's own text was not at hand.
    Paper: Zhai et al. 2023, arXiv:2303.06296

    Args:
        start: of gamma; `one` as in the authors' JAX code, which takes the initialisation's gains out, `spectral` is
            sigma(W), so that the model starts as it was drawn, as in their PyTorch code, which did the translation.
    """

    helps_depth = True

    def __init__(self, start: Literal["one", "spectral"] = "one") -> None:
        super().__init__()
        self.start = start

    def form(self, weight: Tensor, site: Site, role: Role) -> nn.Module | None:
        return None if role == "embedding" else SpectralWeight(weight, self.start)

    def refusals(self, stabilizer: Stabilizer) -> list[str]:
        site, initialization = Site("encoder", 1, "feed_forward", 6, 6, 512, 8, 2048), stabilizer.initialization
        if all(initialization.gain(site, role) for role in get_args(Role)):
            return []
        name = type(initialization).__name__
        return [
            f"SigmaReparam cannot be combined with {name}: it divides each matrix by its largest singular value, and "
            f"some of {name} start at zero; model.stabilizer.initialization: Xavier would do"
        ]


class SpectralWeight(Part):
    """gamma W / sigma(W) for one matrix.

    Args:
        weight: the matrix as it was drawn, `[outputs, inputs]`.
        start: of gamma, see `SigmaReparam`.
    """

    v: Tensor
    next_v: Tensor

    def __init__(self, weight: Tensor, start: Literal["one", "spectral"]) -> None:
        super().__init__()
        matrix = weight.float()
        if matrix.size(0) < matrix.size(1):  # from the smaller of W W^T and W^T W, many times faster than from an SVD
            v = F.normalize(matrix.T @ torch.linalg.eigh(matrix @ matrix.T).eigenvectors[:, -1], dim=0)
        else:
            v = torch.linalg.eigh(matrix.T @ matrix).eigenvectors[:, -1].clone()
        largest = torch.ones(()) if start == "one" else torch.linalg.vector_norm(matrix @ v)
        self.gamma = nn.Parameter(largest[None])
        self.register_buffer("v", v)
        self.register_buffer("next_v", v.clone(), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """`weight`, with its largest singular value gamma."""
        matrix = weight.float()
        with torch.autocast(weight.device.type, enabled=False):
            with torch.no_grad():
                u = F.normalize(matrix @ self.v.float(), dim=0)
                v = F.normalize(matrix.T @ u, dim=0)
                if self.training:
                    self.next_v.copy_(v)
            sigma = u @ (matrix @ v)
        return weight * (self.gamma / sigma)

    def after_update(self, update: int) -> None:
        self.v.copy_(self.next_v)
