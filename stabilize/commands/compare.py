"""`stabilize compare STUDY`: the runs of a study, each in a process of its own, and the table they make."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import fcntl
import hashlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from jsonargparse import ArgumentParser
from rich import box
from rich.console import Console
from rich.table import Table

from stabilize import study as studies
from stabilize.commands import mistakes, strict_yaml, training
from stabilize.commands.probe import paths_of
from stabilize.commands.words import Parser
from stabilize.errors import UserError
from stabilize.report import read
from stabilize.study import FAILURES, Cell, Study

ABOUT = """Carry out a study: one `stabilize fit` for each point of its grid, each in a process and a run folder of its
own. Runs that diverge or crash are results. What is finished is never run again: after Ctrl-C or a kill the same
command goes on where it was. Results are in studies/NAME: results.csv (what came out, and the command of each run) and
costs.csv."""

ENDED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGKILL)
"""Exit codes of a run that somebody ended: it has no result."""
MISTAKEN = 2
"""Exit code of a run that stopped at what a user can mend, such as a full disk: it has none either."""

COSTS = ("seconds", "memory_gib", "tokens_per_second")
"""Columns of costs.csv."""

SHOWN = {
    "val_nll": "val nll",
    "val_bleu": "val BLEU",
    "encoder_gradient_ratio": "ratio enc",
    "decoder_gradient_ratio": "dec",
    "encoder_similarity": "similarity enc",
    "decoder_similarity": "dec",
}
"""Columns of the table that is printed, by column of results.csv."""


def study_of(path: Path) -> Study:
    """The study in a file.

    Raises:
        UserError: there is none, or a mistake in it.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Study)
    mistakes.check(parser, ["--config", str(path)])
    try:
        return Study(**parser.parse_object(strict_yaml.read(path)).as_dict())
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: {mistakes.one_line(error)}") from error


def check(cells: Sequence[Cell]) -> None:
    """Read the command line of every run that brings a value of its own, before any of them starts.

    Raises:
        UserError: a mistake in one.
    """
    seen: set[tuple[str, str]] = set()
    for cell in cells:
        new = {item for item in cell.values.items() if item[0] != "seed"} - seen
        if new:
            seen |= new
            with contextlib.redirect_stdout(io.StringIO()):
                training.run(["explain", *cell.words])


@dataclass
class Running:
    """A run under way."""

    cell: Cell
    folder: Path
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    start: float


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG in prctl.h


class Comparison:
    """The runs of a study and what is known of them.

    Args:
        folder: of the study.
        cells: all its runs.
        jobs: how many run at once.
        threads: of each.

    Raises:
        UserError: the folder has results of another study.
    """

    def __init__(self, folder: Path, cells: Sequence[Cell], jobs: int, threads: int) -> None:
        self.folder, self.cells, self.jobs, self.threads = folder, cells, jobs, threads
        self.found: dict[str, dict[str, Any]] = {}
        for cell in cells:
            with contextlib.suppress(OSError, ValueError):
                self.found[cell.name] = json.loads(self._result(cell).read_text(encoding="utf-8"))
                if self.found[cell.name]["asked"] != _asked(cell):
                    raise UserError(
                        f"{cell.name} in {folder} was run with another command line, or other configs, than the study "
                        "has now; --out names another folder"
                    )
        self.without: dict[str, str] = {}
        """Why runs have no result."""

    @property
    def left(self) -> list[Cell]:
        """Runs without a result."""
        return [cell for cell in self.cells if cell.name not in self.found]

    @property
    def seconds_left(self) -> float | None:
        """What the runs that are left take, if they take as long as those before; none: nothing is known."""
        known = [found["seconds"] for found in self.found.values()]
        return sum(known) / len(known) * len(self.left) / self.jobs if known else None

    def command(self, cell: Cell) -> str:
        """What repeats a run, as one would type it."""
        return f"OMP_NUM_THREADS={self.threads} " + shlex.join(["stabilize", "fit", *cell.words])

    def carry_out(self) -> None:
        """Make the runs that are left."""
        waiting, under_way = iter(self.left), list[Running]()
        try:
            while True:
                while len(under_way) < self.jobs and (cell := next(waiting, None)) is not None:
                    under_way.append(self._start(cell))
                if not under_way:
                    return
                for run in list(under_way):
                    pid, status, usage = os.wait4(run.process.pid, os.WNOHANG)
                    if pid:
                        under_way.remove(run)
                        self._finish(run, os.waitstatus_to_exitcode(status), usage.ru_maxrss)
                time.sleep(0.1)
        finally:
            for run in under_way:
                run.process.kill()
                run.process.wait()
                run.log.close()

    def _result(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name / "result.json"

    def _start(self, cell: Cell) -> Running:
        folder = self._result(cell).parent
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was ended
        folder.mkdir(parents=True)
        log = (folder / "log.txt").open("wb")
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads), "WANDB_RUN_GROUP": self.folder.name}
        command = [sys.executable, "-m", "stabilize", "fit", *cell.words, f"--trainer.default_root_dir={folder}"]
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, preexec_fn=_die_with_parent
        )
        return Running(cell, folder, process, log, time.monotonic())

    def _finish(self, run: Running, code: int, memory: int) -> None:
        run.process.returncode = code  # wait4 has taken it
        run.log.close()
        if code in ENDED or code == MISTAKEN:
            said = (run.folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            self.without[run.cell.name] = said[-1] if code == MISTAKEN and said else "somebody ended it"
            return
        folders = [path.parent for path in run.folder.glob("*/config.yaml")]
        whole = read(folders[0]) if folders else None
        found = {
            "asked": _asked(run.cell),
            "command": self.command(run.cell),
            "outcome": studies.outcome(whole, code),
            "verdict": whole.diary.verdict if whole is not None else "",
            "numbers": studies.numbers(whole),
            "seconds": time.monotonic() - run.start,
            "memory_gib": memory / 2**20,
            "tokens_per_second": whole.last("train/tokens_per_second") if whole is not None else None,
        }
        partial = self._result(run.cell).with_suffix(".partial")
        partial.write_text(json.dumps(found, indent=1), encoding="utf-8")
        partial.replace(self._result(run.cell))
        self.found[run.cell.name] = found
        self.write()
        self._say(run.cell, found)

    def _say(self, cell: Cell, found: dict[str, Any]) -> None:
        nll = found["numbers"]["val_nll"]
        said = f"{found['outcome']}" + (f", val nll {float(nll):.3f}" if nll else "")
        left = self.seconds_left
        ahead = f"; about {left / 60:.0f} min left" if left else ""
        place = f"{len(self.found)} of {len(self.cells)}"
        print(f"{place}: {cell.name}: {said} ({found['seconds']:.0f} s){ahead}", flush=True)

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
            }
            for cell, found in known
        ]

    def write(self) -> None:
        """Bring results.csv and costs.csv up to date."""
        _write(self.folder / "results.csv", self.rows)
        done = [cell.name for cell in self.cells if cell.name in self.found]
        _write(
            self.folder / "costs.csv", [{"run": name} | {key: self.found[name][key] for key in COSTS} for name in done]
        )

    def table(self, question: str) -> Table:
        """One line for each point of the grid."""
        keys = [key for key in self.cells[0].values if key != "seed"]
        shown = Table(box=box.SIMPLE, title=question, caption=_definitions())
        for heading in (*keys, *SHOWN.values(), "failures (95 %)"):
            shown.add_column(heading)
        for line in studies.lines(self.rows, keys):
            numbers = [f"{line.means[column]:.3g}" if column in line.means else "" for column in SHOWN]
            shown.add_row(*line.values.values(), *numbers, line.failed)
        return shown


