"""Rounds: everything has its turn in each, and ratios are of one round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stabilize.commands.bench import record
from stabilize.commands.bench.rounds import Spread, interleaved


def test_each_has_its_turn_in_each_round_in_changing_order() -> None:
    turns: list[str] = []

    def turn(name: str) -> int:
        turns.append(name)
        return len(turns)

    found = interleaved({name: lambda name=name: turn(name) for name in "abc"}, 8)
    by_round = [turns[start : start + 3] for start in range(0, 24, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in by_round)
    assert len({*map(tuple, by_round)}) > 1
    for name, numbers in found.items():
        assert numbers == [3 * number + one.index(name) + 1 for number, one in enumerate(by_round)]


def test_ratios_are_of_the_same_round() -> None:
    """A machine that slows down tenfold halfway changes no ratio."""
    fast, slow = Spread([3.0, 30.0, 33.0]), Spread([1.0, 10.0, 10.0])
    ratio = fast.over(slow)
    assert ratio.rounds == [3.0, 3.0, 3.3]
    assert ratio.median == 3.0
    assert ratio.shown(".1f") == "3.0 (3.0 to 3.3)"
    with pytest.raises(ValueError, match="shorter"):
        fast.over(Spread([1.0]))


def test_a_record_has_the_numbers_of_each_round_and_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    record.write(path, "train", [{"name": "a", "speed": Spread([2.0, 1.0, 4.0])}], updates=3)
    found = json.loads(path.read_text())
    assert (found["topic"], found["updates"]) == ("train", 3)
    speed = {"median": 2.0, "least": 1.0, "greatest": 4.0, "rounds": [2.0, 1.0, 4.0]}
    assert found["rows"] == [{"name": "a", "speed": speed}]
    assert {"processor", "cores", "torch"} <= found["machine"].keys()
