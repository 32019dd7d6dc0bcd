"""Command 1 of the README in an empty environment: install, train the quickstart, read the score."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import checkout
from tests.test_readme import README, blocks


@pytest.mark.soak
def test_command_one(tmp_path: Path) -> None:
    """The lines as they stand, but for the choice of another index for torch, and in a copy of the checkout."""
    mark = f"by tests/test_installation.py::{test_command_one.__name__}"
    scripts = [block.script for block in blocks(README.read_text(encoding="utf-8")) if block.mark == mark]
    script = re.sub(r"^pip install 'torch.* --index-url.*\n", "", "".join(scripts), flags=re.M)
    assert "pip install" in script
    assert "stabilize fit -c configs/quickstart.yaml" in script
    path = f"{Path(sys.base_prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=checkout.copy_to(tmp_path / "checkout"),
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    scores = dict(re.findall(r"test/(bleu\w*) +([\d.]+)", result.stdout))
    assert float(scores["bleu"]) > 80
    assert max(float(scores["bleu_word_by_word"]), float(scores["bleu_nearest_neighbour"])) < 35
    assert "run folder: " in result.stdout.splitlines()[-1]
    (run,) = (tmp_path / "checkout" / "runs").iterdir()
    assert {"config.yaml", "checkpoints", "metrics.csv", "figures", "wandb"} <= {path.name for path in run.iterdir()}
