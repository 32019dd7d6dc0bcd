"""The runs of a study, each in a process of its own, and what is kept of them."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any

from stabilize.commands.forks import LOST, Fork
from stabilize.commands.mistakes import options
from stabilize.errors import UserError
from stabilize.report import read
from stabilize.study import NUMBERS, Cell
from stabilize.study.outcome import numbers, outcome
from stabilize.study.plan import UPDATES

ENDED = (
    *(128 + signal.SIGINT, 128 + signal.SIGTERM),
    *(-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGKILL, LOST),
)
"""Exit codes of a run that somebody ended: it has no result."""
MISTAKEN = 2
"""Exit code of a run that stopped at what a user can mend, such as a full disk: it has none either."""

COSTS = ("seconds", "memory_gib", "tokens_per_second")
"""Columns of costs.csv."""

PROGRESS = re.compile(rb"^update ([\d,]+): ", re.MULTILINE)
"""A line of a run's log that says how far it is."""


@dataclass
class Running:
    """A run under way."""

    cell: Cell
    folder: Path
    process: Fork
    start: float

    @property
    def progress(self) -> str:
        """How far it is: `120 of 400 updates`."""
        with (self.folder / "log.txt").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            said = PROGRESS.findall(log.read())
        planned = dict(options(self.cell.words)).get(f"--{UPDATES}")
        return f"{said[-1].decode() if said else 0}{f' of {planned}' if planned else ''} updates"


