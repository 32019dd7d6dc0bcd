"""Axis `initialization`: a gain for each role of a weight, over one explicit base."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, TypeAlias

from torch import Tensor, nn

from stabilize.strategies.site import Site
from stabilize.strategies.strategy import Strategy

Role: TypeAlias = Literal["query", "key", "value", "output", "feed_forward_in", "feed_forward_out", "embedding"]


class Initialization(Strategy):
    """Base of all initialisations. Biases start at zero, gains of norms at one.

    Xavier's base: a matrix `[outputs, inputs]` has variance gain^2 2 / (inputs + outputs). Embeddings are
    N(0, 1/width), the model multiplies them by sqrt(width) where it reads them.
    """

    distribution: Literal["uniform", "normal"] = "uniform"

    @abstractmethod
    def gain(self, site: Site, role: Role) -> float:
        """What the base is multiplied by for a weight of this role at this site."""

    def fill(self, weight: Tensor, site: Site, role: Role) -> None:
        """Draw `weight` `[outputs, inputs]`; for an embedding `[vocabulary, width]`."""
        gain = self.gain(site, role)
        if role == "embedding":
            nn.init.normal_(weight, std=gain * site.width**-0.5)
        elif self.distribution == "uniform":
            nn.init.xavier_uniform_(weight, gain=gain)
        else:
            nn.init.xavier_normal_(weight, gain=gain)


class Xavier(Initialization):
    """Variance that keeps the scale of signal and gradient in a linear layer.

        Var W = 2 / (inputs + outputs), for each of query, key and value by itself

    Paper: Glorot and Bengio 2010, proceedings.mlr.press/v9/glorot10a

    Args:
        distribution: `uniform` or `normal`, of the same variance.
    """

    def __init__(self, distribution: Literal["uniform", "normal"] = "uniform") -> None:
        self.distribution = distribution

    def gain(self, site: Site, role: Role) -> float:
        return 1.0


class DepthGain(Initialization):
    """Base of those that scale value, output and both feed-forward matrices of a stack by one gain."""

    @abstractmethod
    def stack_gain(self, site: Site) -> float:
        """The gain of this stack."""

    def gain(self, site: Site, role: Role) -> float:
        return self.stack_gain(site) if role in ("value", "output", "feed_forward_in", "feed_forward_out") else 1.0


class DeepNormInit(DepthGain):
    """Smaller values, outputs and feed-forward matrices with depth; queries and keys stay.

        gain = beta;  encoder beta = 0.87 (N^4 M)^(-1/16), decoder beta = (12 M)^(-1/4);  Xavier normal

    Also: belongs to DeepNormResidual under PostNorm; configs/strategies/deepnorm.yaml sets all three.
    Paper: Wang et al. 2022, arXiv:2203.00555
    """

    helps_depth = True
    distribution = "normal"

    def stack_gain(self, site: Site) -> float:
        n, m = site.encoder_layers, site.decoder_layers
        return 0.87 * (n**4 * m) ** (-1 / 16) if site.stack == "encoder" else (12 * m) ** -0.25

    def constants(self, site: Site) -> dict[str, float]:
        return {"beta": self.stack_gain(site)}
