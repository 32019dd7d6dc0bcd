"""The answers that are shipped follow from the results beside them, which are of the studies as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from stabilize.commands.compare import plan, results_of, study_of
from stabilize.commands.comparison import Comparison, read_csv
from stabilize.study.results import markdown
from tests.checkout import ROOT

STUDIES = ROOT / "configs" / "studies"
ANSWERS = sorted(path.parent for path in STUDIES.glob("answers/*/results.csv"))


@pytest.mark.parametrize("folder", ANSWERS, ids=lambda folder: folder.name)
def test_the_answer_follows_from_the_results(folder: Path) -> None:
    study, rows = study_of(STUDIES / f"{folder.name}.yaml"), read_csv(folder / "results.csv")
    answer = markdown(results_of(study, rows, read_csv(folder / "significance.csv")))
    assert answer == (folder / "answer.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", ANSWERS, ids=lambda folder: folder.name)
def test_the_results_are_those_of_the_study_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run, with the command and the configs that it has now: else `Comparison` refuses the folder."""
    monkeypatch.chdir(ROOT)
    path = Path("configs/studies") / f"{folder.name}.yaml"
    comparison = Comparison(folder, plan(path, study_of(path), threads=1), jobs=1)
    assert not comparison.left
    assert comparison.rows == read_csv(folder / "results.csv")
