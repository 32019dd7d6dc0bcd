"""The training loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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

    torch's own way through nll_loss and mean makes and adds two more tensors of the logits' size; at a vocabulary of
    thousands they are a tenth of a training step.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
        log_p = F.log_softmax(logits, dim=-1, dtype=torch.float32)
        right = log_p.gather(1, labels[:, None])
        log_z = logits.gather(1, labels[:, None]).float() - right if z_loss else None
        ctx.save_for_backward(log_p, labels, log_z)
        ctx.smoothing, ctx.z_loss, ctx.dtype = smoothing, z_loss, logits.dtype
        nll = -right.sum()
        ctx.mark_non_differentiable(nll)
        loss = nll.clone()
        if smoothing:
            loss = (1 - smoothing) * nll - smoothing / logits.size(1) * log_p.sum()
        if log_z is not None:
            loss += z_loss * log_z.square().sum()
        return loss, nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        log_p, labels, log_z = ctx.saved_tensors
        gradient = log_p.exp()
        if log_z is not None:
            gradient *= 1 + 2 * ctx.z_loss * log_z
        if ctx.smoothing:
            gradient -= ctx.smoothing / log_p.size(1)
        gradient.scatter_add_(1, labels[:, None], gradient.new_full((len(labels), 1), ctx.smoothing - 1))
        return (gradient * grad).to(ctx.dtype), None, None, None
