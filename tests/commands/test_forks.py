"""Command lines in processes that are forked from one which has the imports: the same as in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stabilize.commands.forks import HEAVY, Fork

OWN = '''
from stabilize.strategies import PreNorm


class Own(PreNorm):
    """Of {folder}."""
'''


def ended(words: list[str], log: Path, **more: str) -> tuple[int, str]:
    """Exit code and output."""
    fork = Fork(words, os.environ | more, log)
    while (code := fork.poll()) is None:
        Fork.wait([fork], 60)
    assert fork.memory > 2**27, "torch alone takes more"
    return code, log.read_text()


@pytest.mark.parametrize("words", [["strategies", "residual", "Sum"], ["strategies", "residal"]])
def test_what_is_said_and_how_it_ends_is_the_same(words: list[str], tmp_path: Path) -> None:
    alone = subprocess.run(
        [sys.executable, "-m", "stabilize", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert ended(words, tmp_path / "log.txt") == (alone.returncode, alone.stdout)


def test_forks_share_no_folder_of_their_imports() -> None:
    """Such as wandb makes, which the first of them to end would delete for all."""
    folders = "[end for end in weakref.finalize._registry if isinstance(end.peek()[0], tempfile.TemporaryDirectory)]"
    code = f"import sys, tempfile, weakref, {', '.join(HEAVY)}; sys.exit(bool({folders}) or 'wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_its_variables_are_its_own(tmp_path: Path) -> None:
    narrow, wide = (ended(["strategies"], tmp_path / width, COLUMNS=width)[1] for width in ("60", "200"))
    assert max(map(len, narrow.splitlines())) <= 60 < max(map(len, wide.splitlines()))


def test_a_plug_in_is_that_beside_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of the same name that this process has found for another config."""
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(OWN.format(folder=folder))
        (tmp_path / folder / "run.yaml").write_text("model: {stabilizer: {placement: mine.Own}}\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "one")])
    code, said = ended(["explain", "-c", str(tmp_path / "other" / "run.yaml")], tmp_path / "log.txt")
    assert code == 0, said
    assert "Of other." in said
