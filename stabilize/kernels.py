"""What is special to a processor, behind plain functions. The model does not know of it.

On a CPU, oneDNN writes machine code for every shape of a product in half precision, and keeps the last 1,024 of them.
Batches of ever new sizes have more: training on Multi30k in bfloat16 then took twice the time and three times the
memory. So `linear` fills rows up to few numbers, and the small products of attention, which have a shape of their own
for each length, are made in float32, where nothing is compiled.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

HALF = (torch.bfloat16, torch.float16)
HUGE_PAGE = 2**21
HEAP = 2**32
"""Bytes of addresses for which huge pages are asked."""


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, in the precision of `x` or that of autocast."""
    casts = torch.is_autocast_enabled("cpu") and x.dtype != torch.float64  # which autocast leaves alone
    dtype = torch.get_autocast_dtype("cpu") if casts else x.dtype
    if not _compiled_by_shape(x, dtype):
        return F.linear(x, weight, bias)
    return cast(Tensor, _Filled.apply(x, weight, bias, dtype))


class _Filled(torch.autograd.Function):
    """A linear layer in half precision whose rows are filled up with zeros, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        filled, cast_weight = _fill(x, dtype), weight.to(dtype)
        ctx.save_for_backward(filled, cast_weight)
        ctx.shape, ctx.dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        y = filled @ cast_weight.t() if bias is None else torch.addmm(bias.to(dtype), filled, cast_weight.t())
        return y.resize_(*x.shape[:-1], len(weight))  # no view, so that it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (filled, weight), (needs_x, needs_weight, needs_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        rows, grad = grad.numel() // grad.size(-1), _fill(grad, weight.dtype)
        x = (grad @ weight)[:rows].view(ctx.shape).to(ctx.dtype) if needs_x else None
        w = (grad.t() @ filled).to(ctx.weight_dtype) if needs_weight else None
        b = grad.sum(0, dtype=torch.float32).to(ctx.weight_dtype) if needs_bias else None
        return x, w, b, None


def _fill(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., width]` as `[rows, width]`, with zeros behind: eight numbers of rows between one and twice as many."""
    rows = x.numel() // x.size(-1)
    step = max(32, 2 ** (rows.bit_length() - 4))
    filled = torch.empty(rows + -rows % step, x.size(-1), dtype=dtype)
    filled[:rows].copy_(x.reshape(rows, x.size(-1)))
    filled[rows:].zero_()
    return filled


def _compiled_by_shape(x: Tensor, dtype: torch.dtype) -> bool:
    return dtype in HALF and x.device.type == "cpu" and not torch.compiler.is_compiling()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b, for the many shapes of attention."""
    if not _compiled_by_shape(a, a.dtype):
        return a @ b
    with torch.autocast("cpu", enabled=False):
        return (a.float() @ b.float()).to(a.dtype)


def logits(query: Tensor, key: Tensor) -> Tensor:
    """q k^T / sqrt(d_head): `[batch, heads, length, source length]`."""
    return _product(query * query.size(-1) ** -0.5, key.transpose(-1, -2))


def mix(logits: Tensor, value: Tensor, mask: Tensor, rate: float) -> Tensor:
    """softmax(logits) v, with dropout on the weights: `[batch, heads, length, head width]`.

    A query that may look nowhere gets the mean of all values: finite, forward and backward.
    """
    weights = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)
    return _product(dropout(weights.to(value.dtype), rate), value)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rate: float) -> Tensor:
    """Scaled dot-product attention `[batch, heads, length, head width]`.

    On a CPU torch's fused kernel has no dropout on the weights, and is slow backward in half precision.
    """
    if _compiled_by_shape(query, query.dtype):
        with torch.autocast("cpu", enabled=False):
            return attend(query.float(), key.float(), value.float(), mask, rate).to(query.dtype)
    learns = torch.is_grad_enabled() and query.requires_grad
    if query.device.type == "cpu" and (rate > 0 or (learns and query.dtype in HALF)):
        return mix(logits(query, key), value, mask, rate)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=rate)


def keep_freed_memory() -> None:
    """Ask glibc to keep what one training step frees for the next, instead of giving it back and faulting it in again,
    and Linux for huge pages below it.

    Without the first, batches of ever new sizes cost a tenth of a CPU's time in page faults, without the second another
    tenth in looking up addresses. Does nothing without glibc.
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt, madvise = libc.mallopt, libc.madvise
    except (AttributeError, OSError, TypeError):
        return
    trim_threshold, top_pad, map_maximum = -1, -2, -4  # as in malloc.h
    mallopt(map_maximum, 0)
    mallopt(trim_threshold, -1)  # never
    mallopt(top_pad, 2**28)
    # Advice holds for what is mapped: the heap grows once by addresses alone, and memory comes when it is first used.
    libc.malloc.restype = ctypes.c_void_p
    place = libc.malloc(ctypes.c_size_t(HEAP))
    if place:
        first = -(-place // HUGE_PAGE) * HUGE_PAGE
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(place + HEAP - first), 14)  # MADV_HUGEPAGE in mman.h
        libc.free(ctypes.c_void_p(place))
