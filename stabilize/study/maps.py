"""Heat maps of a study as numbers: strategy by depth, or whatever varies; the page and the figures draw them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stabilize.findings import number
from stabilize.study.answer import stable_told
from stabilize.study.plan import place_of
from stabilize.study.table import SHOWN, Kind, Line, Row, at_best, largest_stable, lines


@dataclass(frozen=True)
class Map:
    """One picture."""

    name: str
    title: str
    kind: Kind
    rows: list[str]
    columns: list[str]
    across: str
    """What the columns are."""
    numbers: Mapping[tuple[str, str], float]
    """By row and column, where there is one."""
    words: Mapping[tuple[str, str], str]
    """What stands in each place."""


def maps(rows: Sequence[Row], keys: Sequence[str]) -> list[Map]:
    """All that can be drawn of some rows.

    Args:
        rows: of results.csv.
        keys: of the grid, without the seed.
    """
    found = at_best(lines(rows, keys))
    across = column_key(rows, keys)
    down = [key for key in keys if key not in (across, "learning_rate")]
    return [
        drawn
        for name, (_, title, kind) in SHOWN.items()
        if (drawn := _numbers(found, name, title, kind, down, across)) is not None
    ]


def frontiers(rows: Sequence[Row], keys: Sequence[str]) -> list[Map]:
    """What becomes of each learning rate at each depth, a picture a strategy; none where only one of both varies."""
    found = []
    both = {"learning_rate", "depth"} <= set(keys)
    for strategy in dict.fromkeys(row["strategy"] for row in rows) if both else ():
        own = lines([row for row in rows if row["strategy"] == strategy], ["learning_rate", "depth"])
        places = {(line.values["learning_rate"], line.values["depth"]): line for line in own}
        depths = _in_order(line.values["depth"] for line in own)
        largest = {depth: largest_stable(line for (_, at), line in places.items() if at == depth) for depth in depths}
        said = ", ".join(f"{depth} layers {stable_told(rate, own)}" for depth, rate in largest.items())
        found.append(
            Map(
                f"frontier_{Path(strategy).stem}",
                f"{strategy}: largest stable learning rate: {said}",
                "fate",
                _in_order(line.values["learning_rate"] for line in own),
                depths,
                "depth",
                {},
                {at: line.fate for at, line in places.items()},
            )
        )
    return found


def column_key(rows: Sequence[Row], keys: Sequence[str]) -> str:
    """What goes across: the depth if that varies, else the last key that does."""
    vary = [key for key in keys if key not in ("strategy", "learning_rate") and len({row[key] for row in rows}) > 1]
    return "depth" if "depth" in vary else vary[-1] if vary else "strategy"


def _numbers(found: Sequence[Line], name: str, title: str, kind: Kind, down: Sequence[str], across: str) -> Map | None:
    numbers, words, rows, columns = {}, {}, dict[str, None](), list[str]()
    for line in found:
        mean = line.mean(name)
        row = place_of({key: line.values[key] for key in down}) or title
        column = line.values[across]
        rows[row] = None
        columns.append(column)
        if not math.isnan(mean):
            numbers[row, column] = mean
            words[row, column] = number(mean) + "*" * bool(line.failed)
    return Map(name, title, kind, [*rows], _in_order(columns), across, numbers, words) if numbers else None


def _in_order(values: Iterable[str]) -> list[str]:
    """Without repetition; numbers by size."""
    distinct = list(dict.fromkeys(values))
    try:
        return sorted(distinct, key=float)
    except ValueError:
        return distinct
