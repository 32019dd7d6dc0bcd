"""An end to what takes too long."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

LIMIT = 60
"""Seconds of a processor; ten times as many of the clock, on a machine that has other work too."""


class HangError(BaseException):
    """What was to end does not."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise HangError in what takes longer than the limit."""

    def stop(*_: Any) -> None:
        raise HangError

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGALRM, signal.SIGPROF)]
    signal.alarm(10 * LIMIT)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before:
            signal.signal(number, handler)
