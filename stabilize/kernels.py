"""What is special to a processor, behind plain functions. The model does not know of it.

On a CPU, oneDNN writes machine code for every shape of a product in half precision, and keeps the last 1,024 of them.
Batches of ever new sizes have more: training on Multi30k in bfloat16 then took twice the time and three times the
memory. So `linear` fills rows up to few numbers, and the small products of attention, which have a shape of their own
for each length, are made in float32, by MKL, which compiles nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import SFC64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

HALF = (torch.bfloat16, torch.float16)
LARGE = 2**26
"""Multiplications of a float32 product, from which on oneDNN makes it in training: by a fifth faster than MKL on AMD's
processors, as fast on Intel's, and slower where products are small."""
ROWS = 64
"""For products of about so many are weights arranged; for many more and for few it is the same order."""
LANES = 16
"""Float32 numbers in the widest register of a CPU."""
HUGE_PAGE = 2**21
HEAP = 2**32
"""Bytes of addresses for which huge pages are asked."""


def dropout(x: Tensor, rate: float) -> Tensor:
    """Zero a share `rate` of the entries and scale the rest by 1 / (1 - rate).

    On a CPU torch draws one random number an element, serially, by a slow generator; here one draw of 64 bits serves
    four elements, so the rate is exact to 1/65536, and torch's generator only seeds a faster one.
    """
    if rate == 0.0:
        return x
    if not _eager_on_cpu(x):
        return F.dropout(x, rate)
    return x * _kept(x, rate)


def _kept(x: Tensor, rate: float) -> Tensor:
    """What dropout multiplies the entries of `x` by: 0, or 1 / (1 - rate)."""
    words = SFC64(int(torch.randint(2**63 - 1, ()))).random_raw((x.numel() + 3) // 4)
    draws = torch.from_numpy(words.view(np.int16))[: x.numel()].view(x.shape)
    least = min(round(rate * 65536), 65535) - 32768
    # Written as numbers at once: truth values would be read and converted in two more passes.
    kept = torch.ge(draws, least, out=torch.empty(x.shape, dtype=x.dtype))
    return kept.mul_(1 / (1 - rate))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, in the precision of `x` or that of autocast."""
    dtype = computed_in(x)
    if not _eager_on_cpu(x):
        return F.linear(x, weight, bias)
    arranged = _arranged
    if arranged is not None and isinstance(weight, nn.Parameter) and not torch.is_grad_enabled():
        return arranged(x, weight, bias, dtype)
    # Decoding has ever new sizes, for which oneDNN compiles anew; in half precision nothing else is fast.
    if not _is_for_onednn(x, weight, dtype) or not (torch.is_grad_enabled() or dtype in HALF):
        return F.linear(x, weight, bias)
    return cast(Tensor, _Linear.apply(x, weight, bias, dtype))


class _Arranged:
    """Weights in the order in which oneDNN multiplies them."""

    def __init__(self) -> None:
        self._weights: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x W^T + b."""
        if not x.numel() or not _has_onednn(dtype):
            return F.linear(x, weight, bias)
        key = id(weight), dtype
        if key not in self._weights:  # with the weight itself, so that its number is not given away
            arranged = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), ROWS)
            self._weights[key] = weight, arranged
        rows, filled = x.numel() // x.size(-1), _fill(x, dtype, 4)
        bias = None if bias is None else bias.detach().to(dtype)
        y = torch.ops.mkldnn._linear_pointwise(filled, self._weights[key][1], bias, "none", [], "")
        return cast(Tensor, y[:rows].view(*x.shape[:-1], len(weight)))


_arranged: _Arranged | None = None


@contextlib.contextmanager
def constant_weights() -> Iterator[None]:
    """While it lasts no weight may change, and what is computed without gradient may keep them in another order.

    On a CPU oneDNN then need not arrange a weight anew in every product, which with the few rows of decoding takes up
    to half of the time. To arrange it once takes some twenty times as long as a product with it does, and its memory.
    """
    global _arranged
    outer, _arranged = _arranged, _Arranged()
    try:
        yield
    finally:
        _arranged = outer


def computed_in(x: Tensor) -> torch.dtype:
    """The precision of a product with `x`: its own, or that of autocast, which leaves float64 alone."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class _Linear(torch.autograd.Function):
    """A linear layer by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        filled, cast_weight = rows(x, dtype), weight.to(dtype)
        ctx.save_for_backward(filled, cast_weight)
        ctx.shape, ctx.dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        y = product(filled, cast_weight, None if bias is None else bias.to(dtype))
        return y.resize_(*x.shape[:-1], len(weight))  # no view, so that it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (filled, weight), (needs_x, needs_weight, needs_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        count, grad = grad.numel() // grad.size(-1), rows(grad, weight.dtype)
        x = product(grad, weight.t())[:count].view(ctx.shape).to(ctx.dtype) if needs_x else None
        w = (grad.t() @ filled).to(ctx.weight_dtype) if needs_weight else None
        b = grad.sum(0).to(ctx.weight_dtype) if needs_bias else None  # summed in float32 whatever it is
        return x, w, b, None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b of matrices of one precision, which nothing is differentiated through."""
    if x.device.type == "cpu" and len(x) and _is_for_onednn(x, weight, x.dtype) and _has_onednn(x.dtype):
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))
    return F.linear(x, weight, bias)


def _is_for_onednn(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    return dtype in HALF or (dtype == torch.float32 and x.numel() * len(weight) >= LARGE)


@functools.cache
def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether this processor's oneDNN makes products of a precision."""
    library = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(library, "_linear_pointwise"):
        return False
    if dtype in HALF:
        half = "bf16" if dtype == torch.bfloat16 else "fp16"
        return bool(getattr(library, f"_is_mkldnn_{half}_supported")())
    return dtype == torch.float32


def rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., width]` as `[rows, width]`; on a CPU in half precision filled up with zeros."""
    return _fill(x, dtype) if dtype in HALF and _eager_on_cpu(x) else x.reshape(-1, x.size(-1)).to(dtype)


def _fill(x: Tensor, dtype: torch.dtype, step: int = 32) -> Tensor:
    """`[..., width]` as `[rows, width]`, with zeros behind: 32 numbers of rows between one and twice as many, but
    multiples of `step` alone."""
    rows = x.numel() // x.size(-1)
    more = -rows % max(step, 2 ** (rows.bit_length() - 6))
    if not more:
        return x.reshape(-1, x.size(-1)).to(dtype).contiguous()
    filled = torch.empty(rows + more, x.size(-1), dtype=dtype)
    filled[:rows].view(x.shape).copy_(x)
    filled[rows:].zero_()
    return filled


def _eager_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def logits(query: Tensor, key: Tensor) -> Tensor:
    """q k^T / sqrt(d_head): `[batch, heads, length, source length]`."""
    return _small_product(query * query.size(-1) ** -0.5, key.transpose(-1, -2))


def mix(logits: Tensor, value: Tensor, mask: Tensor, rate: float) -> Tensor:
    """softmax(logits) v, with dropout on the weights: `[batch, heads, length, head width]`.

    A query that may look nowhere gets the mean of all values: finite, forward and backward.
    """
    weights = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)
    return _small_product(dropout(weights.to(value.dtype), rate), value)


def _small_product(a: Tensor, b: Tensor) -> Tensor:
    """a b, for the many shapes of attention."""
    if not _eager_on_cpu(a) or a.dtype not in HALF:
        return a @ b
    with torch.autocast("cpu", enabled=False):
        return (a.float() @ b.float()).to(a.dtype)


def filled_up(keys: int) -> int:
    """To how many keys, of which nobody sees the last, so many are best filled up.

    A CPU's softmax takes a register of them at once and what is left over one by one: attention over 15 keys takes
    twice as long as over 16.
    """
    return max(LANES, keys + -keys % (LANES // 2))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rate: float) -> Tensor:
    """Scaled dot-product attention `[batch, heads, length, head width]`: what `logits` and `mix` make.

    On a CPU torch's fused kernel has no dropout on the weights, and is slow backward in half precision.
    """
    if _eager_on_cpu(query):
        learns, half = torch.is_grad_enabled() and query.requires_grad, query.dtype in HALF
        if (rate > 0 or (learns and half)) and query.dtype != torch.float64:
            with torch.autocast("cpu", enabled=False):
                return cast(Tensor, _Attention.apply(query, key, value, mask, rate))
        if half:
            with torch.autocast("cpu", enabled=False):
                return attend(query.float(), key.float(), value.float(), mask, rate).to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=rate)


class _Attention(torch.autograd.Function):
    """softmax(q k^T / sqrt(d_head)) v with dropout on the weights, all in float32, and its gradient.

    Left to autograd, each of these tensors is copied once to change its layout and once to change its precision.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rate: float) -> Tensor:
        (batch, heads, length), ctx.scale = query.shape[:3], query.size(-1) ** -0.5
        seen = filled_up(key.size(2))
        q, k, v = _matrices(query, length), _matrices(key, seen), _matrices(value, seen)
        # The products are added to the mask: a number of this size swallows them. Behind the keys there is nothing.
        barred = torch.full((*mask.shape[:-1], seen), -math.inf, dtype=torch.float32)
        barred[..., : key.size(2)] = 0
        barred[..., : key.size(2)].masked_fill_(~mask, torch.finfo(torch.float32).min)
        scores = barred.new_empty(batch, heads, length, seen).copy_(barred).flatten(0, 1)
        p = scores.baddbmm_(q, k.mT, alpha=ctx.scale).softmax(-1)
        kept = _kept(p, rate) if rate else None
        weights = p if kept is None else p * kept
        if (blind := ~mask.any(-1, keepdim=True)).any():  # a query that may look nowhere learns nothing from where
            p = p.unflatten(0, (batch, heads)).masked_fill(blind, 0).flatten(0, 1)
        ctx.save_for_backward(q, k, v, p, kept, weights)
        ctx.shapes, ctx.dtype = (query.shape, key.shape), query.dtype
        return _heads(weights.bmm(v), query.shape, query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, p, kept, weights = ctx.saved_tensors
        grad = _matrices(grad, grad.size(2))
        of_value, of_p = weights.mT.bmm(grad), grad.bmm(v.mT)
        if kept is not None:
            of_p *= kept
        of_scores = torch._softmax_backward_data(of_p, p, -1, torch.float32)
        of_query, of_key = of_scores.bmm(k).mul_(ctx.scale), of_scores.mT.bmm(q).mul_(ctx.scale)
        of_key, of_value = (_heads(x, ctx.shapes[1], ctx.dtype) for x in (of_key, of_value))
        return _heads(of_query, ctx.shapes[0], ctx.dtype), of_key, of_value, None, None


def _matrices(x: Tensor, length: int) -> Tensor:
    """`[batch, heads, any length, head width]` as `[batch * heads, length, head width]` in float32, zeros behind."""
    batch, heads, own, width = x.shape
    placed = torch.empty(batch, heads, length, width, dtype=torch.float32)
    placed[:, :, :own] = x
    placed[:, :, own:] = 0
    return placed.flatten(0, 1)


def _heads(x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The way back to `shape`, laid out as `[batch, length, heads, head width]`, as linear layers around have it."""
    batch, heads, length, width = shape
    placed = torch.empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)
    return placed.copy_(x.unflatten(0, (batch, heads))[:, :, :length])


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
