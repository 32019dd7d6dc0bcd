"""Strategies and callbacks of other distributions: entry points, imported before the parser is built.

An entry point is called like the class it brings, so that a class which could not be imported is still known by name:

    [project.entry-points."stabilize.strategies"]
    Halved = "my_package.residual:Halved"
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

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


class Modules:
    """Which modules belong to plug-ins: those with an entry point, and those whose file lies below some folder.

    Args:
        folders: where plug-ins without an entry point lie.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.named = {entry.module.partition(".")[0] for group in GROUPS for entry in entry_points(group=group)}

    def have(self, module: str, file: str | None) -> bool:
        """Whether the module of this name and file is one."""
        package = module.partition(".")[0]
        places = [folder / name for folder in self.folders for name in (package, f"{package}.py")]
        beside = file is not None and any(Path(file).is_relative_to(place) for place in places)
        return package != __package__ and (package in self.named or beside)

    def culprit(self, error: Exception) -> str | None:
        """Where an error arose, if it passed through a plug-in: its last line there."""
        for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
            module = str(frame.f_globals.get("__name__"))
            if self.have(module, frame.f_code.co_filename):
                return f"{module} fails in {frame.f_code.co_name}, line {line}"
        return None

    def imported(self) -> list[str]:
        """Those that are there, used or not."""
        files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
        return sorted(name for name, file in files.items() if self.have(name, file))


def describe(cause: BaseException) -> str:
    """The exception on one line: its type, then what it says."""
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"
