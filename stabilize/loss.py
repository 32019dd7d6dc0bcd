"""The training loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Summed loss with label smoothing, and summed negative log-likelihood without it, in float32.

        nll = -log p(label);  loss = (1 - smoothing) nll + smoothing mean_v(-log p(v))

    the convention of `torch.nn.functional.cross_entropy` (fairseq leaves the label out of the mean). Only the loss has
    a gradient.

    Args:
        logits: `[tokens, vocabulary]`, real target tokens only.
        labels: `[tokens]`.
        smoothing: share of the weight that is spread over the vocabulary.
    """
    loss, nll = _SmoothedCrossEntropy.apply(logits, labels, smoothing)
    return loss, nll


class _SmoothedCrossEntropy(torch.autograd.Function):
    """The gradient by the logits in closed form, p - smoothing / V - (1 - smoothing) [v = label].

    torch's own way through nll_loss and mean makes and adds two more tensors of the logits' size; at a vocabulary of
    thousands they are a tenth of a training step.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        log_p = F.log_softmax(logits, dim=-1, dtype=torch.float32)
        ctx.save_for_backward(log_p, labels)
        ctx.smoothing, ctx.dtype = smoothing, logits.dtype
        nll = -log_p.gather(1, labels[:, None]).sum()
        ctx.mark_non_differentiable(nll)
        if smoothing == 0.0:
            return nll.clone(), nll
        return (1 - smoothing) * nll - smoothing / logits.size(1) * log_p.sum(), nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        log_p, labels = ctx.saved_tensors
        gradient = log_p.exp()
        if ctx.smoothing:
            gradient -= ctx.smoothing / log_p.size(1)
        gradient.scatter_add_(1, labels[:, None], gradient.new_full((len(labels), 1), ctx.smoothing - 1))
        return (gradient * grad).to(ctx.dtype), None, None
