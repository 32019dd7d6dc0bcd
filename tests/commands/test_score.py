"""`stabilize score` against the `sacrebleu` command on the same files."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stabilize.cli import main

WORDS = ["der", "die", "das", "Hund", "Katze", "Mann", "läuft", "sieht", "im", "Garten", "heute", "1,5", "."]
NAMES = ("bleu", "chrf", "ter")


def texts() -> dict[str, list[str]]:
    """Two references of forty lines, and two systems of which the second is better."""
    draw = random.Random(3)
    one = [" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) for _ in range(40)]

    def noisy(rate: float) -> list[str]:
        return [" ".join(draw.choice(WORDS) if draw.random() < rate else word for word in line.split()) for line in one]

    return {"one": one, "other": noisy(0.1), "worse": noisy(0.5), "better": noisy(0.42), "blank": [""] * 40}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, lines in texts().items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sacrebleu_command(*words: str) -> str:
    environment = os.environ | {"SACREBLEU_SEED": "12345"}
    command = [sys.executable, "-m", "sacrebleu", *words, "-m", *NAMES, "-w", "9"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def facts_of(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["score", *words, "--scores", *NAMES, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("references", [["one"], ["one", "other"]])
def test_a_system_scores_what_sacrebleu_says(
    folder: Path, capsys: pytest.CaptureFixture[str], references: list[str]
) -> None:
    options = [word for reference in references for word in ("--reference", reference)]
    facts = facts_of("worse", *options, capsys=capsys)
    for name, said in zip(NAMES, json.loads(sacrebleu_command(*references, "-i", "worse")), strict=True):
        assert f"{facts['systems'][0]['scores'][name]:.9f}" == f"{said['score']:.9f}"
        assert facts["signatures"][name] == said["signature"]
    assert facts["lines"] == 40


def test_two_systems_are_compared_as_sacrebleu_compares_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of("worse", "better", "--reference", "one", "--reference", "other", capsys=capsys)
    worse, better = facts["systems"]
    bootstrap = sacrebleu_command("one", "other", "-i", "worse", "better", "--paired-bs", "-f", "text")
    for system in (worse, better):
        shown = [
            f"{system['scores'][name]:.9f} ({system['intervals'][name][0]:.9f} ± {system['intervals'][name][1]:.9f})"
            for name in NAMES
        ]
        assert re.search(rf"{system['file']} +│ +{' +│ +'.join(map(re.escape, shown))} ", bootstrap)
    randomization = sacrebleu_command("one", "other", "-i", "worse", "better", "--paired-ar", "-f", "text")
    for test, said in (("bootstrap", bootstrap), ("randomization", randomization)):
        assert re.findall(r"\(p = (.*?)\)", said) == [f"{better[test][name]:.4f}" for name in NAMES]
        assert test not in worse
        for name in NAMES:
            assert facts[f"{test}_signatures"][name] in said
    assert 0.001 < better["randomization"]["bleu"] < 0.5, "a p that could not be another would say little"


def test_a_system_does_not_differ_from_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, same = facts_of("worse", "worse", "--reference", "one", capsys=capsys)["systems"]
    assert same["bootstrap"] == same["randomization"] == {"bleu": 1.0, "chrf": 1.0, "ter": 1.0}


def test_the_table_has_scores_differences_and_signatures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "worse", "better", "--reference", "one", "--scores", "bleu", "chrf++"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"better +\d\d\.\d\d ± \d+\.\d\d +\d\d\.\d\d ± ", said)
    assert re.search(r"difference +\+\d+\.\d\d +\+\d+\.\d\d", said)
    assert re.search(r"p, bootstrap +0\.\d{4} +0\.\d{4}", said)
    assert re.search(r"bleu nrefs:1\|bs:1000\|seed:12345\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:", said)
    assert re.search(r"chrf\+\+ nrefs:1\|ar:10000\|seed:12345\|case:mixed\|eff:yes\|nc:6\|nw:2\|", said)


def test_a_narrow_terminal_loses_no_digit(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    for columns in (20, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["score", "worse", "better", "--reference", "one", "--scores", "bleu", "chrf"]) == 0
        said = capsys.readouterr().out
        tables.append(re.findall(r"[+-]?\d+\.\d+(?: ± \d+\.\d+)?", said[: said.index("nrefs:")]))
    assert tables[0] == tables[1] != []


def test_empty_translations_score_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (system,) = facts_of("blank", "--reference", "one", capsys=capsys)["systems"]
    assert (system["scores"]["bleu"], system["scores"]["chrf"]) == (0.0, 0.0)


def test_bytes_that_are_not_utf8_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.encode() for line in texts()["one"]]
    lines[4] += b" \xe4"
    lines[9] += b" \xff\xfe"
    (folder / "dirty").write_bytes(b"\n".join(lines) + b"\n")
    assert main(["score", "dirty", "--reference", "one"]) == 0
    output = capsys.readouterr()
    assert "dirty: 2 of 40 lines have bytes that are not UTF-8, line 5 first" in output.err
    assert "not UTF-8" not in output.out


def test_text_that_was_not_detokenised_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """By sacreBLEU itself, of BLEU, from a hundred lines on (FIELD_REPORTS 4.2)."""
    for count in (99, 100):
        (folder / "tokenised").write_text("der Hund läuft .\n" * count + "der Hund läuft.\n")
        caplog.clear()
        assert main(["score", "tokenised", "--reference", "tokenised"]) == 0
        assert ("100 lines that end in a tokenized period" in caplog.text) == (count == 100)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["short", "--reference", "one"], "short has 39 lines but one has 40"),
        (["worse", "short", "--reference", "one"], "short has 39 lines but one has 40"),
        (["worse", "--reference", "short", "--reference", "one"], "worse has 40 lines|short has 39 lines"),
        (["empty", "--reference", "empty"], "empty is empty"),
        (["absent", "--reference", "one"], "absent: No such file"),
        (["worse"], "score: the following arguments are required: --reference"),
        (["worse", "--reference", "one", "--scores", "rouge"], "invalid choice: 'rouge'"),
        (["worse", "--reference", "one", "--bleu_tokenizer", "words"], "tokeniser of BLEU is words; .*13a.* would do"),
    ],
)
def test_what_cannot_be_scored(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    (folder / "short").write_text("".join(f"{line}\n" for line in texts()["worse"][1:]), encoding="utf-8")
    (folder / "empty").write_bytes(b"")
    assert main(["score", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(told, captured.err)
