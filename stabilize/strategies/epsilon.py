"""Axis `epsilon`: the number that keeps a norm from dividing by zero."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from stabilize.errors import UserError
from stabilize.strategies.site import Site
from stabilize.strategies.strategy import Strategy

if TYPE_CHECKING:
    from stabilize.strategies.stabilizer import Stabilizer


def number_format(precision: str) -> torch.dtype:
    """The format in which Lightning's `precision` computes: `16-mixed` gives float16."""
    bits = precision.split("-")[0]
    return {"16": torch.float16, "bf16": torch.bfloat16, "64": torch.float64}.get(bits, torch.float32)


def _positive(key: str, value: float) -> float:
    if not torch.tensor(value, dtype=torch.float32) > 0:
        raise UserError(f"model.stabilizer.epsilon.{key} is {value}, which is not above zero in float32; 1e-5 would do")
    return value


class Epsilon(Strategy):
    """Base of all epsilons. Norms take their statistics in float32, where epsilon is added to the variance."""

    @abstractmethod
    def at(self, site: Site, precision: str) -> float:
        """Epsilon at a site under Lightning's `precision` (`32-true`, `bf16-mixed`, `16-mixed`, ...)."""

    def warnings(self, stabilizer: Stabilizer, site: Site, precision: str) -> list[str]:
        places = [dataclasses.replace(site, layer=layer) for layer in range(1, site.layers + 1)]
        places.append(dataclasses.replace(site, layer=site.layers + 1, role="final"))
        value, chosen = min(self.at(place, precision) for place in places), number_format(precision)
        if torch.tensor(value, dtype=chosen) > 0:
            return []
        return [
            f"epsilon {value:g} rounds to zero in {str(chosen).removeprefix('torch.')}, the format of precision "
            f"{precision}; norms here compute in float32, where it still acts, but exported models may not"
        ]


class FixedEpsilon(Epsilon):
    """The same epsilon everywhere.

        epsilon = value

    Args:
        value: added to the variance; acts where the variance is below about a hundred times this.
    """

    def __init__(self, value: float = 1e-5) -> None:
        self.value = _positive("value", value)

    def at(self, site: Site, precision: str) -> float:
        return self.value


class PrecisionEpsilon(Epsilon):
    """One epsilon for each number format.

        epsilon = value of the format that the trainer's precision computes in

    Args:
        float32: under `32-true` and `64-true`.
        bfloat16: under `bf16-mixed` and `bf16-true`.
        float16: under `16-mixed` and `16-true`; below 3e-8 it rounds to zero there.
    """

    def __init__(self, float32: float = 1e-6, bfloat16: float = 1e-5, float16: float = 1e-5) -> None:
        self.float32 = _positive("float32", float32)
        self.bfloat16 = _positive("bfloat16", bfloat16)
        self.float16 = _positive("float16", float16)

    def at(self, site: Site, precision: str) -> float:
        chosen = number_format(precision)
        return {torch.float16: self.float16, torch.bfloat16: self.bfloat16}.get(chosen, self.float32)


class LayerEpsilon(Epsilon):
    """One epsilon for each layer.

        epsilon = the l-th value of the stack's list in layer l, its last value in all layers beyond

    Args:
        encoder: by layer of the encoder, from the first; none: the default in all.
        decoder: by layer of the decoder; none: the default in all.
        default: of norms that belong to no layer, on an embedding or at the end of a stack.
    """

    def __init__(
        self, encoder: list[float] | None = None, decoder: list[float] | None = None, default: float = 1e-5
    ) -> None:
        self.encoder = self._values("encoder", encoder)
        self.decoder = self._values("decoder", decoder)
        self.default = _positive("default", default)

    @staticmethod
    def _values(key: str, values: list[float] | None) -> list[float] | None:
        if values == []:
            raise UserError(f"model.stabilizer.epsilon.{key} is an empty list; [1e-5] would do")
        return values and [_positive(key, value) for value in values]

    def at(self, site: Site, precision: str) -> float:
        if site.role in ("embedding", "final"):
            return self.default
        values = (self.encoder if site.stack == "encoder" else self.decoder) or [self.default]
        return values[min(site.layer, len(values)) - 1]
