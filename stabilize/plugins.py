"""Strategies and callbacks of other distributions: entry points, imported before the parser is built.

An entry point is called like the class it brings, so that a class which could not be imported is still known by name:

    [project.entry-points."stabilize.strategies"]
    Halved = "my_package.residual:Halved"
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

GROUPS = ("stabilize.strategies", "stabilize.callbacks")

broken: dict[str, Exception] = {}
"""What went wrong, by the name of the class that is missing for it."""


def load(group: str) -> None:
    """Import every entry point of ``group``; say on stderr and remember in ``broken`` which ones could not be."""
    for entry in entry_points(group=group):
        try:
            entry.load()
        except Exception as cause:  # a foreign module may raise anything; only a run that names it has to stop
            broken[entry.name] = cause
            print(f"warning: plug-in {entry.name} ({entry.value}) is left out: {describe(cause)}", file=sys.stderr)


def cause_of_absence(name: str) -> Exception | None:
    """The exception that kept the class ``name`` (bare, or with its module before it) off the menu, if one did."""
    return broken.get(name.rpartition(".")[2])


def describe(cause: Exception) -> str:
    """The exception on one line: its type, then what it says."""
    return f"{type(cause).__name__}: {cause}"
