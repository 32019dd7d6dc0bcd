"""The menu: what keeps a deep Transformer stable, one class a strategy, one file an axis."""

from stabilize.strategies.attention import AttentionStabilizer, PlainAttention, QKNorm, RealFormer
from stabilize.strategies.clipping import Clipping, GlobalNorm, NoClipping
from stabilize.strategies.epsilon import Epsilon, FixedEpsilon, PrecisionEpsilon
from stabilize.strategies.initialization import DeepNormInit, DepthGain, Initialization, Xavier
from stabilize.strategies.norm import LayerNorm, Norm, RMSNorm
from stabilize.strategies.placement import B2T, NoNorm, Placement, PostNorm, PreNorm, ResiDual, Step
from stabilize.strategies.residual import (
    DLCL,
    DeepNormResidual,
    HyperConnections,
    NoResidual,
    Residual,
    ScaledSum,
    Stream,
    Sum,
)
from stabilize.strategies.site import Site
from stabilize.strategies.stabilizer import Stabilizer
from stabilize.strategies.strategy import Part, Strategy
from stabilize.strategies.warmup import InverseSqrt, Linear, Noam, NoWarmup, Warmup

AXES: dict[str, type[Strategy]] = {
    "placement": Placement,
    "residual": Residual,
    "norm": Norm,
    "epsilon": Epsilon,
    "initialization": Initialization,
    "attention": AttentionStabilizer,
    "warmup": Warmup,
}
"""The base class of each axis; a strategy is a subclass that is not abstract."""

__all__ = [
    "AXES",
    "B2T",
    "DLCL",
    "AttentionStabilizer",
    "Clipping",
    "DeepNormInit",
    "DeepNormResidual",
    "DepthGain",
    "Epsilon",
    "FixedEpsilon",
    "GlobalNorm",
    "HyperConnections",
    "Initialization",
    "InverseSqrt",
    "LayerNorm",
    "Linear",
    "NoClipping",
    "NoNorm",
    "NoResidual",
    "NoWarmup",
    "Noam",
    "Norm",
    "Part",
    "Placement",
    "PlainAttention",
    "PostNorm",
    "PreNorm",
    "PrecisionEpsilon",
    "QKNorm",
    "RMSNorm",
    "RealFormer",
    "ResiDual",
    "Residual",
    "ScaledSum",
    "Site",
    "Stabilizer",
    "Step",
    "Strategy",
    "Stream",
    "Sum",
    "Warmup",
    "Xavier",
]
