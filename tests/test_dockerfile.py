"""The Dockerfile: linted, and its RUN lines run in a fresh environment, since tests have no Docker engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest

from tests.checkout import ROOT

DOCKERFILE = ROOT / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, rest of the line), comments left out and continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined if line.strip())]


def ignored() -> list[str]:
    return [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split()]


def index_of_torch(python: Path) -> str:
    """PyTorch's own index, as the Dockerfile names it; where that is out of reach, the one where this machine's pip
    looks."""
    (default,) = (rest.partition("=")[2] for name, rest in instructions() if name == "ARG")
    try:
        urllib.request.urlopen(f"{default}/torch/", timeout=20).close()
    except OSError:
        return index_of_pip(python)
    return default


def index_of_pip(python: Path) -> str:
    constant = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    for command in (["-m", "pip", "config", "get", "global.index-url"], ["-c", constant]):
        found = subprocess.run([python, *command], capture_output=True, text=True)
        if found.returncode == 0:
            break
    return found.stdout.strip()


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    linted = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_the_image_starts_the_command_as_an_ordinary_user() -> None:
    last = dict(instructions())
    assert last["USER"] not in ("0", "root")
    assert last["ENTRYPOINT"] == '["stabilize"]'


def test_dependencies_are_installed_before_the_source_is_copied() -> None:
    copied = instructions().index(("COPY", ". ."))
    installs = [number for number, (_, line) in enumerate(instructions()) if "pip install" in line]
    assert len([number for number in installs if number < copied]) == 2
    assert all("--no-deps" in instructions()[number][1] for number in installs if number > copied)


@pytest.mark.soak
def test_its_lines_make_an_environment_in_which_the_command_runs(tmp_path: Path) -> None:
    """Each line is carried out as written, except that paths and the user's entry lie under a folder of the test's."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "usr"], check=True)
    for name in ("passwd", "group", "shadow", "gshadow"):
        (tmp_path / "etc").mkdir(exist_ok=True)
        (tmp_path / "etc" / name).touch()
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
        "PATH": f"{tmp_path / 'usr' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "TORCH_INDEX": os.environ.get("TORCH_INDEX") or index_of_torch(tmp_path / "usr" / "bin" / "python"),
    }
    folder = tmp_path

    def carry_out(command: str | list[str]) -> str:
        result = subprocess.run(
            command, shell=isinstance(command, str), cwd=folder, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout

    for name, rest in instructions():
        if name == "ENV":
            environment |= dict(pair.split("=", 1) for pair in rest.split())
        elif name == "WORKDIR":
            folder = tmp_path / rest.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif (name, rest) == ("COPY", ". ."):
            leave_out = shutil.ignore_patterns(*ignored())
            shutil.copytree(ROOT, folder, symlinks=True, dirs_exist_ok=True, ignore=leave_out)
        elif name == "COPY":
            shutil.copy(ROOT / rest.split()[0], folder)
        elif name == "RUN":
            carry_out(rest.replace("useradd ", f"useradd --prefix {tmp_path} "))
        else:
            assert name in ("FROM", "ARG", "USER", "ENTRYPOINT", "CMD"), f"this test does not know {name}"

    assert "fit" in carry_out(["stabilize", "--help"])
    assert "nvidia" not in carry_out(["pip", "list"])
    assert (tmp_path / "etc" / "passwd").read_text().startswith("stabilize:x:1000:")
