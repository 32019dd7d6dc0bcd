"""Two million pairs: what preparation, opening, the first batch and workers cost.

pytest -m soak -n 0 -s tests/data/test_scale.py        prints the figures, and nothing else should run meanwhile
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT

PAIRS = {"few": 10_000, "many": 2_000_000}


def measured(*words: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.data.scale", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.soak
def test_two_million_pairs(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    prepared = {}
    for folder in (few, many):
        folder.mkdir()
        measured("make", folder, PAIRS[folder.name])
        prepared = {step: measured(step, folder) for step in ("text", "tokenizer", "ids")}
    alone = measured("sentencepiece", many)
    opened = {workers: measured("open", many, workers) for workers in (0, 1, 4)}
    opened_few = measured("open", few, 0)
    figures = {"prepared": prepared, "SentencePiece alone": alone, "opened": opened, "few opened": opened_few}
    print(json.dumps(figures, indent=2))
    seconds = " + ".join(f"{step['seconds']:.0f}" for step in prepared.values())
    print(
        f"{PAIRS['many']:,} pairs: prepared in {seconds} seconds (text, tokenizer, ids),"
        f" at most {max(step['peak'] for step in prepared.values()):,.0f} MiB of memory;"
        f" opened in {opened[0]['open']:.2f} seconds ({PAIRS['few']:,} pairs: {opened_few['open']:.2f}),"
        f" first batch after {max(each['first batch'] for each in opened.values()):.2f} more;"
        f" {opened[1]['resident']:,.0f} MiB with one worker, {opened[4]['resident']:,.0f} with four"
    )
    for step in ("text", "ids"):
        assert prepared[step]["peak"] - prepared[step]["before"] < 500
    assert prepared["tokenizer"]["peak"] < 2500
    assert prepared["ids"]["seconds"] < 1.5 * alone["seconds"]
    for each in opened.values():
        assert each["open"] < 1
        assert each["first batch"] < 2
    assert opened[0]["open"] < 2 * opened_few["open"] + 0.1, "it costs the same for few and for many"
    assert opened[4]["resident"] < 1.5 * opened[1]["resident"]
