"""How much a batch asks of a machine, and how much the machine can give."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stabilize import kernels
from stabilize.data.batch import Batch
from stabilize.model import Sizes
from stabilize.tokens import PAD

CPU = torch.device("cpu")
PRODUCT = 2048
"""Rows and columns of the matrices whose product is the ceiling."""
TRIES = 3
"""Products of each kind; the fastest counts."""
DTYPES = {"64": torch.float64, "bf16": torch.bfloat16, "16": torch.float16, "transformer": torch.bfloat16}
"""What products are made in, by the start of Lightning's word for the precision; float32 for all others."""


def multiply_adds(sizes: Sizes, vocabulary: int, source: Tensor, target: Tensor) -> int:
    """Multiply-adds of the matrix products of one forward pass over real tokens.

        sum over sentences of   E S (4 d^2 + F) + E 2 S^2 d                               encoder
                              + D T (6 d^2 + F) + D S 2 d^2 + D 2 (T^2 + T S) d           decoder
                              + T d V                                                     logits

    with S, T tokens of source and target, E, D layers, d the width, V the vocabulary, F = 2 d hidden, or 3 d hidden
    with a gate. Of attention all T^2 logits count, those behind the causal mask too, as they are usually made. Norms,
    softmax and what a stabiliser adds do not count: they are the price, not the work.

    Args:
        sizes: the model's shape.
        vocabulary: number of tokens.
        source: tokens of each sentence with the end mark, `[sentences]`.
        target: the same of its target, the positions whose loss is taken, `[sentences]`.
    """
    width, inner = sizes.width, (3 if sizes.activation == "swiglu" else 2) * sizes.width * sizes.hidden
    source, target = source.long(), target.long()
    encoder = source * (4 * width**2 + inner) + 2 * source**2 * width
    decoder = target * (6 * width**2 + inner) + source * 2 * width**2 + 2 * (target**2 + target * source) * width
    logits = target * width * vocabulary
    return int((sizes.encoder_layers * encoder + sizes.decoder_layers * decoder + logits).sum())


def training_flops(sizes: Sizes, vocabulary: int, source: Tensor, target: Tensor) -> int:
    """Floating-point operations of an update: two for each multiply-add, forward, and twice as many backward."""
    return 6 * multiply_adds(sizes, vocabulary, source, target)


@dataclass(frozen=True)
class Tokens:
    """What some training batches hold.

    Args:
        source: real tokens of each sentence, `[sentences]`.
        target: real tokens whose loss is taken, of each sentence, `[sentences]`.
        source_places: positions that the encoder computes, padding included.
        target_places: positions that the decoder computes, padding included.
    """

    source: Tensor
    target: Tensor
    source_places: int
    target_places: int

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Tokens:
        """Of batches as the loader gives them; the decoder computes a target without its begin mark."""
        return cls(
            torch.cat([(batch.source != PAD).sum(1) for batch in batches]),
            torch.cat([(batch.target[:, 1:] != PAD).sum(1) for batch in batches]),
            sum(batch.source.numel() for batch in batches),
            sum(batch.target[:, 1:].numel() for batch in batches),
        )

    @property
    def padding(self) -> dict[str, float]:
        """Share of positions without a token, of each side."""
        return {
            "source": 1 - int(self.source.sum()) / self.source_places,
            "target": 1 - int(self.target.sum()) / self.target_places,
        }


def dtype_of(precision: str) -> torch.dtype:
    """What Lightning makes products in under a precision such as `bf16-mixed`."""
    return DTYPES.get(precision.partition("-")[0], torch.float32)


def ceiling(dtype: torch.dtype, size: int = PRODUCT, device: torch.device = CPU) -> float:
    """Operations a second of the fastest of some square products, by torch's own and by the model's linear layer, as it
    is in training, where gradients are enabled."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    fastest = float("inf")
    for product in (torch.mm, kernels.linear) * (TRIES + 1):  # the first time some are compiled
        wait(device)
        start = time.perf_counter()
        product(a, b)
        wait(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def wait(device: torch.device) -> None:
    """Until all that was asked of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
