"""`stabilize bench decode`: what is counted, and what is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stabilize.cli import main
from stabilize.commands.bench.decode import Translated, _rows
from stabilize.decoding import BeamSearch


def test_each_config_has_both_searches(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "same.yaml").write_text("model: {samples: 1}\n")
    words = ["--rounds", "2", "--sentences", "2", "--json", "found.json", "--model.search.maximum_ratio", "0.5"]
    words += ["--against", "same.yaml", "post_ln", "--model.search.beam", "3"]
    assert main(["bench", "decode", "-c", "tiny.yaml", *words]) == 0
    assert "new weights: most translations end at the length limit" in capsys.readouterr().out
    found = json.loads((here / "found.json").read_text())
    assert found["sentences"] == 2
    rows = {row["name"]: row for row in found["rows"]}
    assert [*rows] == [f"{name}, beam {beam}" for name in ("tiny", "same", "post_ln") for beam in (1, 3)]
    for name, row in rows.items():
        assert row["tokens_per_second"]["median"] > row["sentences_per_second"]["median"] > 0
        first = rows[f"tiny, {name.partition(', ')[2]}"]["sentences_per_second"]["rounds"]
        by_round = [mine / its for mine, its in zip(row["sentences_per_second"]["rounds"], first, strict=True)]
        assert row["ratio"]["rounds"] == pytest.approx(by_round)
    assert rows["same, beam 1"]["same_texts"] == rows["same, beam 3"]["same_texts"] == 1.0
    assert sorted(path.name for path in here.iterdir()) == ["found.json", "same.yaml", "tiny.yaml"]


def test_a_greedy_config_has_one_row_and_a_checkpoint_its_weights(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", "--checkpoint.dirpath", "kept"]
    assert main(["fit", "-c", "tiny.yaml", *fitted]) == 0
    saved = sorted((here / "kept").glob("*.ckpt"))[0]
    searched = []
    search = BeamSearch.__call__
    monkeypatch.setattr(
        BeamSearch, "__call__", lambda self, model, source: searched.append(model) or search(self, model, source)
    )
    words = ["--rounds", "1", "--ckpt_path", str(saved), "--model.search.beam", "1"]
    assert main(["bench", "decode", "-c", "tiny.yaml", *words]) == 0
    shown = capsys.readouterr().out
    assert "beam 1" in shown
    assert "new weights" not in shown
    state = torch.load(saved, weights_only=True)["state_dict"]
    assert all(torch.equal(state[f"model.{name}"], weight) for name, weight in searched[-1].named_parameters())


def test_rows_add_up() -> None:
    """Two sentences in one and two seconds; the other config takes twice as long and says one of them otherwise."""
    one = [Translated(1.0, 2.0, 10, 1, ("a", "b")), Translated(2.0, 2.0, 10, 1, ("a", "b"))]
    other = [Translated(2.0, 2.0, 12, 0, ("a", "c")), Translated(4.0, 2.0, 12, 0, ("a", "c"))]
    first, second = _rows({"one": one, "other": other}, {"one": "beam 1", "other": "beam 1"})
    assert first["sentences_per_second"].rounds == [2.0, 1.0]
    assert first["tokens_per_second"].rounds == [10.0, 5.0]
    assert (first["tokens_per_sentence"], first["truncated"], first["same_texts"]) == (5.0, 0.5, 1.0)
    assert second["ratio"].rounds == [0.5, 0.5]
    assert (second["truncated"], second["same_texts"]) == (0.0, 0.5)
