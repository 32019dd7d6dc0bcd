"""`stabilize bench depth`: a layer's share, and that memory grows evenly with depth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stabilize.cli import main
from stabilize.commands.bench.depth import Growth, Layered
from stabilize.commands.bench.rounds import Spread

EVEN = ["post_ln", "b2t", "deepnorm", "resi_dual", "hyper_connections"]
"""What, besides pre-norm, has as many streams in each layer."""


def grown(seconds: dict[int, list[float]], peaks: dict[int, int]) -> Growth:
    return Growth({depth: Layered(Spread(seconds[depth]), peaks[depth]) for depth in seconds})


def test_a_layer_has_what_a_model_takes_more_than_the_shallowest() -> None:
    """a + b layers, where rounds differ in both."""
    even = grown({depth: [5 + 2 * depth * 3, 1 + 2 * depth * 4] for depth in (1, 6, 12)}, {1: 30, 6: 130, 12: 250})
    assert even.depths == [6, 12]
    assert even.seconds_per_layer(6).rounds == even.seconds_per_layer(12).rounds == [3.0, 4.0]
    assert even.bytes_per_layer(6) == even.bytes_per_layer(12) == 10.0
    assert even.deviations == {"time": 0.0, "memory": 0.0}


def test_the_deviation_is_that_of_the_worst_depth() -> None:
    """Layers of 1, 1 and 4 seconds, and of 10, 20 and 15 bytes."""
    uneven = grown({1: [0.0], 2: [2.0], 3: [4.0], 4: [24.0]}, {1: 0, 2: 20, 3: 80, 4: 90})
    assert uneven.deviations == pytest.approx({"time": 3.0, "memory": 1 / 3})


def found(here: Path, *words: str) -> dict[str, dict[int, dict]]:
    """The rows of a short run, by name and depth."""
    words = ("--rounds=1", "--updates=1", "--json=found.json", *words)
    assert main(["bench", "depth", "-c", "tiny.yaml", *words]) == 0
    rows: dict[str, dict[int, dict]] = {}
    for row in json.loads((here / "found.json").read_text())["rows"]:
        rows.setdefault(row["name"], {})[row["depth"]] = row
    return rows


def test_memory_grows_evenly_with_depth_for_every_strategy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = found(here, "--depths", "2", "5", "--against", *EVEN)
    assert [*rows] == ["tiny", *EVEN]
    for of_depth in rows.values():
        shares = [row["memory_per_layer"] for row in of_depth.values()]
        assert max(shares) < 1.15 * min(shares)
        assert [row["ratio"]["rounds"] for row in rows["tiny"].values()] == [[1.0]] * 2
    assert "greatest deviation of a layer's share" in capsys.readouterr().out
    assert sorted(path.name for path in here.iterdir()) == ["found.json", "tiny.yaml"]


def test_checkpointed_layers_take_less_memory(here: Path) -> None:
    (here / "again.yaml").write_text("model: {checkpoint_layers: true}\n")
    rows = found(here, "--depths", "8", "--against", "again.yaml", "--model.hidden=64", "--data.batch_tokens=400")
    assert rows["again"][8]["memory_per_layer"] < 0.7 * rows["tiny"][8]["memory_per_layer"]
