"""`stabilize bench startup`: how soon the command answers, and training begins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from stabilize.commands.bench import record
from stabilize.commands.bench.rounds import Spread, interleaved
from stabilize.commands.words import Parser
from stabilize.errors import UserError, at_least

ABOUT = """Measure how soon `stabilize --help`, `stabilize strategies` and the first update of `stabilize fit` are
there, each time in a process of its own, beside what importing torch, and lightning with wandb, takes. The first round
is not counted: in it the corpus is prepared, and files are read from the disk. Options of fit, such as -c CONFIG, are
passed on to it."""

IMPORTS = {"import torch": "import torch", "import lightning, wandb": "import lightning, wandb"}
"""What any program with these libraries waits for."""

HELP, MENU, FIT = "stabilize --help", "stabilize strategies", "stabilize fit"

STAMP = "first update at "
"""What a fit that is measured prints, and behind it the system's monotonic clock, which is one for all processes."""

FIRST_UPDATE = f"""
import os, sys, time
from stabilize.cli import main
from stabilize.task import TranslationTask

step = TranslationTask.optimizer_step

def timed(*arguments, **options):
    step(*arguments, **options)
    print("{STAMP}" + str(time.monotonic()), flush=True)
    os._exit(0)

TranslationTask.optimizer_step = timed
sys.exit(main())
"""
"""`stabilize`, ended by the first update of fit."""


def limits(seconds: Mapping[str, float]) -> dict[str, float]:
    """The most seconds that each answer may take on a machine where the imports take what they take."""
    first_update = 1.5 * seconds["import lightning, wandb"] + 3.0
    of_all = {HELP: 0.7, MENU: seconds["import torch"] + 1.0}
    return of_all | {name: first_update for name in seconds if name.startswith(FIT)}


def seconds_of(words: Sequence[str]) -> float:
    """From the start of a Python process to its end, or to the first update where that ends it.

    Raises:
        UserError: the process fails.
    """
    with tempfile.TemporaryFile("w+") as output:  # a pipe would be open as long as what W&B leaves behind
        start = time.monotonic()
        code = subprocess.run([sys.executable, *words], stdout=output, stderr=subprocess.STDOUT).returncode
        end = time.monotonic()
        output.seek(0)
        printed = output.read()
    stamped = re.search(rf"^{STAMP}([\d.]+)$", printed, re.MULTILINE)
    if code or (FIRST_UPDATE in words and stamped is None):
        last = printed.strip().splitlines()[-1:] or [f"it ends with code {code} and says nothing"]
        raise UserError(f"bench startup cannot measure {words[-1]}: {last[0].removeprefix('error: ')}")
    return float(stamped[1]) - start if stamped else end - start


def measure(words: Sequence[str]) -> int:
    """Carry out `stabilize bench startup`."""
    parser = Parser("bench startup", ABOUT)
    parser.add_argument("--rounds", type=int, default=5, help="that are counted (default: %(default)s)")
    parser.add_argument("--against", nargs="+", default=[], type=Path, help="configs, each laid over the first ones")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    chosen, given = parser.parse_known_args(words)
    at_least("bench", rounds=(chosen.rounds, 1))
    record.check_place(chosen.json)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        commands: dict[str, list[str]] = {name: ["-c", code] for name, code in IMPORTS.items()}
        commands |= {HELP: ["-m", "stabilize", "--help"], MENU: ["-m", "stabilize", "strategies"]}
        for name, more in {FIT: [], **{f"{FIT}, {path.stem}": ["-c", str(path)] for path in chosen.against}}.items():
            own = ["--trainer.default_root_dir", folder]
            commands[name] = ["-c", FIRST_UPDATE, "fit", *given, *more, *own]
        turns: dict[str, Callable[[], float]] = {
            name: lambda command=command: seconds_of(command)  # type: ignore[misc]
            for name, command in commands.items()
        }
        with Console().status(f"{chosen.rounds + 1} rounds of {len(turns)} processes"):
            found = {name: Spread(times[1:]) for name, times in interleaved(turns, chosen.rounds + 1).items()}
    most = limits({name: spread.median for name, spread in found.items()})
    first = found[FIT]
    rows: list[dict[str, Any]] = [
        {"name": name, "seconds": spread, "limit": most.get(name)}
        | ({"ratio": spread.over(first)} if name.startswith(FIT) else {})
        for name, spread in found.items()
    ]
    Console().print(_shown(rows))
    record.write(chosen.json, "startup", rows, rounds=chosen.rounds, threads=os.environ.get("OMP_NUM_THREADS"))
    return 0


def _shown(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table(box=box.SIMPLE)
    for heading in ("", "seconds, median (least to greatest)", "at most", "kept"):
        shown.add_column(heading)
    for row in rows:
        limit, seconds = row["limit"], row["seconds"]
        kept = [] if limit is None else [f"{limit:.2f}", "yes" if seconds.median <= limit else "no"]
        shown.add_row(row["name"], seconds.shown(".2f"), *kept)
    return shown