def _asked(cell: Cell) -> str:
    """A hash of what a run was asked to do: its words, and the configs that they name."""
    told = hashlib.sha256("\0".join(cell.words).encode())
    for option, value in zip(cell.words, cell.words[1:], strict=False):
        if option == "-c":
            told.update(Path(value).read_bytes())
    return told.hexdigest()


def _definitions() -> str:
    return "means over the runs that trained, else over all; " + "; ".join(
        f"{name}: {said}" for name, said in FAILURES.items()
    )


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
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


def compare(words: Sequence[str]) -> int:
    """Carry out `stabilize compare`."""
    parser = Parser("compare", ABOUT)
    parser.add_argument("study", type=Path, help="a file as in configs/studies")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the study's folder (default: studies/NAME, after the file)")
    parser.add_argument("--dry-run", action="store_true", help="show what would be run, and run nothing")
    chosen = parser.parse_args(list(words))
    for name in ("jobs", "threads"):
        if getattr(chosen, name) < 1:
            raise UserError(f"--{name} is {getattr(chosen, name)}; 1 is the least that will do")
    study = study_of(chosen.study)
    paths = dict(zip(study.strategies, paths_of(study.strategies).values(), strict=True))
    folder: Path = chosen.out or Path("studies") / chosen.study.stem
    cells = studies.cells(study, paths)
    check(cells)
    if chosen.dry_run:
        comparison = Comparison(folder, cells, chosen.jobs, chosen.threads)
        for cell in comparison.left:
            print(comparison.command(cell))
        known = comparison.seconds_left
        cost = "" if known is None else f", about {known / 60:.0f} min"
        print(f"{len(comparison.left)} of {len(comparison.cells)} runs are left{cost}")
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be made: {error.strerror}; --out names another") from error
    with alone(folder):
        comparison = Comparison(folder, cells, chosen.jobs, chosen.threads)
        try:
            comparison.carry_out()
        except KeyboardInterrupt:
            print(f"ended; the same command goes on with the {len(comparison.left)} runs that are left", flush=True)
            raise
        comparison.write()
    Console().print(comparison.table(study.question))
    print(f"wrote {folder}: results.csv, costs.csv, cells")
    if comparison.without:
        said = "; ".join(f"{name}: {why.removeprefix('error: ')}" for name, why in comparison.without.items())
        raise UserError(f"{len(comparison.without)} runs have no result ({said}); the same command runs them again")
    return 0
