"""Rounds in which everything that is compared has its turn, so that what slows the machine down slows all of it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Found = TypeVar("Found")


def interleaved(contenders: Mapping[str, Callable[[], Found]], rounds: int) -> dict[str, list[Found]]:
    """What each contender finds in each round, by name; every round has an order of its own, the same in every run."""
    order = random.Random(1)
    found: dict[str, list[Found]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in order.sample([*contenders], len(contenders)):
            found[name].append(contenders[name]())
    return found


@dataclass(frozen=True)
class Spread:
    """A number as it came out in each round."""

    rounds: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def over(self, other: Spread) -> Spread:
        """The ratio to another number in each round."""
        return Spread([mine / its for mine, its in zip(self.rounds, other.rounds, strict=True)])

    def shown(self, form: str) -> str:
        """Median (least to greatest), each in a format such as `.2f`."""
        return f"{self.median:{form}} ({min(self.rounds):{form}} to {max(self.rounds):{form}})"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        extremes = {"least": min(self.rounds), "greatest": max(self.rounds)}
        return {"median": self.median, **extremes, "rounds": [*self.rounds]}
