"""Axis `norm`: the normaliser. Called `norm(x, real)`, `real` the mask `[batch, length]` of real tokens."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize.strategies.site import Site
from stabilize.strategies.strategy import Part


class Norm(Part):
    """Base of all normalisers over the last dimension. Statistics are taken in float32, whatever the input."""

    width: int
    epsilon: float

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        """`width`: size of the last dimension where it is not the stream's (a head's, the hidden layer's)."""
        self.width = width or site.width
        self.epsilon = epsilon

    @abstractmethod
    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """`x` normalised over its last dimension, in its own dtype."""


class LayerNorm(Norm):
    """Centre and scale each position, then gain and bias.

        y = g (x - mean) / sqrt(var + epsilon) + b

    Paper: Ba et al. 2016, arXiv:1607.06450
    """

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        self.gain = nn.Parameter(torch.ones(self.width))
        self.bias = nn.Parameter(torch.zeros(self.width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        normed = F.layer_norm(x.float(), (self.width,), self.gain.float(), self.bias.float(), self.epsilon)
        return normed.to(x.dtype)


class RMSNorm(Norm):
    """Scale each position by its root mean square; no centring, no bias.

        y = g x / sqrt(mean(x^2) + epsilon)

    Paper: Zhang and Sennrich 2019, arXiv:1910.07467
    """

    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        self.gain = nn.Parameter(torch.ones(self.width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return F.rms_norm(x.float(), (self.width,), self.gain.float(), self.epsilon).to(x.dtype)
