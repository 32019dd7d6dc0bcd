"""Where prepared text is kept between runs, under names that are made of its content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import filelock

from stabilize.data.files import read_lines
from stabilize.errors import UserError

FOLDER: Final = "STABILIZE_CACHE"
"""Environment variable that names the folder where no config does."""

FRESH: Final = 2.0
"""Seconds: a file that was written so lately may be written again without a new time stamp."""


class Cache:
    """A folder of files and folders that are there whole or not at all, each made once, by one process.

    Args:
        folder: none: what `STABILIZE_CACHE` says, or `~/.cache/stabilize`.
    """

    def __init__(self, folder: str | None = None) -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stabilize"
        self.folder = Path(folder or os.environ.get(FOLDER) or home).expanduser()

    def made(self, name: str, make: Callable[[Path], None]) -> Path:
        """The file or folder of a name; where it is not there yet, it is made, while other processes wait for it.

        Args:
            make: is given a path beside it, perhaps with what a killed process left there; takes the name when whole.

        Raises:
            UserError: the folder cannot be written to.
        """
        path = self.folder / name
        if path.exists():
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(f"{path}.lock")
            try:
                lock.acquire(timeout=0.1)
            except filelock.Timeout:
                print(f"waits for another process, which prepares {path}", file=sys.stderr, flush=True)
                lock.acquire()
            try:
                if not path.exists():
                    part = path.with_name(f"{path.name}.part")
                    make(part)
                    part.rename(path)
            finally:
                lock.release()
        except OSError as error:
            raise UserError(
                f"prepared text cannot be kept in {self.folder}: {error.strerror or error}; data.cache, or the"
                f" environment variable {FOLDER}, names another folder"
            ) from error
        return path

    def hash_of(self, file: str) -> str:
        """SHA-256 of a file's bytes; one that has not changed since is not read again.

        Raises:
            UserError: it cannot be read.
        """

        def find() -> str:
            with open(file, "rb") as opened:
                return hashlib.file_digest(opened, "sha256").hexdigest()

        return self._known(file, "sha256", find)

    def lines_of(self, file: str) -> int:
        """Number of lines of a text file; one that has not changed since is not read again.

        Raises:
            UserError: see `stabilize.data.files.read_lines`.
        """
        return self._known(file, "lines", lambda: sum(1 for _ in read_lines(file)))

    def _known(self, file: str, fact: str, find: Callable[[], Any]) -> Any:
        try:
            stat = os.stat(file)
            seen = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            stamp = self.folder / "files" / f"{key(os.path.realpath(file))}.json"
            known = json.loads(stamp.read_text()) if stamp.exists() else {}
            if known.get("seen") != seen:
                known = {"file": os.path.realpath(file), "seen": seen}
            if fact in known:
                return known[fact]
            known[fact] = find()
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}: give a text file, plain or gzip") from error
        if time.time() - max(stat.st_mtime, stat.st_ctime) > FRESH:
            with contextlib.suppress(OSError):  # then it is read again next time
                write(stamp, known)
        return known[fact]


def key(facts: Any) -> str:
    """A short name that other facts do not have."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def write(path: Path, facts: Any) -> None:
    """Write JSON at once, so that no reader sees a half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(json.dumps(facts), encoding="utf-8")
    new.replace(path)


def cleared(folder: Path) -> None:
    """Make an empty folder, in place of what a killed process left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
