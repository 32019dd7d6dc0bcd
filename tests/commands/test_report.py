"""`stabilize report`: the verb around the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from stabilize.cli import main
from tests.report.folders import POST_NORM, config, learnt, write_run


def test_the_page_is_written_where_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        write_run(tmp_path / "a", config(), learnt()),
        write_run(tmp_path / "b", config(POST_NORM), learnt(1e-5)),
    )
    assert main(["report", str(first), str(second)]) == 0
    said = capsys.readouterr().out
    assert "a: healthy" in said
    assert "b: vanishing (decoder, encoder)" in said
    assert f"report: {first / 'report.html'}" in said
    assert (first / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    out = tmp_path / "both.html"
    assert main(["report", str(first), str(second), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == (first / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: run"),
        (["{run}", "--ou", "x"], "unrecognized arguments: --ou"),
        (["{run}", "--out", "{run}"], "cannot be written: Is a directory"),
        (["{run}", "--out", "{run}/no/such/place.html"], "cannot be written: No such file"),
        (["nowhere"], "nowhere is no folder"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", config(), learnt())
    assert main(["report", *(word.replace("{run}", str(run)) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert len(error.splitlines()) == 1


def test_help_tells_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["report", "--help"])
    assert end.value.code == 0
    assert "--out" in capsys.readouterr().out
