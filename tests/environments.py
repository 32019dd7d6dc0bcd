"""Virtual environments for tests: nothing of their own at first, but everything that is installed here."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def make(folder: Path) -> Path:
    """Make an environment that falls back on the packages installed here, pip too; the folder of its commands."""
    made(sys.executable, "-m", "venv", "--without-pip", str(folder))
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "installed_here.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder / "bin"


def made(*command: str) -> None:
    """Run a command that has to work."""
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
