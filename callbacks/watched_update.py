"""What a callback knows of an update that is to be judged, now or later."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from stabilize import stats
from stabilize.callbacks.rehearsal import block_of


class _Given(NamedTuple):
    """One of the batches of an update; the last two only where an update is judged before it is made."""

    number: int
    """In its epoch."""
    sentences: Tensor | None
    batch: Any = None
    generators: dict[str, Any] | None = None


@dataclass
class WatchedUpdate:
    """Loss, gradients and batches of an update."""

    number: int
    values: Tensor
    """Loss and gradient norm, `[2]`."""
    window: list[_Given] = field(default_factory=list)
    norms: Tensor | None = None
    """L2 norm of each gradient, on its device."""
    weights: list[str] = field(default_factory=list)
    """Which these are of, by name."""
    learning_rate: Tensor | float = math.nan
    deviations: list[float | None] = field(default_factory=lambda: [None, None])
    """By how many standard deviations loss and gradient norm are off their means; None where too few came before them
    to have these, or until they are judged."""
    layers: dict[str, float] | None = None
    """L2 norm of the gradient of each layer, once somebody has asked."""

    @staticmethod
    def given(batch: Any, number: int, generators: dict[str, Any] | None) -> _Given:
        """A batch as it is handed to `training_step`; without `generators` only its sentences are kept, not itself."""
        index = batch.get("index") if isinstance(batch, dict) else getattr(batch, "index", None)
        sentences = index if isinstance(index, Tensor) else None
        return _Given(number, sentences, None if generators is None else batch, generators)

    @staticmethod
    def plain(window: list[_Given]) -> list[tuple[int, list[int] | None]]:
        """Batches in plain values: the number and the sentences of each; checkpoints hold them."""
        return [(given.number, None if given.sentences is None else given.sentences.tolist()) for given in window]

    @staticmethod
    def from_plain(batches: list[tuple[int, list[int] | None]], mine: bool) -> list[_Given]:
        """The same of before a checkpoint; where they are not `mine`, the sentences are not known."""
        return [_Given(number, torch.tensor(ids) if mine and ids is not None else None) for number, ids in batches]

    @property
    def sentences(self) -> list[list[int] | None]:
        """Numbers of the sentences of each batch, where they are known."""
        return [ids for _, ids in self.plain(self.window)]

    def state(self) -> dict[str, Any]:
        """All but the values, in plain ones; checkpoints hold it."""
        return {"number": self.number, "layers": self.by_layer(), "batches": self.plain(self.window)}

    @classmethod
    def from_state(cls, state: dict[str, Any], mine: bool) -> Self:
        """An update before a checkpoint; see `from_plain`."""
        window = cls.from_plain(state["batches"], mine)
        return cls(state["number"], torch.full((2,), math.nan), window, layers=state["layers"])

    def let_go(self) -> None:
        """Keep no batch any longer, but its sentences."""
        self.window = [given._replace(batch=None, generators=None) for given in self.window]

    def by_layer(self) -> dict[str, float]:
        """L2 norm of the gradient of each layer, see `block_of`; they come to the host when this is first asked."""
        if self.layers is None:
            squares: dict[str, float] = {}
            norms = [] if self.norms is None else stats.whole(self.norms).tolist()
            for name, norm in zip(self.weights, norms, strict=True):
                block = block_of(name)
                squares[block] = squares.get(block, 0.0) + norm * norm
            self.layers = {block: math.sqrt(square) for block, square in squares.items()}
            self.norms, self.weights = None, []
        return self.layers
