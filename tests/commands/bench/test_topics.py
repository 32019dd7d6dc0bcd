"""`stabilize bench`: its topics, and what is refused before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from stabilize.cli import main
from stabilize.commands.bench import TOPICS
from tests.checkout import ROOT


def test_help_lists_the_topics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line.startswith("  ")] == [*TOPICS]


@pytest.mark.parametrize("topic", TOPICS)
def test_each_topic_tells_its_options(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", topic, "--help"])
    assert end.value.code == 0
    assert {"--rounds", "--json", "--against"} <= set(capsys.readouterr().out.replace("[", " ").split())


@pytest.mark.parametrize("topic", ["train", "depth"])
def test_the_config_of_a_topic_is_one_of_bench(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", topic, "-c", str(ROOT / "configs" / "benchmarks" / f"{topic}.yaml"), "--print_config"])
    assert end.value.code == 0
    assert "heads: 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "bench needs to be told what to measure, train, decode"),
        (["-c", "tiny.yaml"], "bench needs to be told what to measure"),
        (["diagnostic"], "no benchmark diagnostic; nearest: diagnostics"),
        (["train", "--rounds", "0"], "bench.rounds is 0; 1 is the least"),
        (["train", "--updates", "0"], "bench.updates is 0; 1 is the least"),
        (["train", "--trainer.devices", "2"], "bench counts the CPU time of one process"),
        (["train", "--json", "nowhere/x.json"], "json is nowhere/x.json, which cannot be a file"),
        (["train", "--against", "pre_l"], "no strategy config pre_l; nearest: pre_ln"),
        (["train", "--against", "none.yaml"], "none.yaml"),
        (["train", "--against", "tiny.yaml"], "against has tiny itself"),
        (["decode", "--data.init_args.test_pairs", "0"], "data gives no test text, which bench decode translates"),
        (["depth", "--depths", "1", "2"], "bench.depths is 1; 2 is the least"),
        (["startup", "--rounds", "none"], "bench startup: argument --rounds: invalid int value"),
    ],
)
def test_mistakes_are_told(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    topic, *rest = words or [""]
    assert main(["bench", *words[:1], "-c", "tiny.yaml", *rest] if topic.isalpha() else ["bench", *words]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["tiny.yaml"]
