"""Studies: their runs, what became of them, and how they are counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from stabilize.errors import UserError
from stabilize.findings import findings
from stabilize.report.run_folder import Run
from stabilize.study import NUMBERS, Study, cells, interval, lines, numbers, outcome

PATHS = {"a": Path("a.yaml"), "b": Path("b.yaml")}


def study(**given: Any) -> Study:
    return Study(**{"question": "?", "configs": ["base.yaml"], "strategies": ["a", "b"]} | given)


def test_every_point_of_the_grid_is_a_run() -> None:
    found = cells(
        study(seeds=[1, 2], depths=[3, 6], grid={"model.optimizer.init_args.lr": [1e-3, 0.002]}, settings={"x": True}),
        PATHS,
    )
    assert len({cell.name for cell in found}) == len(found) == 2 * 2 * 2 * 2
    assert [cell.values["seed"] for cell in found] == ["1"] * 8 + ["2"] * 8
    first = found[0]
    assert first.name == "a-depth=3-lr=0.001-seed=1"
    assert first.words == (
        *("-c", "base.yaml", "-c", "a.yaml", "--model.encoder_layers=3", "--model.decoder_layers=3", "--x=true"),
        *("--model.optimizer.init_args.lr=0.001", "--seed_everything=1"),
    )


def test_what_is_special_to_a_strategy_is_for_its_runs_alone() -> None:
    one, other = cells(study(settings={"k": 1}, special={"b": {"k": 2, "l": [1, 2]}}), PATHS)
    assert "--k=1" in one.words
    assert one.words[-1] == "--seed_everything=1"
    assert {"--k=2", "--l=[1, 2]"} <= set(other.words)
    assert "--k=1" not in other.words


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"seeds": []}, "seeds is empty"),
        ({"depths": [6, 6]}, "depths has 6 twice"),
        ({"grid": {"k": []}}, "k is empty"),
        ({"special": {"c": {}}}, "special has keys for c"),
    ],
)
def test_a_study_that_cannot_be(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        study(**wrong)


def run(nll: list[float], **last: float) -> Run:
    """A run whose training nll was this, ten updates apart, and other metrics at the end."""
    records = [(10 * (i + 1), {"train/nll": value, "train/loss": value}) for i, value in enumerate(nll)]
    records.append((10 * len(nll), {key.replace("__", "/"): value for key, value in last.items()}))
    return Run("", {}, "", records, {}, {}, [], "", {}, None, [])


def test_outcomes() -> None:
    falls = [8 / (1 + i / 10) for i in range(60)]
    assert outcome(run(falls), 0) == "trained"
    assert outcome(run(falls), 1) == "crashed"
    assert outcome(None, 2) == "crashed"
    assert outcome(run([8.0] * 3 + [7.0] * 57), 0) == "stuck"
    assert outcome(run([*falls[:30], *[20.0] * 30]), 0) == "diverged"
    assert outcome(run([*falls[:30], math.nan]), 1) == "diverged"
    assert findings([(10, {"train/nll": 8.0})]).verdict == "no fault seen"


def test_numbers_keep_every_digit() -> None:
    found = numbers(run([5.0], val__nll=0.1 + 0.2))
    assert found["val_nll"] == "0.30000000000000004"
    assert found["val_bleu"] == ""
    assert set(numbers(None).values()) == {""}


@pytest.mark.parametrize(
    ("failures", "runs", "low", "high"),
    [(0, 3, 0, 0.5615), (1, 3, 0.0615, 0.7923), (3, 3, 0.4385, 1), (2, 10, 0.0567, 0.5098), (50, 100, 0.4038, 0.5962)],
)
def test_the_interval_is_wilsons(failures: int, runs: int, low: float, high: float) -> None:
    """As R's binom package has it."""
    assert interval(failures, runs) == pytest.approx((low, high), abs=1e-4)


def test_the_table_counts_failures_and_means_over_survivors() -> None:
    def row(strategy: str, outcome: str, nll: str) -> dict[str, str]:
        return {"strategy": strategy, "outcome": outcome} | dict.fromkeys(NUMBERS, "") | {"val_nll": nll}

    rows = [
        row("a", "stuck", "5.0"),
        row("b", "trained", "3.0"),
        row("c", "trained", "2.0"),
        row("a", "diverged", ""),
        row("b", "trained", "4.0"),
        row("c", "crashed", "9.0"),
    ]
    b, c, a = lines(rows, ["strategy"])
    assert [line.values["strategy"] for line in (b, c, a)] == ["b", "c", "a"]
    assert (a.means, b.means, c.means) == ({"val_nll": 5.0}, {"val_nll": 3.5}, {"val_nll": 2.0})
    assert a.failed.startswith("1 diverged, 1 stuck of 2 (")
    assert b.failed.startswith("none of 2 (0% to ")
    assert c.failures == {"crashed": 1}
