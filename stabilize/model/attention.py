"""Multi-head attention; what happens to the logits is the stabiliser's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

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

    def _query_slot(self, name: str, x: Tensor, context: Context) -> Tensor:
        """A slot of what stands like the queries: by sentence where there is a cache, see `Cache`."""
        if name not in self.slots:
            return x
        return self._slot(name, x, context.real if context.cache is None else context.cache.by_sentence(context.real))

    def _query_key_value(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Where there is a cache, keys and values of earlier tokens too, and all by sentence."""
        cache = context.cache
        projected = self.query(x) if self.crosses else self.query_value_key(x)
        projected = projected if cache is None else cache.by_sentence(projected)
        if self.crosses:
            (query,) = self._split(projected, 1)
            return self._query_slot("query", query, context), *self._source_key_value(context)
        query, value, key = self._split(projected, 3)
        query, key, value = (
            self._query_slot(name, part, context) for name, part in (("query", query), ("key", key), ("value", value))
        )
        return query, *((key, value) if cache is None else cache.append(self.place, key, value))

    def _source_key_value(self, context: Context) -> tuple[Tensor, Tensor]:
        """Of the encoder's output; a cache keeps them."""
        if context.cache is not None and self.place in context.cache.source:
            return context.cache.source[self.place]
        value, key = self._split(self.value_key(context.memory), 2)
        real = cast(Tensor, context.memory_mask)[:, 0, 0, : key.size(2)]
        key, value = self._slot("key", key, real), self._slot("value", value, real)
        if context.cache is not None:
            key, value = (context.cache.filled(x.contiguous(), -2) for x in (key, value))
            context.cache.source[self.place] = key, value
        return key, value

    def forward(self, x: Tensor, context: Context, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The branch's output `[batch, length, width]` and what is handed to the layer above."""
        query, key, value = self._query_key_value(x, context)
        dropout = self.dropout if self.training else 0.0
        mixed, carried = self.stabilizer(query, key, value, self._mask(context), dropout, carried)
        mixed = self._query_slot("mixed", mixed, context).transpose(1, 2).flatten(2)
        return self.output(mixed if context.cache is None else context.cache.by_row(mixed)), carried

    def observe_logits(self, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """What diagnostics look at: the logits that these inputs give, before the mask, and where real queries may look
        (broadcasts to the logits). There is no cache where they look."""
        x, context, carried = inputs
        query, key, _ = self._query_key_value(x, context)
        return self.stabilizer.logits(query, key, carried), self._mask(context) & context.real[:, None, :, None]
