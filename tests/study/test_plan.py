"""Studies: which runs they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stabilize.errors import UserError
from stabilize.study import Study, cells

PATHS = {"a": Path("a.yaml"), "b": Path("b.yaml"), "b+long": Path("b.yaml")}


def study(**given: Any) -> Study:
    return Study(**{"question": "?", "configs": ["base.yaml"], "strategies": ["a", "b"]} | given)


def test_every_point_of_the_grid_is_a_run() -> None:
    found = cells(
        study(seeds=[1, 2], depths=[3, 6], learning_rates=[1e-3, 0.002], settings={"x": True}, grid={"m.k": [1, "z"]}),
        PATHS,
        threads=2,
    )
    assert len({cell.name for cell in found}) == len(found) == 2 * 2 * 2 * 2 * 2
    assert [cell.values["seed"] for cell in found] == ["1"] * 16 + ["2"] * 16
    first = found[0]
    assert first.name == "a-depth=3-lr=0.001-k=1-seed=1"
    assert list(first.values) == ["strategy", "depth", "learning_rate", "m.k", "seed"]
    assert first.words == (
        *("-c", "base.yaml", "-c", "a.yaml", "--model.encoder_layers=3", "--model.decoder_layers=3", "--x=true"),
        *("--model.optimizer.init_args.lr=0.001", "--m.k=1", "--seed_everything=1", "--threads=2"),
    )


def test_what_is_special_to_a_strategy_is_for_its_runs_alone() -> None:
    """A word behind a plus makes another strategy of the same config."""
    one, same, other = cells(
        study(strategies=["a", "b", "b+long"], settings={"k": 1}, special={"b+long": {"k": 2, "l": [1, 2]}}), PATHS
    )
    assert {"--k=1", "--seed_everything=1"} <= set(one.words)
    assert {"b.yaml", "--k=1"} <= set(same.words)
    assert {"b.yaml", "--k=2", "--l=[1, 2]"} <= set(other.words)
    assert "--k=1" not in other.words
    assert (same.name, other.name) == ("b-seed=1", "b+long-seed=1")


def test_a_budget_in_tokens_is_as_many_updates_as_its_batches_make() -> None:
    grid = {"data.init_args.batch_tokens": [100, 300], "trainer.accumulate_grad_batches": [1, 2]}
    found = cells(study(strategies=["a"], tokens=1000, grid=grid), PATHS)
    updates = [word for cell in found for word in cell.words if "max_steps" in word]
    assert updates == [f"--trainer.max_steps={count}" for count in (10, 5, 3, 1)]
    with pytest.raises(UserError, match="tokens is 1000, but neither grid nor settings nor special has data"):
        cells(study(tokens=1000), PATHS)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"seeds": []}, "seeds is empty"),
        ({"strategies": []}, "strategies is empty"),
        ({"depths": [6, 6]}, "depths has 6 twice"),
        ({"learning_rates": []}, "learning_rates is empty"),
        ({"grid": {"k": []}}, "k is empty"),
        ({"special": {"c": {}}}, "special has keys for c"),
        ({"strategies": ["a", "a+long"]}, "special has no keys for it"),
        ({"strategies": [], "studies": ["x", "x"]}, "studies has x twice"),
    ],
)
def test_a_study_that_cannot_be(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        study(**wrong)
