"""What a benchmark found, as a file and with the machine that it holds for."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stabilize.errors import UserError


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, versions, and how many processes wanted a core in the last minute."""
    names = [line for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": cores,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
    }


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def check_place(path: Path | None) -> None:
    """See that a record can be written, before anything is measured.

    Raises:
        UserError: it cannot.
    """
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise UserError(f"json is {path}, which cannot be a file; one in a folder that is there would do")


def write(path: Path | None, topic: str, rows: Sequence[Mapping[str, Any]], **about: Any) -> None:
    """Write rows as JSON, with what they are about, and say where; nothing without a path.

    What has rounds, a `Spread` or its like, becomes what its `plain` says: of the rounds together, and of each.
    """
    if path is None:
        return
    record = {
        "topic": topic,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": machine(),
        **{name: _plain(value) for name, value in about.items()},
        "rows": [{name: _plain(value) for name, value in row.items()} for row in rows],
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def _plain(value: Any) -> Any:
    return value.plain() if hasattr(value, "plain") else value
