"""Multi-head attention; what happens to the logits is the stabiliser's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from stabilize.model.projection import Projection
from stabilize.strategies import Site, Stabilizer

if TYPE_CHECKING:
    from stabilize.model.layer import Context


class Attention(nn.Module):
    """Self- or cross-attention, as `site.role` says.

    Args:
        site: where it stands.
        stabilizer: of the logits, and draws the weights.
        slots: inner norms and gains: `query`, `key`, `value`, `mixed`.
        norm: makes a norm for a site.
        dropout: rate on the attention weights.
    """

    def __init__(
        self,
        site: Site,
        stabilizer: Stabilizer,
        slots: dict[str, nn.Module],
        norm: Callable[..., nn.Module],
        dropout: float,
    ) -> None:
        super().__init__()
        self.place = (site.layer, site.role)
        self.heads = site.heads
        self.dropout = dropout
        self.crosses = site.role == "cross_attention"
        self.slots = nn.ModuleDict(slots)
        key_bias = stabilizer.attention.key_bias or "key" in slots
        sizes = (site.width, site.width, stabilizer)
        if self.crosses:
            self.query = Projection(site, ("query",), *sizes)
            self.value_key = Projection(site, ("value", "key"), *sizes, biased=2 if key_bias else 1)
        else:
            self.query_value_key = Projection(site, ("query", "value", "key"), *sizes, biased=3 if key_bias else 2)
        self.stabilizer = stabilizer.attention.at(site, norm=norm)
        self.output = Projection(site, ("output",), *sizes)

    def _slot(self, name: str, x: Tensor, real: Tensor) -> Tensor:
        return self.slots[name](x, real) if name in self.slots else x

    def _split(self, x: Tensor, groups: int) -> tuple[Tensor, ...]:
        """`[batch, length, groups * width]` as `groups` tensors `[batch, heads, length, head width]`."""
        return tuple(group.unflatten(-1, (self.heads, -1)).transpose(1, 2) for group in x.chunk(groups, dim=-1))

    def _mask(self, context: Context) -> Tensor:
        return cast(Tensor, context.memory_mask) if self.crosses else context.mask

    def _query_key_value(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        cached = context.cache.entries.get(self.place) if context.cache is not None else None
        if self.crosses:
            (query,) = self._split(self.query(x), 1)
            if cached is None:
                value, key = self._split(self.value_key(context.memory), 2)
        else:
            query, value, key = self._split(self.query_value_key(x), 3)
        query = self._slot("query", query, context.real)
        if self.crosses and cached is not None:
            return query, *cached
        real = context.real if context.memory_mask is None or not self.crosses else context.memory_mask[:, 0, 0]
        key, value = self._slot("key", key, real), self._slot("value", value, real)
        if context.cache is not None:
            if cached is not None:
                key, value = (torch.cat(pair, dim=2) for pair in zip(cached, (key, value), strict=True))
            context.cache.entries[self.place] = key, value
        return query, key, value

    def forward(self, x: Tensor, context: Context, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The branch's output `[batch, length, width]` and what is handed to the layer above."""
        query, key, value = self._query_key_value(x, context)
        dropout = self.dropout if self.training else 0.0
        mixed, carried = self.stabilizer(query, key, value, self._mask(context), dropout, carried)
        mixed = self._slot("mixed", mixed, context.real)
        return self.output(mixed.transpose(1, 2).flatten(2)), carried

    def observe_logits(self, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """What diagnostics look at: the logits that these inputs give, before the mask, and where real queries may look
        (broadcasts to the logits)."""
        x, context, carried = inputs
        query, key, _ = self._query_key_value(x, context)
        return self.stabilizer.logits(query, key, carried), self._mask(context) & context.real[:, None, :, None]