class Comparison:
    """The runs of a study and what is known of them.

    A run that another study beside this one has made, with the same command line and the same configs, counts as made.
    Of a run whose folder is gone, results.csv and costs.csv tell.

    Args:
        folder: of the study.
        cells: all its runs.
        jobs: how many run at once.
        core_minutes: what all runs take of one core, where that is known.

    Raises:
        UserError: the folder has results of another study.
    """

    def __init__(self, folder: Path, cells: Sequence[Cell], jobs: int, core_minutes: float | None = None) -> None:
        self.folder, self.cells, self.jobs, self.core_minutes = folder, cells, jobs, core_minutes
        self.under_way: list[Running] = []
        self.found: dict[str, dict[str, Any]] = {}
        self._asked = {cell.name: _hash(cell) for cell in cells}
        told = _told(folder)
        for cell in cells:
            place = self._place(cell)
            # A run whose folder is there and has no result was ended, whatever a table of before says.
            found = _result(place) if place.parent.exists() else told.get(cell.name)
            if found is not None:
                if found["asked"] != self._asked[cell.name]:
                    raise UserError(
                        f"{cell.name} in {folder} was run with another command line, or other configs, than the study "
                        "has now; --out names another folder"
                    )
                self.found[cell.name] = found
        others = [one for one in sorted(folder.parent.glob("*/")) if one != folder]
        elsewhere = {found["asked"]: found for other in others for found in _told(other).values()}
        for path in sorted(folder.parent.glob("*/cells/*/result.json")):
            if (found := _result(path)) is not None:
                elsewhere[found["asked"]] = found
        elsewhere |= {found["asked"]: found for found in self.found.values()}
        for cell in cells:
            if cell.name not in self.found and self._asked[cell.name] in elsewhere:
                self.found[cell.name] = elsewhere[self._asked[cell.name]]
        self.without: dict[str, str] = {}
        """Why runs have no result."""
        self._estimated: tuple[int, float | None] = (-1, None)
        """How many runs had a result, and what the others will take."""

    @property
    def left(self) -> list[Cell]:
        """Runs without a result, each once where several points of the grids ask for the same."""
        first: dict[str, Cell] = {}
        for cell in self.cells:
            if cell.name not in self.found:
                first.setdefault(self._asked[cell.name], cell)
        return list(first.values())

    @property
    def seconds_left(self) -> float | None:
        """What the runs that are left will take; none: nothing is known."""
        if len(self.found) != self._estimated[0]:  # else it is known, and a board asks twice a second
            self._estimated = len(self.found), self._estimate()
        return self._estimated[1]

    def _estimate(self) -> float | None:
        known = [(cell, self.found[cell.name]["seconds"]) for cell in self.cells if cell.name in self.found]
        if known:
            cost = _cost_of_depth([(_depth(cell), seconds) for cell, seconds in known])
            return sum(_expected(cell, known, cost) for cell in self.left) / self.jobs
        return None if self.core_minutes is None else 60 * self.core_minutes / self.jobs

    def command(self, cell: Cell) -> str:
        """What repeats a run, as one would type it."""
        return shlex.join(["stabilize", "fit", *cell.words])

    def carry_out(self) -> Generator[Cell | None]:
        """Make the runs that are left; each that ends, and none again and again while there is nothing to tell."""
        for taken in self.cells:
            if taken.name in self.found and not self._place(taken).exists():
                self._keep(taken, self.found[taken.name])
        waiting = iter(self.left)
        try:
            while True:
                while len(self.under_way) < self.jobs and (cell := next(waiting, None)) is not None:
                    self.under_way.append(self._start(cell))
                if not self.under_way:
                    return
                yield None
                Fork.wait([run.process for run in self.under_way], 0.5)
                for run in list(self.under_way):
                    if (code := run.process.poll()) is not None:
                        self.under_way.remove(run)
                        self._finish(run, code)
                        yield run.cell
        finally:
            for run in self.under_way:
                run.process.kill()

    def _place(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name / "result.json"

    def _start(self, cell: Cell) -> Running:
        folder = self._place(cell).parent
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was ended
        folder.mkdir(parents=True)
        named = {"WANDB_RUN_GROUP": self.folder.name, "WANDB_NAME": cell.name}
        words = ("fit", *cell.words, f"--trainer.default_root_dir={folder}")
        return Running(cell, folder, Fork(words, os.environ | named, folder / "log.txt"), time.monotonic())

    def _finish(self, run: Running, code: int) -> None:
        if code in ENDED or code == MISTAKEN:
            said = (run.folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            self.without[run.cell.name] = said[-1] if code == MISTAKEN and said else "somebody ended it"
            return
        folders = [path.parent for path in run.folder.glob("*/config.yaml")]
        whole = read(folders[0]) if folders else None
        found = {
            "asked": self._asked[run.cell.name],
            "command": self.command(run.cell),
            "outcome": outcome(whole, code),
            "verdict": whole.diary.verdict if whole is not None else "",
            "numbers": numbers(whole),
            "seconds": time.monotonic() - run.start,
            "memory_gib": run.process.memory / 2**30,
            "tokens_per_second": whole.last("train/tokens_per_second") if whole is not None else None,
            "folder": str(folders[0].relative_to(self.folder.parent)) if folders else None,
        }
        for cell in self.cells:
            if self._asked[cell.name] == found["asked"]:
                self._keep(cell, found)
        self.write()

    def _keep(self, cell: Cell, found: dict[str, Any]) -> None:
        place = self._place(cell)
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_suffix(".partial")
        partial.write_text(json.dumps(found, indent=1), encoding="utf-8")
        partial.replace(place)
        self.found[cell.name] = found

    @property
    def rows(self) -> list[dict[str, str]]:
        """Of results.csv, in the order of the plan: the same whatever the order of the runs was."""
        known = [(cell, self.found[cell.name]) for cell in self.cells if cell.name in self.found]
        return [
            {
                "run": cell.name,
                **cell.values,
                "outcome": found["outcome"],
                "verdict": found["verdict"],
                **found["numbers"],
                "command": found["command"],
                "asked": found["asked"],
            }
            for cell, found in known
        ]

    @property
    def folders(self) -> dict[str, Path]:
        """The run folder of each run that has one, by the run's name."""
        places = {name: found.get("folder") for name, found in self.found.items()}
        return {name: self.folder.parent / place for name, place in places.items() if place}

    def write(self) -> None:
        """Bring results.csv and costs.csv up to date."""
        write_csv(self.folder / "results.csv", self.rows)
        done = [cell.name for cell in self.cells if cell.name in self.found]
        costs = [{"run": name} | {key: self.found[name][key] for key in COSTS} for name in done]
        write_csv(self.folder / "costs.csv", costs)


def _result(path: Path) -> dict[str, Any] | None:
    """What is known of a run; none where it has not ended, or its file is torn."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "asked" in found else None


def _told(folder: Path) -> dict[str, dict[str, Any]]:
    """What results.csv and costs.csv tell of the runs of a study, by name."""
    costs = {row["run"]: row for row in read_csv(folder / "costs.csv")}
    return {
        row["run"]: {
            **{key: row[key] for key in ("asked", "command", "outcome", "verdict")},
            "numbers": {column: row[column] for column in NUMBERS},
            **{key: float(cost) if (cost := costs[row["run"]][key]) else None for key in COSTS},
            "folder": None,
        }
        for row in read_csv(folder / "results.csv")
        if row["run"] in costs and row.keys() >= {"asked", *NUMBERS}
    }


def _expected(cell: Cell, known: Sequence[tuple[Cell, float]], cost: Callable[[float], float]) -> float:
    """Seconds that a run takes: as long as those that are most like it, each taken times what its depth adds."""

    def alike(other: Cell) -> int:
        return sum(other.values.get(key) == value for key, value in cell.values.items() if key != "seed")

    most = max(alike(other) for other, _ in known)
    taken = [seconds * cost(_depth(cell)) / cost(_depth(other)) for other, seconds in known if alike(other) == most]
    return sum(taken) / len(taken)


def _cost_of_depth(known: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """What a run of a depth costs, but for a factor: a share of its own and one of each layer, once runs of two depths
    are known; until then all is its layers'."""
    if len({depth for depth, _ in known}) < 2:
        return float
    layer, start = linear_regression(*zip(*known, strict=True))
    return (lambda depth: start + layer * depth) if start > 0 and layer > 0 else float


def _depth(cell: Cell) -> float:
    return float(cell.values.get("depth", 1))


def _hash(cell: Cell) -> str:
    """Of what a run is asked to do: its words, and the configs that they name."""
    told = hashlib.sha256("\0".join(cell.words).encode())
    for option, value in zip(cell.words, cell.words[1:], strict=False):
        if option == "-c":
            told.update(Path(value).read_bytes())
    return told.hexdigest()


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows that `write_csv` wrote; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows, whole or not at all; none where there is no row."""
    if not rows:
        return
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else carries out this study meanwhile.

    Raises:
        UserError: somebody does.
    """
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{folder} is being worked on by another process; --out names another folder") from error
        yield
