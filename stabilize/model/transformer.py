"""Encoder, decoder, and the two together."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from stabilize import kernels
from stabilize.errors import UserError
from stabilize.model.cache import Cache
from stabilize.model.embedding import Embedding, Positions
from stabilize.model.feed_forward import Activation
from stabilize.model.layer import Bound, Branch, Context, Layer, Rates
from stabilize.model.projection import Projection
from stabilize.strategies import Site, Stabilizer, Stream
from stabilize.tokens import PAD


@dataclass(frozen=True)
class Sizes:
    """The model's shape, all that does not belong to the stabiliser.

    Args:
        encoder_layers: depth of the encoder.
        decoder_layers: depth of the decoder.
        width: size of the stream.
        heads: attention heads; divides the width.
        hidden: inner size of the feed-forward branch.
        activation: `relu`, `gelu` or `swiglu`.
        positions: `sinusoidal` or `learned`.
        maximum_length: number of learned positions.
        tied: source embedding, target embedding and output projection are one matrix.
        dropout: rate on each branch's output and on the embedding.
        attention_dropout: rate on the attention weights.
        activation_dropout: rate after the feed-forward activation.
    """

    encoder_layers: int = 6
    decoder_layers: int = 6
    width: int = 512
    heads: int = 8
    hidden: int = 2048
    activation: Activation = "relu"
    positions: Positions = "sinusoidal"
    maximum_length: int = 1024
    tied: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("encoder_layers", "decoder_layers", "width", "heads", "hidden", "maximum_length"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}; 1 is the least that will do")
        if self.width % self.heads:
            raise UserError(f"model.width is {self.width}, which model.heads, {self.heads}, does not divide")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}; a rate from 0 to below 1 would do")

    def check_memory(self, vocabulary: int) -> None:
        """Look at the weights of attention, feed-forward and one embedding, before any is made.

        Raises:
            UserError: this machine cannot hold them, which the system would notice only when it is full.
        """
        attentions = self.encoder_layers + 2 * self.decoder_layers
        feed_forwards = self.encoder_layers + self.decoder_layers
        weights = self.width * (4 * self.width * attentions + 2 * self.hidden * feed_forwards + vocabulary)
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 4 * weights > there:
            shape = ("encoder_layers", "decoder_layers", "width", "hidden")
            raise UserError(
                f"{', '.join(f'model.{name} {getattr(self, name)}' for name in shape)} make {weights:.1e} weights or "
                f"more, {4 * weights / 2**30:.0f} GiB, and this machine has {there / 2**30:.0f}; less would do"
            )

    def site(self, stack: str, layer: int, role: str) -> Site:
        """A place in a model of this shape."""
        return Site(stack, layer, role, self.encoder_layers, self.decoder_layers, self.width, self.heads, self.hidden)


@dataclass(frozen=True)
class Memory:
    """What the decoder sees of the source.

    Args:
        states: the encoder's output `[batch, source length, width]`.
        mask: true at real tokens, `[batch, 1, 1, source length]`.
    """

    states: Tensor
    mask: Tensor

    def select(self, rows: Tensor) -> Memory:
        """The sentences whose numbers are in `rows`, in that order."""
        return Memory(self.states.index_select(0, rows), self.mask.index_select(0, rows))


class Stack(nn.Module):
    """The encoder's or the decoder's layers between the stream's start and its end."""

    def __init__(self, name: str, sizes: Sizes, stabilizer: Stabilizer, precision: str) -> None:
        super().__init__()
        depth = sizes.encoder_layers if name == "encoder" else sizes.decoder_layers
        rates = Rates(sizes.dropout, sizes.attention_dropout, sizes.activation_dropout)
        self.layers = nn.ModuleList(
            Layer(sizes.site(name, number, "layer"), stabilizer, precision, rates, sizes.activation)
            for number in range(1, depth + 1)
        )
        final = sizes.site(name, depth + 1, "final")
        self.placement = stabilizer.placement.at(final)
        self.end = Branch(final, stabilizer, precision, rates, sizes.activation)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The stack's output `[batch, length, width]` for the embedding x of the same shape."""
        end = Bound(self.end, context)
        stream = self.placement.enter(x, end)
        carry: dict[str, Tensor] = {}

        for layer in cast(Iterable[Layer], self.layers):

            def run(stream: Stream, layer: Layer = layer) -> Stream:
                nonlocal carry
                stream, carry = layer(stream, carry, context)
                return stream

            stream = layer.link.link(stream, run)
        return self.placement.leave(stream, end)


