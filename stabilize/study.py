"""A study: one run for each point of a grid, and what came of them. Nothing is run here."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stabilize.errors import UserError
from stabilize.report import Run

NUMBERS = {
    "val_nll": "val/nll",
    "val_bleu": "val/bleu",
    "test_nll": "test/nll",
    "test_bleu": "test/bleu",
    "encoder_gradient_ratio": "gradient_ratio/encoder/first_to_last",
    "decoder_gradient_ratio": "gradient_ratio/decoder/first_to_last",
    "encoder_similarity": "layer_similarity/encoder/mean",
    "decoder_similarity": "layer_similarity/decoder/mean",
    "encoder_similarity_centered": "layer_similarity_centered/encoder/mean",
    "decoder_similarity_centered": "layer_similarity_centered/decoder/mean",
}
"""Columns of results.csv, and the metric whose last value each is."""

FAILURES = {
    "diverged": "the loss or the gradient norm was not finite, or nll rose above its beginning and stayed there",
    "stuck": "nll no longer fell, above half of where it began, or nine tenths of what single words cost",
    "crashed": "the run ended with an error",
}
"""Outcomes of a run that did not train, and how they are told (the thresholds are those of stabilize/findings.py)."""


@dataclass
class Study:
    """What a study file says.

    Args:
        question: what it is to answer.
        configs: of every run, in this order; paths as seen from where the command is given.
        strategies: names of configs/strategies, or paths, one laid over the configs in each run.
        seeds: `seed_everything` of the runs.
        depths: layers of the encoder, and of the decoder; none: as the configs say.
        grid: further keys of `fit`, each with its values.
        settings: keys of `fit` with one value for all runs.
        special: by strategy, keys of `fit` for its runs alone.
    """

    question: str
    configs: list[str]
    strategies: list[str]
    seeds: list[int] = field(default_factory=lambda: [1])
    depths: list[int] | None = None
    grid: dict[str, list[Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    special: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lists: dict[str, list[Any]] = {
            "configs": self.configs,
            "strategies": self.strategies,
            "seeds": self.seeds,
            **self.grid,
        }
        for name, values in lists.items() if self.depths is None else {**lists, "depths": self.depths}.items():
            if not values:
                raise UserError(f"{name} is empty; it needs one value at least")
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise UserError(f"{name} has {twice[0]} twice")
        for name in self.special:
            if name not in self.strategies:
                raise UserError(f"special has keys for {name}, which is none of the strategies")


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    name: str
    values: dict[str, str]
    """Where it lies in the grid: strategy, depth, further keys, seed."""
    words: tuple[str, ...]
    """Of `stabilize fit`."""


def cells(study: Study, paths: Mapping[str, Path]) -> list[Cell]:
    """All runs, seed by seed, so that a study that is stopped early has a whole table.

    Args:
        paths: the config of each strategy.

    Raises:
        UserError: two runs would have one name.
    """
    found: dict[str, Cell] = {}
    grid = [[(key, value) for value in values] for key, values in study.grid.items()]
    depths: list[int | None] = [None] if study.depths is None else [*study.depths]
    for seed, depth, strategy in itertools.product(study.seeds, depths, study.strategies):
        for point in itertools.product(*grid):
            values = {"strategy": strategy}
            keys: dict[str, Any] = {}
            if depth is not None:
                values["depth"] = str(depth)
                keys |= {"model.encoder_layers": depth, "model.decoder_layers": depth}
            values |= {key: _word(value) for key, value in point}
            values["seed"] = str(seed)
            keys |= study.settings | dict(point) | study.special.get(strategy, {}) | {"seed_everything": seed}
            configs = [word for config in (*study.configs, paths[strategy]) for word in ("-c", str(config))]
            words = (*configs, *(f"--{key}={_word(value)}" for key, value in keys.items()))
            name = "-".join(_short(key, value) for key, value in values.items())
            if name in found:
                raise UserError(f"two runs of the study would be called {name}")
            found[name] = Cell(name, values, words)
    return list(found.values())


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _short(key: str, value: str) -> str:
    said = Path(value).stem if key == "strategy" else f"{key.rpartition('.')[2]}={value}"
    return re.sub(r"[^\w.=+]+", "_", said)


def outcome(run: Run | None, code: int) -> str:
    """`trained`, or one of FAILURES, of a run that ended with an exit code."""
    if run is not None:
        for finding in run.diary.all:
            if not finding.passed and finding.rule in FAILURES:
                return finding.rule
    return "trained" if run is not None and code == 0 else "crashed"


def numbers(run: Run | None) -> dict[str, str]:
    """The columns of NUMBERS with every digit; empty where there is no number."""
    last = {column: run.last(key) if run is not None else None for column, key in NUMBERS.items()}
    return {column: "" if value is None else repr(value) for column, value in last.items()}


def interval(failures: int, runs: int) -> tuple[float, float]:
    """Of the share of failures, 95 %: Wilson's interval (Wilson 1927)."""
    z = 1.959964
    share, spread = failures / runs, z / (1 + z**2 / runs)
    middle = (share + z**2 / (2 * runs)) / (1 + z**2 / runs)
    half = spread * math.sqrt(share * (1 - share) / runs + z**2 / (4 * runs**2))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Line:
    """What runs that differ in their seed alone came to."""

    values: dict[str, str]
    runs: int
    failures: dict[str, int]
    """How many, by outcome."""
    means: dict[str, float]
    """Of the columns of NUMBERS over the runs that trained, else over all that have the number."""

    @property
    def failed(self) -> str:
        """The failures in words, with the interval of their share."""
        count = sum(self.failures.values())
        low, high = interval(count, self.runs)
        said = ", ".join(f"{number} {name}" for name, number in self.failures.items()) or "none"
        return f"{said} of {self.runs} ({low:.0%} to {high:.0%})"


def lines(rows: Iterable[Mapping[str, str]], keys: Sequence[str]) -> list[Line]:
    """The table of a study: one line for each point of the grid, best nll first.

    Args:
        rows: of results.csv.
        keys: of the grid, without the seed.
    """
    points: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        points.setdefault(tuple(row[key] for key in keys), []).append(row)
    found = []
    for point, runs in points.items():
        failed = [row["outcome"] for row in runs if row["outcome"] != "trained"]
        counted = [row for row in runs if row["outcome"] == "trained"] or runs
        means = {}
        for column in NUMBERS:
            values = [value for row in counted if row[column] and math.isfinite(value := float(row[column]))]
            if values:
                means[column] = sum(values) / len(values)
        failures = {name: failed.count(name) for name in FAILURES if name in failed}
        found.append(Line(dict(zip(keys, point, strict=True)), len(runs), failures, means))
    return sorted(found, key=lambda line: (len(line.failures) > 0, line.means.get("val_nll", math.inf)))
