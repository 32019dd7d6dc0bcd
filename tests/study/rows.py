"""Rows of results.csv made by hand."""

from __future__ import annotations

from stabilize.study import NUMBERS


def row(run: int = 0, outcome: str = "trained", seed: int = 1, **values: object) -> dict[str, str]:
    """A row with what is given; `__` in a name stands for a point, and other numbers are empty."""
    told = {key.replace("__", "."): str(value) for key, value in values.items()}
    return (
        {"run": f"run {run}", "strategy": "a", "seed": str(seed), "outcome": outcome}
        | dict.fromkeys(NUMBERS, "")
        | told
    )
