"""Axis `initialization`: a gain for each role of a weight, over one explicit base."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from stabilize.errors import UserError
from stabilize.strategies.site import Site
from stabilize.strategies.strategy import Part, Strategy

Role: TypeAlias = Literal["query", "key", "value", "output", "feed_forward_in", "feed_forward_out", "embedding"]


def _in_layer(site: Site) -> bool:
    """Whether `site` is in a layer; the embedding is below all of them, an output projection of its own above."""
    return 1 <= site.layer <= site.layers


class Initialization(Strategy):
    """Base of all initialisations. Biases start at zero, gains of norms at one.

    Xavier's base: a matrix `[outputs, inputs]` has variance gain^2 2 / (inputs + outputs). Embeddings are
    N(0, 1/width), the model multiplies them by sqrt(width) where it reads them.
    """

    distribution: Literal["uniform", "normal"] = "uniform"

    @abstractmethod
    def gain(self, site: Site, role: Role) -> float:
        """What the base is multiplied by for a weight of this role at this site."""

    def base(self, weight: Tensor, site: Site, role: Role) -> float:
        """Standard deviation at a gain of one."""
        return float(site.width**-0.5) if role == "embedding" else math.sqrt(2 / sum(weight.shape))

    def fill(self, weight: Tensor, site: Site, role: Role) -> None:
        """Draw `weight` `[outputs, inputs]`; for an embedding `[vocabulary, width]`."""
        deviation = self.gain(site, role) * self.base(weight, site, role)
        if role == "embedding" or self.distribution == "normal":
            nn.init.normal_(weight, std=deviation)
        else:
            nn.init.uniform_(weight, -math.sqrt(3) * deviation, math.sqrt(3) * deviation)


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
        scaled = _in_layer(site) and role in ("value", "output", "feed_forward_in", "feed_forward_out")
        return self.stack_gain(site) if scaled else 1.0


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


class SubNormInit(DepthGain):
    """Larger values, outputs and feed-forward matrices with depth, for branches with an inner norm.

        gain = gamma;  encoder gamma = sqrt(ln(3 M) ln(2 N) / 3), decoder gamma = sqrt(ln(3 M));  cross-attention 1

    Also: belongs to SubNorm, whose inner norms bound what the gains blow up. Xavier uniform here; the released code
    multiplies torch's default for linear layers instead, biases included.
    Paper: Wang et al. 2022, arXiv:2210.06423
    """

    def stack_gain(self, site: Site) -> float:
        decoder = math.log(3 * site.decoder_layers)
        return math.sqrt(decoder * math.log(2 * site.encoder_layers) / 3 if site.stack == "encoder" else decoder)

    def gain(self, site: Site, role: Role) -> float:
        return 1.0 if site.role == "cross_attention" else super().gain(site, role)

    def constants(self, site: Site) -> dict[str, float]:
        return {"gamma": self.stack_gain(site)}


class TFixup(DepthGain):
    """So small a start that neither norms nor warm-up are needed.

        value, output, feed-forward: encoder 0.67 N^(-1/4), decoder (9 M)^(-1/4);
        embedding: source (9 N)^(-1/4), target (9 M)^(-1/4)

    Also: belongs to NoNorm and InverseSqrtDecay; configs/strategies/tfixup.yaml sets all three. A shared embedding is
    scaled once, with N. Queries and keys are plain Xavier as in the paper, smaller by sqrt(2) in the released code.
    Paper: Huang et al. 2020, proceedings.mlr.press/v119/huang20f
    """

    def stack_gain(self, site: Site) -> float:
        return 0.67 * site.layers**-0.25 if site.stack == "encoder" else self.embedding_gain(site)

    def embedding_gain(self, site: Site) -> float:
        """The gain of this stack's embedding."""
        return float((9 * site.layers) ** -0.25)

    def gain(self, site: Site, role: Role) -> float:
        return self.embedding_gain(site) if role == "embedding" else super().gain(site, role)

    def constants(self, site: Site) -> dict[str, float]:
        return {"gain": self.stack_gain(site), "embedding gain": self.embedding_gain(site)}


class Fixup(Initialization):
    """Every branch starts at zero, and what is inside it is small enough for one update not to depend on depth.

        query, key, value: L^(-1/6);  feed-forward in: L^(-1/2);  output, feed-forward out: 0;  L = 2 N + 3 M

    that is L^(-1/(2m - 2)) in a branch of m factors, 4 in attention, 2 in a feed-forward network without gate.

    Also: belongs to NoNorm and SkipInit with initial 1, the paper's multiplier; configs/strategies/fixup.yaml sets all
    three. L counts the branches of both stacks. An output projection of its own starts at zero, a tied one as its
    embedding. The paper's scalar biases are left out: each linear layer but that of the keys has a vector of them.
    Paper: Zhang H. et al. 2019, arXiv:1901.09321; for Transformers by Zhang B., github.com/bzhangGo/zero
    """

    def _branches(self, site: Site) -> int:
        return 2 * site.encoder_layers + 3 * site.decoder_layers

    def gain(self, site: Site, role: Role) -> float:
        if role in ("output", "feed_forward_out"):
            return 0.0
        factors = {"query": 4, "key": 4, "value": 4, "feed_forward_in": 2}
        return float(self._branches(site) ** (-1 / (2 * factors[role] - 2))) if role in factors else 1.0

    def constants(self, site: Site) -> dict[str, float]:
        return {
            "L": self._branches(site),
            "attention gain": self.gain(site, "value"),
            "feed-forward gain": self.gain(site, "feed_forward_in"),
        }


