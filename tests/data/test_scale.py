"""Two million pairs: what preparation, opening, the first batch and workers cost; with -s its figures are printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT


def measured(*words: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.data.scale", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.soak
def test_two_million_pairs(tmp_path: Path) -> None:
    measured("make", tmp_path, 2_000_000)
    found = {step: measured(step, tmp_path) for step in ("text", "tokenizer", "ids")}
    alone = measured("sentencepiece", tmp_path)
    opened = {workers: measured("open", tmp_path, workers) for workers in (0, 1, 4)}
    print(json.dumps({"prepared": found, "SentencePiece alone": alone, "opened": opened}, indent=2))
    for step in ("text", "ids"):
        assert found[step]["peak"] - found[step]["before"] < 500
    assert found["tokenizer"]["peak"] < 2500
    assert found["ids"]["seconds"] < 1.5 * alone["seconds"]
    for each in opened.values():
        assert each["open"] < 1
        assert each["first batch"] < 2
    assert opened[4]["resident"] < 1.5 * opened[1]["resident"]
