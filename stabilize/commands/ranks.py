"""A process of several ends when another has died."""

from __future__ import annotations

import os
import sys
import threading
import time

LOOKED_FOR_EVERY = 5.0
"""Seconds between two looks at the process that started this one."""

LOST = "another process of this run has died, and what it said, if anything, stands above; --ckpt_path last goes on"


def end_with_the_first() -> None:
    """Let this rank end soon after the process that started it.

    Lightning's launcher watches the ranks that it has started, but nobody watches the first one, for which a product
    over several GPUs would wait until its timeout.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOKED_FOR_EVERY)
        print(f"error: {LOST}", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def is_loss_of_another(error: RuntimeError) -> bool:
    """Whether this is how gloo or NCCL say that another process is gone."""
    told = str(error)
    return any(library in told for library in ("gloo", "NCCL")) and any(
        words in told.lower() for words in ("closed by peer", "reset by peer", "remote process", "timed out")
    )
