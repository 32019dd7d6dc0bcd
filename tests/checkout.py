"""The checkout as git sees it, for the tests that look at the project's own files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def files() -> list[str]:
    """Paths of all files that are committed or would be, relative to the checkout; skips outside of a git checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("this is no git checkout")
    return sorted(name for name in listing.stdout.split("\0") if name and (ROOT / name).exists())


def copy_to(folder: Path) -> Path:
    """Copy those files to ``folder``, links as links, so that what a build leaves behind stays out of the checkout."""
    for name in files():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy, follow_symlinks=False)
    return folder
