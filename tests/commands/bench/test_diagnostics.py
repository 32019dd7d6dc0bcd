"""`stabilize bench diagnostics`: what it counts, and how it adds up."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from stabilize.callbacks import ActivationScale, AttentionEntropy, GradientRatio, SpikeGuard
from stabilize.callbacks.monitor import Monitor
from stabilize.cli import main
from stabilize.commands.bench import diagnostics
from stabilize.commands.bench.contenders import Contender
from stabilize.commands.bench.diagnostics import NEVER, Rounds
from stabilize.commands.training import MONITORS
from tests.checkout import ROOT


def test_every_callback_has_a_row(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-c", "tiny.yaml", "--rounds", "2", "--gradient_ratio.every", "20"]
    words += ["--trainer.accumulate_grad_batches", "3", "--trainer.val_check_interval", "0.25"]
    words += ["--against", "post_ln", "--json", "found.json"]
    assert main(["bench", "diagnostics", *words]) == 0
    rows = json.loads((here / "found.json").read_text())["rows"]
    names = [*(kind.__name__ for kind in MONITORS.values()), "all"]
    assert [(row["name"], row["callback"]) for row in rows] == [*itertools.product(("tiny", "post_ln"), names)]
    for row in rows:
        assert len(row["at_every_update"]["rounds"]) == 2
        assert row["at_every_update"]["median"] == pytest.approx(sum(row["at_every_update"]["rounds"]) / 2)
        assert (row["at_intervals"] is None) == (row["callback"] == "AttentionEntropy")
    shown = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in shown if line and line[0] == "post_ln"] == names
    assert {row["every"] for row in rows if row["callback"] == "GradientRatio"} == {20}
    assert sorted(path.name for path in here.iterdir()) == ["found.json", "tiny.yaml"]  # no run folder


def test_configs_have_ten_rounds_at_a_time_in_turn(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update with the ratio takes twice as long under one config, thrice under the other; the rest is the same."""
    fits = []

    def fit(contender: Contender, count: int) -> Rounds:
        fits.append((contender.name, count))
        counted = Rounds({"Ratio": GradientRatio()}, count)
        for name, every in counted.kinds:
            longer = 2.0 + (contender.name == "post_ln")
            counted.seconds[name, every] = [99.0] + [longer if (name, every) == ("Ratio", 1) else 1.0] * count
        return counted

    monkeypatch.setattr(diagnostics, "fit", fit)
    words = ["--rounds", "25", "--against", "post_ln", "--json", "found.json"]
    assert main(["bench", "diagnostics", "-c", "tiny.yaml", *words]) == 0
    assert [{*fits[turn : turn + 2]} for turn in (0, 2, 4)] == [
        {("tiny", count), ("post_ln", count)} for count in (10, 10, 5)
    ]
    rows = json.loads((here / "found.json").read_text())["rows"]
    found = {(row["name"], row["callback"]): row["at_every_update"]["rounds"] for row in rows}
    assert found["tiny", "Ratio"] == [1.0] * 25
    assert found["post_ln", "Ratio"] == [2.0] * 25
    assert found["post_ln", "all"] == [0.0] * 25


def rounds(seconds: dict[str, tuple[float, float]], monitors: dict[str, Monitor]) -> Rounds:
    """Three counted rounds in which an update takes a second, or what is given where it is recorded, or not."""
    counted = Rounds(monitors, 3)
    for name, every in counted.kinds:
        of_two = seconds.get(name, (1.0, 1.0))
        counted.seconds[name, every] = [99.0] + [of_two[0] if every == 1 else of_two[1]] * 3
    return counted


def test_what_is_seldom_recorded_costs_its_share() -> None:
    monitors = {"Ratio": GradientRatio(every=50), "Guard": SpikeGuard(every=10), "Off": AttentionEntropy(every=0)}
    counted = rounds({"Ratio": (1.5, 1.0), "Guard": (1.2, 1.1), "Off": (3.0, 1.0), "all": (1.7, 1.1)}, monitors)
    assert counted.at_every_update("Ratio").median == pytest.approx(0.5)
    assert counted.at_intervals("Ratio").median == pytest.approx(0.5 / 50)
    assert counted.at_intervals("Guard").median == pytest.approx(0.1 + 0.1 / 10)
    assert counted.at_intervals("Off") is None
    assert counted.at_every_update("all").median == pytest.approx(0.7)
    assert counted.at_intervals("all").median == pytest.approx(0.1 + 0.5 / 50 + 0.1 / 10)
    assert counted.kinds["all", NEVER] == ["Ratio", "Guard"]


def test_the_interval_is_that_of_the_rounds() -> None:
    counted = rounds({}, {"Scale": ActivationScale(every=5)})
    counted.seconds["Scale", 1] = [99.0, 1.0, 1.1, 1.2]
    median, low, high, each = counted.at_every_update("Scale")
    assert (median, low, high) == pytest.approx((0.1, 0.0, 0.2), abs=1e-6)
    assert each == pytest.approx([0.0, 0.1, 0.2], abs=1e-6)
    counted.seconds["Scale", 1] = [99.0, 1.0, 1.1, 1.3, 1.9]
    counted.seconds["none", NEVER] = [1.0] * 5
    assert counted.at_every_update("Scale").median == pytest.approx(0.2)


def test_the_config_of_the_readme_is_one_of_bench(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs" / "benchmarks" / "diagnostics.yaml")
    with pytest.raises(SystemExit) as end:
        main(["bench", "diagnostics", "-c", config, "--print_config"])
    assert end.value.code == 0
    assert "batch_tokens: 2048" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["diagnostics", "-c", "tiny.yaml", "--trainer.devices", "2"], "bench counts the CPU time of one process"),
        (["diagnostics", "-c", "tiny.yaml", "--rounds", "1"], "bench.rounds is 1; 2 is the least"),
        (
            ["diagnostics", "-c", "tiny.yaml", *(f"--{key}.every=0" for key in MONITORS)],
            "all diagnostics are off; --gradient_ratio.every 50 would do",
        ),
    ],
)
def test_mistakes_are_told(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err
