"""Axis `attention`: what tames the attention logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from stabilize import kernels
from stabilize.strategies.site import Site
from stabilize.strategies.strategy import Part


class AttentionStabilizer(Part):
    """Base of all attention stabilisers: from queries, keys and values to their mixture, one copy a branch."""

    key_bias: ClassVar[bool] = False
    """True where the logits depend on a bias of the keys; the softmax of plain logits cancels it."""

    def build(self, site: Site, *, norm: Callable[..., nn.Module]) -> None:  # type: ignore[override]
        """`norm(site, width=None)` makes a norm."""

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Mix the values.

        Args:
            query: `[batch, heads, length, head width]`.
            key, value: `[batch, heads, source length, head width]`.
            mask: true where a query may look, broadcasts to `[batch, heads, length, source length]`.
            dropout: rate on the attention weights, 0 in evaluation.
            carried: what the same branch of the layer below handed up; none at the bottom.

        Returns:
            The mixture `[batch, heads, length, head width]`, and what to hand to the layer above, or none.
        """


class PlainAttention(AttentionStabilizer):
    """Scaled dot products.

        softmax(q k^T / sqrt(d_head)) v

    Paper: Vaswani et al. 2017, arXiv:1706.03762
    """

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
        width = site.head_width if self.over == "head" else site.width
        self.query_norm, self.key_norm = norm(site, width=width), norm(site, width=width)

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        if self.over == "head":
            return norm(x)
        return norm(x.transpose(1, 2).flatten(2)).unflatten(-1, (x.size(1), -1)).transpose(1, 2)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        query, key = self._normed(self.query_norm, query), self._normed(self.key_norm, key)
        return kernels.attend(query, key, value, mask, dropout), None


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

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits = kernels.logits(query, key)
        if carried is not None:
            logits = logits + carried
        return kernels.mix(logits * self.share if self.running_mean else logits, value, mask, dropout), logits
