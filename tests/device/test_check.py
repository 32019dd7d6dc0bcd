"""The GPU's script runs to its end on a CPU, and counts what torch counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stabilize.strategies import PreNorm, Stabilizer
from tests.device import check


def test_it_runs_on_a_cpu_and_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "found" / "cpu.json"
    assert check.main(["--device", "cpu", "--quick", "--out", str(place)]) == 0, capsys.readouterr().err
    report = json.loads(place.read_text())
    sections = report["sections"]
    assert report["holds"]
    assert report["versions"]["torch"] == torch.__version__
    assert sections.keys() == check.SECTIONS.keys()
    assert {name for name, section in sections.items() if "skipped" in section} == {
        *("compiled", "training_compiled", "no_waiting"),
    }
    assert sections["training"]["target_tokens_per_second"][0] > 0
    assert sections["callbacks"]["with_over_without"][0] > 0


def test_a_section_that_does_not_hold_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(place: check.Place) -> check.Report:
        raise RuntimeError("no such kernel")

    sections = {"broken": broken, "off": lambda place: check.held({"error": 0.2}, error=0.1)}
    monkeypatch.setattr(check, "SECTIONS", sections)
    assert check.main(["--device", "cpu", "--quick", "--out", str(tmp_path / "cpu.json")]) == 1
    found = json.loads((tmp_path / "cpu.json").read_text())["sections"]
    assert found["broken"]["failed"] == "RuntimeError: no such kernel"
    assert found["off"]["holds"] is False
    assert "something does not hold" in capsys.readouterr().out


def test_operations_are_those_that_torch_counts() -> None:
    scale = check.SMALL
    model = check.task_of(scale, Stabilizer(PreNorm()), dropout=0.0, attention_dropout=0.1).train().model
    (batch,) = check.batches(scale, 1)
    with FlopCounterMode(display=False) as counted:
        model.project(model(batch.source, batch.target[:, :-1]))
    # Backward twice as many; what is computed again there is no part of the model. On a CPU attention fills keys up,
    # which torch counts, and adds one product in place, which it does not.
    assert 3 * counted.get_total_flops() == pytest.approx(check.flops(scale, [batch]), rel=0.02)
