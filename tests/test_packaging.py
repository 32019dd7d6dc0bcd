"""What an installation holds: the wheel's list of files, the link that makes callbacks public, the licence."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import checkout
from tests.checkout import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built with the setuptools that is installed here."""
    source = checkout.copy_to(tmp_path_factory.mktemp("checkout"))
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("stabilize_nmt-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_module_once_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    modules = {name for name in checkout.files() if name.startswith("stabilize/") and name.endswith(".py")}
    modules |= {f"stabilize/{name}" for name in checkout.files() if name.startswith("callbacks/")}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == modules
    assert {"stabilize/callbacks/__init__.py", "stabilize/strategies/placement.py"} <= packed


def test_the_wheel_brings_command_and_licence(wheel: zipfile.ZipFile) -> None:
    metadata = {name.partition(".dist-info/")[2]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "stabilize = stabilize.cli:main" in wheel.read(metadata["entry_points.txt"]).decode().splitlines()
    assert wheel.read(metadata["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    assert "License-Expression: Apache-2.0" in wheel.read(metadata["METADATA"]).decode().splitlines()


def test_callbacks_is_a_committed_link() -> None:
    assert "stabilize/callbacks" in checkout.files()  # git lists what a link leads to only if it is no link
    assert (ROOT / "stabilize" / "callbacks").readlink() == Path("../callbacks")


def test_the_public_name_is_stabilize_callbacks() -> None:
    import stabilize.callbacks

    assert Path(stabilize.callbacks.__file__).resolve() == ROOT / "callbacks" / "__init__.py"
