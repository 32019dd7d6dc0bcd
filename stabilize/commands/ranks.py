"""The processes of a run end when one of them has died."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from subprocess import Popen
from typing import Any

LOOKED_FOR_EVERY = 5.0
"""Seconds between two looks at another process."""

TIME_TO_END = 30.0
"""Seconds that the first process has to find by itself that another is gone, and to say what else it knows."""

LOST = "another process of this run has died, and what it said, if anything, stands above; --ckpt_path last goes on"


class Watch:
    """Looks after the other processes while this one trains, for a product over several GPUs would wait for a dead one
    until its timeout."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def over(self) -> None:
        """Look no more: this process ends by itself, sooner or later than others."""
        self._over.set()

    def first(self) -> None:
        """Let this rank end soon after the process that started it, which nobody else watches."""
        parent = os.getppid()

        def watch() -> None:
            while os.getppid() == parent:
                if self._over.wait(LOOKED_FOR_EVERY):
                    return
            _end()

        threading.Thread(target=watch, daemon=True).start()

    def others(self, child_processes: Sequence[Popen[Any]]) -> None:
        """Let the first process, and all that it has started, end some time after one of them has failed.

        Lightning's own launcher would kill them at once, whatever they are writing or about to say.
        """

        def watch() -> None:
            while not any(process.poll() for process in child_processes):
                if self._over.wait(LOOKED_FOR_EVERY):
                    return
            if not self._over.wait(TIME_TO_END):
                _end(child_processes)

        threading.Thread(target=watch, daemon=True).start()


def _end(processes: Sequence[Popen[Any]] = ()) -> None:
    print(f"error: {LOST}", file=sys.stderr, flush=True)
    for process in processes:
        process.kill()
    os._exit(2)


def is_loss_of_another(error: RuntimeError) -> bool:
    """Whether this is how gloo or NCCL say that another process is gone."""
    told = str(error)
    return any(library in told for library in ("gloo", "NCCL")) and any(
        words in told.lower() for words in ("closed by peer", "reset by peer", "remote process", "timed out")
    )
