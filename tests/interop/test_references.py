"""The same weights in other packages' code give the same numbers: pytest -m interop.

Each package gets an environment of its own, made once below .pytest_cache, which finds everything else installed here.
`with_PACKAGE.py` holds the comparisons: tests that a pytest of that environment runs.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import environments
from tests.checkout import ROOT

PACKAGES = {
    "admin_torch": ["--no-deps", "admin-torch==0.1.0"],
    "export": ["transformers==5.24.0", "ctranslate2==4.8.5", "safetensors==0.8.0"],
    "hyper_connections": ["hyper-connections==0.4.11"],
    "timm": ["--no-deps", "timm==1.0.31"],  # torchvision, which it asks for, is built for one build of torch
    "torchscale": ["--no-deps", "torchscale==0.3.0", "fairscale==0.4.13", "timm==0.6.13", "einops==0.8.2"],
    "transformers": ["transformers==5.24.0"],
    "x_transformers": ["x-transformers==2.31.10"],
}
"""What pip installs for each."""


def python_with(requirements: list[str], folder: Path) -> Path:
    """The Python of an environment with these packages; skips where they cannot be fetched."""
    python, finished = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(requirements)
    if not finished.exists() or finished.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        environments.make(folder)
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-build-isolation", *requirements]
        installed = subprocess.run(command, capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"{' '.join(requirements)} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
        finished.write_text(wanted)
    return python


@pytest.mark.interop
@pytest.mark.parametrize("package", PACKAGES)
def test_it_computes_the_same(package: str, pytestconfig: pytest.Config) -> None:
    python = python_with(PACKAGES[package], pytestconfig.cache.mkdir("interop") / package)
    options = ["-s", "-m", "", "-n", "0", "-p", "no:cacheprovider", "-W", "default"]
    command = [str(python), "-m", "pytest", *options, f"tests/interop/with_{package}.py"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_comparison_has_its_package() -> None:
    assert {path.stem for path in Path(__file__).parent.glob("with_*.py")} == {f"with_{name}" for name in PACKAGES}
