"""The training loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ENTRIES_AT_ONCE = {True: 2**19, False: 2**26}
"""Logits whose loss is computed together: on a CPU as many as its cache holds, elsewhere as many as memory bears."""


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
    loss, nll = _SmoothedCrossEntropy.apply(logits, labels, smoothing, z_loss)
    return loss, nll


class _SmoothedCrossEntropy(torch.autograd.Function):
    """The gradient by the logits in closed form, (1 + 2 z_loss log Z) p - smoothing / V - (1 - smoothing) [v = label].

    It is made with the loss, some rows at a time: at a vocabulary of thousands
    torch's own way through nll_loss and mean reads and writes tensors of the logits' size ten times, in float32.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
        loss, nll = (logits.new_zeros((), dtype=torch.float32) for _ in range(2))
        # In float16 the small ones would be lost before they are scaled.
        kept = torch.float32 if logits.dtype == torch.float16 else logits.dtype
        gradient = torch.empty_like(logits, dtype=kept) if ctx.needs_input_grad[0] else None
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
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad).to(ctx.dtype), None, None, None