class DepthScaled(Initialization):
    """DS-Init: the higher the layer, the smaller all its matrices, so that the norm after it passes more gradient on.

        gain = l^-exponent in layer l, counted in each stack by itself

    Also: published on post-norm. The form is from the authors' notes on their code, not from the paper's own text. That
    code hands l^(-1/2) to an initialiser that scales variances, which is exponent 0.25; the published scores come from
    there, and configs/strategies/ds_init_released.yaml has it.
    Paper: Zhang et al. 2019, arXiv:1908.11365

    Args:
        exponent: 0.5 is the paper's, 0.25 the released code's.
    """

    helps_depth = True

    def __init__(self, exponent: float = 0.5) -> None:
        if not 0 <= exponent < math.inf:
            raise UserError(f"model.stabilizer.initialization.exponent is {exponent}; 0.5 would do, or 0.25")
        self.exponent = exponent

    def gain(self, site: Site, role: Role) -> float:
        return float(site.layer**-self.exponent) if _in_layer(site) else 1.0

    def constants(self, site: Site) -> dict[str, float]:
        return {"gain of the last layer": site.layers**-self.exponent}


class B2TInit(Initialization):
    """All matrices of a stack's layers smaller with its depth.

        gain = N^(-1/2) in the encoder, M^(-1/2) in the decoder

    Also: the released code of B2T, added after the published scores; the paper has plain Xavier.
    Paper: none; github.com/takase/b2t_connection, of Takase et al. 2022, arXiv:2206.00330
    """

    helps_depth = True

    def gain(self, site: Site, role: Role) -> float:
        return float(site.layers**-0.5) if _in_layer(site) else 1.0

    def constants(self, site: Site) -> dict[str, float]:
        return {"gain": self.gain(site, "query")}


class GPT2(Initialization):
    """One deviation for all weights, and a smaller one where a branch joins the stream.

        W ~ N(0, deviation^2);  output and feed-forward out ~ N(0, deviation^2 / branches),  branches 2 N or 3 M

    Also: embeddings have the same deviation, which is what the tied output needs; GPT-2 reads them as they are, this
    model multiplies them by sqrt(width) first. The decoder's 3 M is the rule for cross-attention added to the paper's.
    Paper: Radford et al. 2019, Language Models are Unsupervised Multitask Learners; 2 N in Shoeybi et al. 2019,
    arXiv:1909.08053

    Args:
        deviation: of all other weights; GPT-2 had 0.02 at widths from 768 to 1600.
    """

    distribution = "normal"

    def __init__(self, deviation: float = 0.02) -> None:
        if not 0 < deviation < math.inf:
            raise UserError(f"model.stabilizer.initialization.deviation is {deviation}; above zero, 0.02 would do")
        self.deviation = deviation

    def gain(self, site: Site, role: Role) -> float:
        joins = _in_layer(site) and role in ("output", "feed_forward_out")
        return float((site.layers * len(site.roles)) ** -0.5) if joins else 1.0

    def base(self, weight: Tensor, site: Site, role: Role) -> float:
        return self.deviation

    def constants(self, site: Site) -> dict[str, float]:
        return {"output deviation": self.deviation * self.gain(site, "output")}


class SmallInit(Initialization):
    """Attention matrices as small as those of a feed-forward network four times as wide.

        attention W ~ N(0, 2 / (5 width));  feed-forward W ~ N(0, 2 / (width + hidden))

    which are Xavier normal, in attention with a gain of sqrt(2/5).

    Also: lets six layers of post-norm train with a short warm-up, where Xavier's do not.
    Paper: Nguyen and Salazar 2019, arXiv:1910.05895
    """

    distribution = "normal"

    def gain(self, site: Site, role: Role) -> float:
        attention = _in_layer(site) and role in ("query", "key", "value", "output")
        return math.sqrt(2 / 5) if attention else 1.0


class FixNorm(Initialization):
    """Embeddings of length one, always; they learn directions only.

        E = e / |e|, read as sqrt(width) E, and as E by the tied output;  e ~ U(-0.01, 0.01) at the start

    Also: other weights are Xavier. Belongs with ScaleNorm, whose last gain then is the length of the logits;
    configs/strategies/scale_norm.yaml sets both. An output projection of its own keeps its lengths.
    Paper: Nguyen and Salazar 2019, arXiv:1910.05895, after Nguyen and Chiang 2018, arXiv:1710.01329
    """

    def gain(self, site: Site, role: Role) -> float:
        return 1.0

    def fill(self, weight: Tensor, site: Site, role: Role) -> None:
        if role == "embedding":
            nn.init.uniform_(weight, -0.01, 0.01)
        else:
            super().fill(weight, site, role)

    def form(self, weight: Tensor, site: Site, role: Role) -> nn.Module | None:
        return UnitRows() if role == "embedding" else None


class UnitRows(Part):
    """Rows of length one; shorter ones than 1e-5 stay shorter, so that a row of zeros has a finite gradient."""

    def forward(self, weight: Tensor) -> Tensor:
        """`weight` `[rows, width]` with each row divided by its length, which is taken in float32."""
        return F.normalize(weight.float(), dim=-1, eps=1e-5).to(weight.dtype)
