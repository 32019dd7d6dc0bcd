"""The rows of results.csv together: means over seeds, shares of failures, what is best and what is stable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Literal, NamedTuple

from stabilize.study.outcome import FAILURES, NUMBERS

Row = Mapping[str, str]
"""Of results.csv."""

Kind = Literal["ratio", "size", "fate"]
"""What colours say: how far from one, how large, or what became of a point."""


class Shown(NamedTuple):
    """A column of results.csv that people look at: above a table, above a map, and what colours say there."""

    heading: str
    title: str
    kind: Kind


SHOWN = {
    "val_nll": Shown("val nll", "validation nll a token", "size"),
    "test_bleu": Shown("BLEU", "test BLEU", "size"),
    "encoder_gradient_ratio": Shown("ratio enc", "encoder: gradient of layer 1 over the last layer's", "ratio"),
    "decoder_gradient_ratio": Shown("ratio dec", "decoder: gradient of layer 1 over the last layer's", "ratio"),
    "encoder_similarity_centered": Shown(
        "similarity enc", "encoder: similarity of neighbouring layers, centred", "size"
    ),
    "decoder_similarity_centered": Shown(
        "similarity dec", "decoder: similarity of neighbouring layers, centred", "size"
    ),
    "encoder_effective_depth": Shown("depth used enc", "encoder: layers that would be missed", "size"),
    "decoder_effective_depth": Shown("depth used dec", "decoder: layers that would be missed", "size"),
}

NORMAL = NormalDist().inv_cdf(0.975)

STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""Of Student's distribution with 1, 2, ... degrees of freedom, the point that 97.5 % lie below."""


def interval(failures: int, runs: int) -> tuple[float, float]:
    """Of the share of failures, 95 %: Wilson's interval (Wilson 1927)."""
    z = NORMAL
    share, spread = failures / runs, z / (1 + z**2 / runs)
    middle = (share + z**2 / (2 * runs)) / (1 + z**2 / runs)
    half = spread * math.sqrt(share * (1 - share) / runs + z**2 / (4 * runs**2))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Mean:
    """A mean over runs, and the 95 % interval that Student (1908) gives it.

    Args:
        values: of the runs; at least one.
    """

    values: tuple[float, ...]

    @property
    def middle(self) -> float:
        """The mean."""
        return fmean(self.values)

    @property
    def half(self) -> float:
        """Half the width of the interval; infinite for a single run."""
        freedom = len(self.values) - 1
        if freedom < 1:
            return math.inf
        # Beyond the table, the beginning of Fisher and Cornish's expansion (1960) errs by less than 0.001.
        z = NORMAL
        expanded = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        point = STUDENT[freedom - 1] if freedom <= len(STUDENT) else expanded
        return point * stdev(self.values) / math.sqrt(freedom + 1)

    @property
    def low(self) -> float:
        """Where the interval begins."""
        return self.middle - self.half

    @property
    def high(self) -> float:
        """Where it ends."""
        return self.middle + self.half


def value(row: Row, column: str) -> float | None:
    """A finite number of a row; none where there is none."""
    found = float(row[column]) if row.get(column) else math.nan
    return found if math.isfinite(found) else None


def paired(
    one: Sequence[Row], other: Sequence[Row], number: Callable[[Row], float | None], keys: Sequence[str] = ("seed",)
) -> Mean | None:
    """The mean of a number less that of the other run with the same seed, or whatever the keys are."""
    others = {tuple(row[key] for key in keys): number(row) for row in other}
    pairs = [(number(row), others.get(tuple(row[key] for key in keys))) for row in one]
    known = [mine - its for mine, its in pairs if mine is not None and its is not None]
    return Mean(tuple(known)) if known else None


def val_nll(row: Row) -> float | None:
    """Of a run."""
    return value(row, "val_nll")


@dataclass(frozen=True)
class Line:
    """What runs that differ in their seed alone came to."""

    values: dict[str, str]
    rows: tuple[Row, ...]

    @property
    def runs(self) -> int:
        """How many."""
        return len(self.rows)

    @property
    def failures(self) -> dict[str, int]:
        """How many did not train, by outcome."""
        found = [row["outcome"] for row in self.rows]
        return {name: found.count(name) for name in FAILURES if name in found}

    @property
    def failed(self) -> int:
        """How many did not train."""
        return sum(self.failures.values())

    @property
    def told(self) -> str:
        """The failures in words, with the interval of their share."""
        low, high = interval(self.failed, self.runs)
        said = ", ".join(f"{number} {name}" for name, number in self.failures.items()) or "none"
        return f"{said} of {self.runs} ({low:.0%} to {high:.0%})"

    @property
    def fate(self) -> str:
        """`trained` where every run did, else what became of most that did not."""
        return max(self.failures, key=lambda name: self.failures[name], default="trained")

    @property
    def counted(self) -> tuple[Row, ...]:
        """The runs that trained, or all where none did."""
        return tuple(row for row in self.rows if row["outcome"] == "trained") or self.rows

    def over(self, column: str) -> Mean | None:
        """The mean of a column over the runs that trained, else over all that have the number."""
        known = [found for row in self.counted if (found := value(row, column)) is not None]
        return Mean(tuple(known)) if known else None

    def mean(self, column: str) -> float:
        """The same without its interval; NaN where there is no number."""
        found = self.over(column)
        return math.nan if found is None else found.middle

    @property
    def means(self) -> dict[str, float]:
        """Of all columns of NUMBERS that have one."""
        return {column: found.middle for column in NUMBERS if (found := self.over(column)) is not None}

    @property
    def rank(self) -> tuple[float, float]:
        """The smallest share of failures first, then the lowest nll."""
        nll = self.mean("val_nll")
        return self.failed / self.runs, math.inf if math.isnan(nll) else nll


def lines(rows: Iterable[Row], keys: Sequence[str]) -> list[Line]:
    """One line for each point of the grid, in the order of the rows.

    Args:
        rows: of results.csv.
        keys: of the grid, without the seed.
    """
    points: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        points.setdefault(tuple(row.get(key, "") for key in keys), []).append(row)
    return [Line(dict(zip(keys, point, strict=True)), tuple(runs)) for point, runs in points.items()]


def at_best(found: Iterable[Line], key: str = "learning_rate") -> list[Line]:
    """Of lines that differ in a key alone, the best: that with the fewest failures, then the lowest nll."""
    points: dict[tuple[tuple[str, str], ...], Line] = {}
    for line in found:
        place = tuple((name, value) for name, value in line.values.items() if name != key)
        if place not in points or line.rank < points[place].rank:
            points[place] = line
    return list(points.values())


def largest_stable(found: Iterable[Line]) -> float | None:
    """The largest learning rate at which every run trained; none: there is none."""
    return max((float(line.values["learning_rate"]) for line in found if not line.failed), default=None)
