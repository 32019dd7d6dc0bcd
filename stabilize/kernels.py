"""What is special to a processor, behind plain functions: attention and dropout. The model does not know of it."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, rate: float) -> Tensor:
    """Zero a share `rate` of the entries and scale the rest by 1 / (1 - rate).

    On a CPU torch draws one random number an element, serially; here one draw of 64 bits serves four elements, so the
    rate is exact to 1/65536.
    """
    if rate == 0.0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, rate)
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    draws = words.view(torch.int16)[: x.numel()].view(x.shape)
    kept = draws >= round(rate * 65536) - 32768
    return x * kept.to(x.dtype).mul_(1 / (1 - rate))


def logits(query: Tensor, key: Tensor) -> Tensor:
    """q k^T / sqrt(d_head): `[batch, heads, length, source length]`."""
    return (query * query.size(-1) ** -0.5) @ key.transpose(-1, -2)


def mix(logits: Tensor, value: Tensor, mask: Tensor, rate: float) -> Tensor:
    """softmax(logits) v, with dropout on the weights: `[batch, heads, length, head width]`.

    A query that may look nowhere gets the mean of all values: finite, forward and backward.
    """
    weights = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)
    return dropout(weights.to(value.dtype), rate) @ value


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rate: float) -> Tensor:
    """Scaled dot-product attention `[batch, heads, length, head width]`, on the path that is fastest here.

    torch's fused kernel is slow backward in bfloat16 on a CPU, and has no dropout on the weights there.
    """
    training_on_cpu = query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad
    if training_on_cpu and (rate > 0 or query.dtype != torch.float32):
        return mix(logits(query, key), value, mask, rate)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=rate)


def keep_freed_memory() -> None:
    """Ask glibc to keep what one training step frees for the next, instead of giving it back and faulting it in again.

    Without it, batches of ever new sizes cost a tenth of a CPU's time in page faults. Does nothing without glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    trim_threshold, top_pad, map_maximum = -1, -2, -4  # as in malloc.h
    mallopt(map_maximum, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 2**28)
