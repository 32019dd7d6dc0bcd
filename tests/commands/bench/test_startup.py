"""`stabilize bench startup`: what is started, when it counts as answered, and what it may take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stabilize.cli import main
from stabilize.commands.bench import startup
from stabilize.commands.bench.startup import FIRST_UPDATE, FIT, HELP, MENU, STAMP, limits, seconds_of
from stabilize.errors import UserError


def test_limits_follow_what_the_imports_take() -> None:
    seconds = {"import torch": 2.0, "import lightning, wandb": 6.0, HELP: 0.1, MENU: 9.0, FIT: 9.0, f"{FIT}, x": 9.0}
    assert limits(seconds) == {HELP: 0.7, MENU: 3.0, FIT: 12.0, f"{FIT}, x": 12.0}


def test_each_process_has_a_row(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def seconds(words: list[str]) -> float:
        started.append(words)
        return 1.0 + len(words) / 100

    monkeypatch.setattr(startup, "seconds_of", seconds)
    words = ["-c", "tiny.yaml", "--rounds", "2", "--json", "found.json", "--against", "a/other.yaml"]
    assert main(["bench", "startup", *words, "--model.width", "16"]) == 0
    found = {row["name"]: row for row in json.loads((here / "found.json").read_text())["rows"]}
    assert [*found] == ["import torch", "import lightning, wandb", HELP, MENU, FIT, f"{FIT}, other"]
    assert len(started) == 3 * len(found)  # the first round warms up
    of_fit = [words[2:] for words in started if words[1] == FIRST_UPDATE]
    own = ["fit", "-c", "tiny.yaml", "--model.width", "16"]
    assert {*map(tuple, (words[:-2] for words in of_fit))} == {(*own,), (*own, "-c", "a/other.yaml")}
    assert "no" in next(line for line in capsys.readouterr().out.splitlines() if HELP in line).split()
    assert sorted(path.name for path in here.iterdir()) == ["found.json", "tiny.yaml"]


def test_a_stamp_ends_the_time_and_a_failure_is_told() -> None:
    stamped = f"import time; print('x'); print('{STAMP}' + str(time.monotonic() + 50))"
    assert 50 < seconds_of(["-c", stamped]) < 100
    assert 0 < seconds_of(["-c", "pass"]) < 50
    with pytest.raises(UserError, match=r"cannot measure .*: it is broken"):
        seconds_of(["-c", "import sys; sys.exit('error: it is broken')"])


def test_the_menu_waits_for_torch_alone() -> None:
    """Not for its sharded tensors, which take half a second, nor for Lightning, wandb or matplotlib."""
    heavy = "{'torch.distributed.tensor', 'torch._dynamo', 'lightning', 'wandb', 'matplotlib', 'jsonargparse'}"
    code = f"import sys, stabilize.commands.menu; print(sorted({heavy} & sys.modules.keys()), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "[] True\n"


def test_help_waits_for_no_torch() -> None:
    heavy = "{'torch', 'numpy', 'rich'}"
    code = f"import sys; from stabilize.cli import main; main(['--help']); print({heavy} & sys.modules.keys())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "set()"


@pytest.mark.soak
def test_a_fit_is_ended_by_its_first_update(here: Path) -> None:
    assert 0 < seconds_of(["-c", FIRST_UPDATE, "fit", "-c", "tiny.yaml"]) < 600
    (run,) = (here / "runs").iterdir()
    assert not (run / "checkpoints").exists()
    with pytest.raises(UserError, match=r"model\.width is 0"):
        seconds_of(["-c", FIRST_UPDATE, "fit", "-c", "tiny.yaml", "--model.width", "0"])
