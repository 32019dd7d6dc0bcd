"""The training loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Summed loss with label smoothing, and summed negative log-likelihood without it, in float32.

        nll = -log p(label);  loss = (1 - smoothing) nll + smoothing mean_v(-log p(v))

    the convention of `torch.nn.functional.cross_entropy` (fairseq leaves the label out of the mean).

    Args:
        logits: `[tokens, vocabulary]`, real target tokens only.
        labels: `[tokens]`.
        smoothing: share of the weight that is spread over the vocabulary.
    """
    log_p = F.log_softmax(logits.float(), dim=-1)
    nll = F.nll_loss(log_p, labels, reduction="sum")
    if smoothing == 0.0:
        return nll, nll.detach()
    return (1 - smoothing) * nll - smoothing * log_p.mean(-1).sum(), nll.detach()
