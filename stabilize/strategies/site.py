"""Where in the model a strategy is placed."""

from __future__ import annotations

from dataclasses import dataclass

ENCODER_ROLES = ("self_attention", "feed_forward")
DECODER_ROLES = ("self_attention", "cross_attention", "feed_forward")


@dataclass(frozen=True)
class Site:
    """One place of a stack, handed to a strategy while the model is built.

    Depth is passed, never guessed: formulas that need the number of layers read it here. What is read is used up in
    `build`; an integer of a site read in `forward` would make every layer compile anew.

    Args:
        stack: `encoder` or `decoder`.
        layer: number of the layer, from 1; 0 for the embedding, one more than the last for the end of the stack.
        role: a branch (`self_attention`, `cross_attention`, `feed_forward`), or `embedding`, `layer` (the link
            around a whole layer), `final` (the end of the stack).
        encoder_layers: depth of the encoder, the N of the papers.
        decoder_layers: depth of the decoder, the M of the papers.
        width: size of the stream.
        heads: attention heads.
        hidden: inner size of the feed-forward branch.
    """

    stack: str
    layer: int
    role: str
    encoder_layers: int
    decoder_layers: int
    width: int
    heads: int
    hidden: int

    @property
    def layers(self) -> int:
        """Depth of this stack."""
        return self.encoder_layers if self.stack == "encoder" else self.decoder_layers

    @property
    def roles(self) -> tuple[str, ...]:
        """The branches of one layer of this stack, bottom first."""
        return ENCODER_ROLES if self.stack == "encoder" else DECODER_ROLES

    @property
    def position(self) -> int:
        """Number of this branch in its stack, from 1: two branches a layer in the encoder, three in the decoder."""
        return (self.layer - 1) * len(self.roles) + self.roles.index(self.role) + 1

    @property
    def head_width(self) -> int:
        """Size of one attention head."""
        return self.width // self.heads
