"""The training loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stabilize import kernels

ENTRIES_AT_ONCE = {True: 2**19, False: 2**26}
"""Logits whose loss is computed together: on a CPU as many as its cache holds, elsewhere as many as memory bears."""

LOGITS_AT_ONCE = {True: 2**21, False: 2**28}
"""Logits that are there together where the projection that makes them is part of the pass, but those of `ROWS_AT_ONCE`
tokens at least."""
ROWS_AT_ONCE = 512
"""Tokens whose logits are there together at least: at a large vocabulary the gradient by W is read and written each
time, which takes as long as the product of fewer."""


def smoothed_cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Summed loss with label smoothing, and summed negative log-likelihood without it, in float32.

        nll = -log p(label);  loss = (1 - smoothing) nll + smoothing mean_v(-log p(v)) + z_loss (log Z)^2

    with Z = sum_v exp(logit of v). The smoothing follows `torch.nn.functional.cross_entropy` (fairseq leaves the label
    out of the mean); the last term, outside of it, keeps the logits from drifting (Chowdhery et al. 2022,
    arXiv:2204.02311, section 5). Only the loss has a gradient.

    Args:
        logits: `[tokens, vocabulary]`, real target tokens only.
        labels: `[tokens]`.
        smoothing: share of the weight that is spread over the vocabulary.
        z_loss: weight of (log Z)^2.
    """
    loss, nll = _OfLogits.apply(logits, labels, smoothing, z_loss, torch.is_grad_enabled())
    return loss, nll


def projected_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`smoothed_cross_entropy` of the logits hidden W^T + b, of which never more than some are there.

    Args:
        hidden: `[tokens, width]`, real target tokens only.
        weight: W, `[vocabulary, width]`.
        bias: b, `[vocabulary]`, or none.
        labels, smoothing, z_loss: as there.
    """
    if kernels.computed_in(hidden) == torch.float16:  # whose gradients are too small before they are scaled
        return smoothed_cross_entropy(kernels.linear(hidden, weight, bias), labels, smoothing, z_loss)
    loss, nll = _OfProjection.apply(hidden, weight, bias, labels, smoothing, z_loss, torch.is_grad_enabled())
    return loss, nll


class _OfLogits(torch.autograd.Function):
    """The gradient by the logits is made with the loss.

    At a vocabulary of thousands torch's own way through nll_loss and mean reads and writes tensors of the logits' size
    ten times, in float32. `learns` is false where gradients are off, which `ctx` does not know.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, smoothing: float, z_loss: float, learns: bool
    ) -> tuple[Tensor, Tensor]:
        # In float16 the small ones would be lost before they are scaled.
        kept = torch.float32 if logits.dtype == torch.float16 else logits.dtype
        gradient = torch.empty_like(logits, dtype=kept) if learns and ctx.needs_input_grad[0] else None
        sums = _sums(logits, labels, smoothing, z_loss, gradient)
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(sums[1])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad).to(ctx.dtype), None, None, None, None


class _OfProjection(torch.autograd.Function):
    """The gradients by what makes the logits are made with the loss, while some rows of logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        z_loss: float,
        learns: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = kernels.computed_in(hidden)
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        learns = learns and any(ctx.needs_input_grad)
        of_hidden = torch.empty_like(hidden) if learns else None
        wide = torch.promote_types(weight.dtype, torch.float32)  # else half precision rounds every sum
        of_weight, of_bias = (
            torch.zeros_like(x, dtype=wide) if learns and x is not None else None for x in (weight, bias)
        )
        sums = hidden.new_zeros(2, dtype=torch.float32)
        at_once = max(ROWS_AT_ONCE, LOGITS_AT_ONCE[hidden.device.type == "cpu"] // len(weight))
        for start in range(0, len(hidden), at_once):
            part = slice(start, start + at_once)
            rows, count = kernels.rows(hidden[part], dtype), len(labels[part])
            logits = kernels.product(rows, matrix, offset)
            # Of the same size and precision, and read before it is written: the gradient takes the logits' place.
            real = logits[:count]
            sums += torch.stack(_sums(real, labels[part], smoothing, z_loss, real if learns else None))
            if of_hidden is not None and of_weight is not None:
                logits[count:] = 0
                of_hidden[part] = kernels.product(logits, matrix.t())[:count]
                of_weight += logits.t() @ rows
            if of_bias is not None:
                of_bias += logits.sum(0)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        loss, nll = sums.unbind()
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        made = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if part is None else (part * grad).to(dtype) for part, dtype in made), None, None, None, None


def _sums(
    logits: Tensor, labels: Tensor, smoothing: float, z_loss: float, gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Loss and nll, and into `gradient` the loss's by the logits, some rows at a time:

    (1 + 2 z_loss log Z) p - smoothing / V - (1 - smoothing) [v = label].
    """
    loss, nll = (logits.new_zeros((), dtype=torch.float32) for _ in range(2))
    at_once = max(1, ENTRIES_AT_ONCE[logits.device.type == "cpu"] // logits.size(1))
    for start in range(0, len(logits), at_once):
        rows = slice(start, start + at_once)
        log_p, label = F.log_softmax(logits[rows], dim=-1, dtype=torch.float32), labels[rows, None]
        right = log_p.gather(1, label)
        nll -= right.sum()
        loss -= (1 - smoothing) * right.sum()
        if smoothing:
            loss -= smoothing / logits.size(1) * log_p.sum()
        if z_loss:
            log_z = logits[rows].gather(1, label).float() - right
            loss += z_loss * log_z.square().sum()
        if gradient is not None:
            part = log_p.exp_().mul_(1 + 2 * z_loss * log_z) if z_loss else log_p.exp_()
            if smoothing:
                part -= smoothing / logits.size(1)
            part.scatter_add_(1, label, part.new_full(label.shape, smoothing - 1))
            gradient[rows] = part
    return loss, nll
