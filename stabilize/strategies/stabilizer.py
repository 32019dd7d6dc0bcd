"""The seven answers together."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from stabilize.errors import UserError
from stabilize.strategies.attention import AttentionStabilizer, PlainAttention
from stabilize.strategies.epsilon import Epsilon, FixedEpsilon
from stabilize.strategies.initialization import Initialization, Role, Xavier
from stabilize.strategies.norm import LayerNorm, Norm
from stabilize.strategies.placement import Placement, PreNorm
from stabilize.strategies.residual import Residual, Sum
from stabilize.strategies.site import Site
from stabilize.strategies.strategy import Strategy, from_spec
from stabilize.strategies.warmup import InverseSqrt, Warmup


@final
class Stabilizer:
    """What keeps a stack stable: one strategy an axis.

    Args:
        placement: where the norms stand.
        residual: how a branch joins the stream.
        norm: the normaliser.
        epsilon: the number that keeps a norm from dividing by zero.
        initialization: a gain for each role of a weight.
        attention: what tames the attention logits.
        warmup: the learning rate as a factor, by update.

    Raises:
        UserError: two of them cannot be combined.
    """

    def __init__(
        self,
        placement: Placement = PreNorm(),  # noqa: B008  templates are never changed, only copied
        residual: Residual = Sum(),  # noqa: B008
        norm: Norm = LayerNorm(),  # noqa: B008
        epsilon: Epsilon = FixedEpsilon(),  # noqa: B008
        initialization: Initialization = Xavier(),  # noqa: B008
        attention: AttentionStabilizer = PlainAttention(),  # noqa: B008
        warmup: Warmup = InverseSqrt(),  # noqa: B008
    ) -> None:
        self.placement = placement
        self.residual = residual
        self.norm = norm
        self.epsilon = epsilon
        self.initialization = initialization
        self.attention = attention
        self.warmup = warmup
        refusals = [refusal for part in self.axes.values() for refusal in part.refusals(self)]
        if refusals:
            raise UserError("; ".join(refusals))

    @property
    def axes(self) -> dict[str, Strategy]:
        """The strategies by axis, in the menu's order."""
        return dict(vars(self))

    def make_norm(self, site: Site, precision: str, width: int | None = None) -> nn.Module:
        """A norm for `site` with the epsilon of that place; `width` where its input is not as wide as the stream."""
        return self.norm.at(site, width=width, epsilon=self.epsilon.at(site, precision))

    def forms(self, weight: Tensor, site: Site, role: Role) -> nn.Sequential:
        """What maps a weight to the one that the model computes with; mostly nothing."""
        forms = [part.form(weight, site, role) for part in self.axes.values()]
        return nn.Sequential(*(form for form in forms if form is not None))

    def warnings(self, site: Site, precision: str) -> list[str]:
        """What the literature warns about in the stack of `site`."""
        return [warning for part in self.axes.values() for warning in part.warnings(self, site, precision)]

    def spec(self) -> dict[str, Any]:
        """The strategies by axis as plain values; `from_spec` reads it."""
        return {axis: part.spec() for axis, part in self.axes.items()}

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Stabilizer:
        """The stabiliser that `spec` describes."""
        return cls(**{axis: from_spec(part) for axis, part in spec.items()})