class EncoderDecoder(nn.Module):
    """The Transformer (Vaswani et al. 2017, arXiv:1706.03762) with stabilisers for its stacks.

    Args:
        vocabulary: number of tokens, shared by source and target.
        sizes: the shape.
        stabilizer: of the encoder, and of the embeddings and the output projection.
        decoder_stabilizer: of the decoder; none: the same.
        precision: Lightning's, which some epsilons depend on.
    """

    def __init__(
        self,
        vocabulary: int,
        sizes: Sizes,
        stabilizer: Stabilizer,
        decoder_stabilizer: Stabilizer | None = None,
        precision: str = "32-true",
    ) -> None:
        super().__init__()
        if torch.get_default_device().type == "cpu":
            sizes.check_memory(vocabulary)
        decoder_stabilizer = decoder_stabilizer or stabilizer

        def embedding(stack: str, chosen: Stabilizer) -> Embedding:
            site = sizes.site(stack, 0, "embedding")
            rest = (sizes.positions, sizes.maximum_length, sizes.dropout)
            return Embedding(site, vocabulary, chosen, *rest)

        self.source_embedding = embedding("encoder", stabilizer)
        self.target_embedding = self.source_embedding if sizes.tied else embedding("decoder", decoder_stabilizer)
        self.encoder = Stack("encoder", sizes, stabilizer, precision)
        self.decoder = Stack("decoder", sizes, decoder_stabilizer, precision)
        self.output: Projection | None = None
        if not sizes.tied:
            site = sizes.site("decoder", sizes.decoder_layers + 1, "final")
            self.output = Projection(site, ("output",), sizes.width, vocabulary, decoder_stabilizer)

    @property
    def longest(self) -> int | None:
        """The most tokens that a sentence may have; none where positions have no end."""
        return self.target_embedding.longest

    @property
    def classifier(self) -> nn.Parameter:
        """The weight that makes logits."""
        return (self.output or self.target_embedding).weight

    @property
    def layers(self) -> list[Layer]:
        """All layers, the encoder's first."""
        return [*self.encoder.layers, *self.decoder.layers]

    def encode(self, source: Tensor) -> Memory:
        """What the decoder sees of `source` `[batch, source length]`."""
        real = source != PAD
        mask = real[:, None, None]
        return Memory(self.encoder(self.source_embedding(source), Context(real, mask)), mask)

    def decode(self, target: Tensor, memory: Memory, cache: Cache | None = None) -> Tensor:
        """The decoder's output `[batch, length, width]` for `target` `[batch, length]`.

        With a cache, `target` holds only the tokens that are new, of each of its rows, and the cache takes them in.
        """
        start, length, memory_mask = 0, target.size(1), memory.mask
        if cache is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        else:
            start, memory_mask = cache.length, cache.filled(memory_mask, -1)
            mask = cache.extend(len(memory.states), length, target.device)
        context = Context(target != PAD, mask, memory.states, memory_mask, cache)
        return self.decoder(self.target_embedding(target, start), context)

    def output_matrix(self) -> tuple[Tensor, Tensor | None]:
        """W `[vocabulary, width]` and b `[vocabulary]` or none, which make logits of the decoder's output."""
        return (self.target_embedding.matrix(), None) if self.output is None else self.output.matrix()

    def project(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocabulary]` of the decoder's output `[..., width]`."""
        return kernels.linear(hidden, *self.output_matrix())

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The decoder's output `[batch, length, width]` for whole sentences."""
        return self.decode(target, self.encode(source))
