"""What a run says by itself, as soon as it happens, and at its end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from stabilize.commands.narrator import Narrator
from stabilize.commands.results import results, words
from stabilize.findings import Diary

VANISHING = {"gradient_ratio/decoder/layer_001": 1e-5, "gradient_norm/decoder/layer_012": 1.0}


def test_a_finding_is_said_once_and_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrator = Narrator(tmp_path)
    narrator.log_metrics({"train/loss": 5.0}, step=9)
    assert capsys.readouterr().out == ""
    narrator.log_metrics(VANISHING, step=49)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "update 50: decoder layer 1 receives 1e-5 of the gradient of layer 12: vanishing; B2T (arXiv"
    )
    narrator.log_metrics(VANISHING, step=99)
    assert capsys.readouterr().out == ""


def test_the_summary_is_kept_up_to_date_in_the_folder_and_beside(tmp_path: Path) -> None:
    narrator = Narrator(tmp_path / "run")
    narrator.know([], "nrefs:1|tok:13a", entropy=5.5)
    narrator.log_metrics({"val/bleu": 20.0}, step=99)
    narrator.log_metrics({"val/bleu": 10.0}, step=199)
    narrator.log_metrics(VANISHING, step=249)
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written == narrator.summary
    assert written["best/val_bleu"] == 20.0
    assert written["best/val_bleu_update"] == 100
    assert written["best/bleu_signature"] == "nrefs:1|tok:13a"
    assert written["stability/verdict"] == "vanishing (decoder)"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["summary.json"]


def test_a_jump_is_said_by_the_spike_guard_and_again_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrator = Narrator(tmp_path)
    narrator.log_metrics({"stability/spikes": 2.0, "stability/diverged": 0.0}, step=19)
    assert capsys.readouterr().out == ""
    console = Console(width=200)
    with console.capture() as caught:
        console.print(*words(narrator.diary))
    assert "since update 20: the loss or the gradient norm jumped at 2 updates; model.clipping: ZClip" in caught.get()


def test_the_table_at_the_end_has_the_words(tmp_path: Path) -> None:
    narrator = Narrator(tmp_path)
    narrator.log_metrics(VANISHING, step=49)
    trainer = SimpleNamespace(
        callbacks=[], loggers=[narrator], lightning_module=None, default_root_dir=str(tmp_path), is_global_zero=True
    )
    console = Console(width=200)
    with console.capture() as caught:
        console.print(results(cast(Any, trainer), {}))
    said = caught.get()
    assert "verdict: vanishing (decoder)" in said
    assert "since update 50: decoder layer 1 receives 1e-5 of the gradient of layer 12: vanishing; B2T" in said
    assert "summary.json" in said


def test_a_healthy_run_has_a_verdict_alone() -> None:
    diary = Diary()
    diary.add(50, {"gradient_ratio/decoder/layer_001": 0.8})
    assert [str(line) for line in words(diary)] == ["verdict: healthy"]
