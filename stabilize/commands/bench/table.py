"""Tables with a column for each thing that is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.table import Table

Row = dict[str, Any]
"""What was found of one of the things that are compared, with its name."""


def beside(title: str, rows: Sequence[Row], lines: Mapping[str, Callable[[Row], str]]) -> Table:
    """A column for each row, and a line for each thing to say of it, by what the line is called."""
    shown = Table(box=box.SIMPLE, title=title, title_justify="left")
    shown.add_column("")
    for row in rows:
        shown.add_column(row["name"])
    for what, said in lines.items():
        shown.add_row(what, *map(said, rows))
    return shown


def operations(limit: float, dtype: torch.dtype) -> dict[str, Callable[[Row], str]]:
    """Lines for useful operations, and their share of a ceiling."""
    precision = str(dtype).removeprefix("torch.")
    return {
        "useful GFLOP/s": lambda row: f"{row['flops_per_second'].median / 1e9:,.1f}",
        f"of {limit / 1e9:,.0f} GFLOP/s, {precision} products": lambda row: f"{row['share_of_ceiling']:.1%}",
    }
