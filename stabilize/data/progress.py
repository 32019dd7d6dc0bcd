"""Progress of long work in a terminal, and in a log file a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS = 20
"""Between two lines of a log file."""


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show how many pairs are done while work goes on; the work calls what it is given with each number of new ones.

    Args:
        what: is done, as "tokenise".
        total: how many pairs there are, if that is known.
    """
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
        return
    done, told = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, told
        done += count
        if time.monotonic() - told > SECONDS:
            told = time.monotonic()
            print(f"{what}: {done:,}{f' of {total:,}' if total else ''} pairs", file=sys.stderr, flush=True)

    yield advance
