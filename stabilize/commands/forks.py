"""Command lines of `stabilize` carried out in processes that are forked from one which has imported what they need.

Imports take five seconds of one core, a third of a short run. Nothing else is done in that process before the fork.
What keeps things of its own from its import on is left to each fork: all would have the same folder for the media of
W&B, and the first to end would delete it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path

HEAVY = ["stabilize.task", "stabilize.data", "stabilize.callbacks"]
"""Modules with most of what a training imports, and without wandb."""

FOUND_IN = [*sys.path]
"""Where modules are found, before a command adds the folders of its plug-ins."""

LOST = 255
"""Exit code of a fork whose parent, from which one learns how it ended, is gone."""

PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


class Fork:
    """`python -m stabilize WORDS`, beside this process and ended with it.

    Args:
        words: of the command line.
        environment: its variables.
        log: the file for what it prints.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.memory = 0
        """Most bytes that it has held, as far as was seen by `poll`."""
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(HEAVY)
        self._process = processes.Process(target=_carry_out, args=(list(words), dict(environment), FOUND_IN, str(log)))
        log.touch()
        self._process.start()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; none while it runs."""
        with contextlib.suppress(OSError):  # it has ended
            held = PEAK.search(Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii"))
            if held:
                self.memory = max(self.memory, int(held[1]) * 2**10)
        return self._process.exitcode

    @staticmethod
    def wait(forks: Sequence[Fork], seconds: float) -> None:
        """Sleep until one of them has ended, but no longer than so many seconds."""
        connection.wait([fork._process.sentinel for fork in forks], seconds)

    def kill(self) -> None:
        """End it at once, and wait for its end."""
        self._process.kill()
        self._process.join()


def _carry_out(words: list[str], environment: dict[str, str], found_in: list[str], log: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    place = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(place, sys.stdout.fileno())
    os.dup2(place, sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = found_in
    sys.argv = ["stabilize", *words]
    try:
        runpy.run_module("stabilize", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing leaves out


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
