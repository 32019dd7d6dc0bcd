"""`stabilize compare`: what is run, what is not run again, and what is told before anything is run."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from stabilize.cli import main
from stabilize.commands.compare import Board
from stabilize.commands.comparison import Comparison
from stabilize.study import Cell
from tests.checkout import ROOT

TINY = """
model: {encoder_layers: 1, decoder_layers: 1, width: 8, heads: 2, hidden: 8, dropout: 0.0}
data:
  class_path: SyntheticCorpus
  init_args: {train_pairs: 40, validation_pairs: 2, test_pairs: 0, vocabulary: 60, batch_tokens: 48}
trainer: {accelerator: cpu, max_steps: 4, val_check_interval: 4, check_val_every_n_epoch: null, log_every_n_steps: 2}
"""
STUDY = """
question: Does it run?
configs: [tiny.yaml]
strategies: [post_ln, own.yaml]
settings: {model.optimizer.init_args.lr: 0.01}
"""


BREAKS = """
from lightning.pytorch import Callback


class Breaks(Callback):
    def on_train_batch_end(self, *_):
        raise ZeroDivisionError
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a study of two runs of four updates, the second of which crashes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "breaks.py").write_text(BREAKS)
    (tmp_path / "own.yaml").write_text("trainer: {callbacks: [{class_path: breaks.Breaks}]}\n")
    (tmp_path / "small.yaml").write_text(STUDY)
    return tmp_path


def results(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def test_a_study_and_one_of_its_runs_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A crash is a result; what is finished is not run again; a row repeats its run to the bit."""
    assert main(["compare", "small.yaml", "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert "Does it run?" in said
    assert "2 of 2: " in said
    assert "post_ln trains" in said
    for file in ("answer.md", "study.html", "figures/val_nll.png"):
        assert (here / "studies" / "small" / file).stat().st_size > 500
    folder = here / "studies" / "small"
    rows = results(folder)
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "post_ln-seed=1": "trained",
        "own-seed=1": "crashed",
    }
    with (folder / "costs.csv").open(newline="") as file:
        assert all(float(row["seconds"]) > 0 and float(row["memory_gib"]) > 0 for row in csv.DictReader(file))

    before = (folder / "results.csv").read_bytes()
    shutil.rmtree(folder / "cells" / "own-seed=1")  # as if it had been killed
    (folder / "cells" / "own-seed=1").mkdir()
    stamp = (folder / "cells" / "post_ln-seed=1" / "result.json").stat().st_mtime_ns
    assert main(["compare", "small.yaml", "--dry-run"]) == 0
    assert "1 of 2 runs are left, about" in capsys.readouterr().out
    assert main(["compare", "small.yaml"]) == 0
    assert (folder / "results.csv").read_bytes() == before
    assert (folder / "cells" / "post_ln-seed=1" / "result.json").stat().st_mtime_ns == stamp

    shutil.copy(here / "small.yaml", here / "twin.yaml")  # what two grids ask for is made once
    (here / "twins.yaml").write_text("question: Twice?\nstudies: [small.yaml, twin.yaml]\n")
    assert main(["compare", "twins.yaml", "--out", "elsewhere/twins"]) == 0
    assert len(list((here / "elsewhere").glob("*/cells/*/log.txt"))) == 2
    assert len(results(here / "elsewhere" / "twins")) == 4

    row = rows["post_ln-seed=1"]
    command = shlex.split(row["command"])
    assert (command[:2], command[-1]) == (["stabilize", "fit"], "--threads=1")
    subprocess.run(
        [sys.executable, "-m", *command, "--trainer.default_root_dir=alone"], check=True, capture_output=True
    )
    (table,) = (here / "alone").glob("*/metrics.csv")
    with table.open(newline="") as file:
        values = [line["val/nll"] for line in csv.DictReader(file) if line["val/nll"]]
    assert repr(float(values[-1])) == row["val_nll"]

    (here / "both.yaml").write_text("question: And both?\nstudies: [small.yaml]\nanswer: claims\n")
    assert main(["compare", "both.yaml"]) == 0  # runs that another study has made are not made again
    assert not list((here / "studies" / "both" / "cells").glob("*/log.txt"))
    for row in results(here / "studies" / "both").values():
        assert row.pop("study") == "small"
        assert row == rows[row["run"].removeprefix("small-")] | {"run": row["run"]}
    assert "a1: " in capsys.readouterr().out

    shutil.rmtree(folder / "cells")  # the tables alone tell of the runs, here and to another study beside it
    shutil.rmtree(here / "studies" / "both")
    for study in ("small.yaml", "both.yaml"):
        assert main(["compare", study, "--dry-run"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "0 of 2 runs are left, about 0 min with --jobs 1"
        assert main(["compare", study]) == 0
    assert (folder / "results.csv").read_bytes() == before
    assert not list((here / "studies").glob("*/cells/*/log.txt"))

    (here / "small.yaml").write_text(STUDY.replace("0.01", "0.02"))
    assert main(["compare", "small.yaml"]) == 2
    assert "was run with another command line, or other configs, than the study has now" in capsys.readouterr().err
    (here / "small.yaml").write_text(STUDY)
    (here / "tiny.yaml").write_text(TINY.replace("max_steps: 4", "max_steps: 8"))
    assert main(["compare", "small.yaml"]) == 2
    assert "or other configs" in capsys.readouterr().err


def test_what_is_left_is_told_before_and_while_it_is_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the study's own word at first, then by runs that are most like those that are left."""
    (here / "small.yaml").write_text(STUDY + "core_minutes: 6\n")
    assert main(["compare", "small.yaml", "--dry-run", "--jobs", "2"]) == 0
    *commands, last = capsys.readouterr().out.splitlines()
    assert [command.split()[:2] for command in commands] == [["stabilize", "fit"]] * 2
    assert last == "2 of 2 runs are left, about 3 min with --jobs 2"

    cells = [
        Cell(f"{strategy} {depth}", {"strategy": strategy, "depth": depth, "seed": "1"}, (f"--{strategy}={depth}",))
        for depth in ("3", "6")
        for strategy in ("a", "b")
    ]
    comparison = Comparison(here / "none", cells, jobs=1)
    assert comparison.seconds_left is None
    comparison.found = {"a 3": {"outcome": "trained", "seconds": 10.0}, "b 3": {"outcome": "stuck", "seconds": 14.0}}
    assert comparison.seconds_left == (10 + 14) * 6 / 3
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        console.print(Board(comparison, Live(console=console)).drawn)
    drawn = captured.get()
    assert [line.split() for line in drawn.splitlines() if line.split()[:1] in (["a"], ["b"])] == [
        ["a", "1", "1"],
        ["b", "1", "1"],
    ]
    assert "2 of 4 runs; about 1 min left" in drawn

    comparison.found["a 6"] = {"outcome": "trained", "seconds": 16.0}  # so 8 seconds for itself, and 4 for 3 layers
    of_the_other_depth = 14 * (8 + 2 * 4) / (8 + 4)
    assert comparison.seconds_left == pytest.approx((16 + of_the_other_depth) / 2)


def test_a_run_that_is_killed_has_no_result(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "killed.py").write_text(
        "import os, signal\nfrom lightning.pytorch import Callback\n\n\n"
        "class Killed(Callback):\n    def on_train_batch_end(self, *_):\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (here / "killed.yaml").write_text("trainer: {callbacks: [{class_path: killed.Killed}]}\n")
    (here / "small.yaml").write_text(STUDY.replace("post_ln, own.yaml", "killed.yaml"))
    assert main(["compare", "small.yaml"]) == 2
    assert "1 runs have no result (killed-seed=1: somebody ended it); the same command" in capsys.readouterr().err
    assert not (here / "studies" / "small" / "cells" / "killed-seed=1" / "result.json").exists()


def test_runs_die_with_the_study(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By SIGKILL of the parent alone; nobody else carries out the same study meanwhile."""
    (here / "tiny.yaml").write_text(TINY.replace("max_steps: 4", "max_steps: 1000000"))
    (here / "small.yaml").write_text(STUDY.replace(", own.yaml", ""))
    parent = subprocess.Popen([sys.executable, "-m", "stabilize", "compare", "small.yaml"], stdout=subprocess.DEVNULL)
    try:
        log = here / "studies" / "small" / "cells" / "post_ln-seed=1" / "log.txt"
        while not (log.exists() and "update 4:" in log.read_text()):
            assert parent.poll() is None
        assert main(["compare", "small.yaml"]) == 2
        assert "is being worked on by another process" in capsys.readouterr().err
        (child,) = runs_of(parent.pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    with contextlib.suppress(OSError):  # it is gone
        while Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
            pass


@pytest.mark.soak
def test_a_study_that_is_killed_three_times_ends_as_if_it_had_not_been(here: Path) -> None:
    """By SIGKILL of the parent, of a run, and of the whole process group, each in the middle of a run."""
    (here / "tiny.yaml").write_text(
        TINY.replace("max_steps: 4", "max_steps: 150").replace("test_pairs: 0", "test_pairs: 2")
    )
    study = STUDY.replace("[post_ln, own.yaml]", "[post_ln, pre_ln, b2t]") + "depths: [1, 2]\n"
    (here / "small.yaml").write_text(study.replace("settings: {", "settings: {test_after_fit: true, "))
    command = [sys.executable, "-m", "stabilize", "compare", "small.yaml", "--jobs", "2"]
    assert subprocess.run([*command, "--out", "whole/small"], capture_output=True).returncode == 0

    cells = here / "studies" / "small" / "cells"
    for blow in ("parent", "run", "group"):
        before = len(list(cells.glob("*/result.json")))
        parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        while len(list(cells.glob("*/result.json"))) <= before or not in_the_middle(cells):
            assert parent.poll() is None
        runs = runs_of(parent.pid)
        if blow == "parent":
            parent.send_signal(signal.SIGKILL)
        elif blow == "run":
            os.kill(runs[0], signal.SIGKILL)
        else:
            os.killpg(parent.pid, signal.SIGKILL)
        assert parent.wait() == (2 if blow == "run" else -signal.SIGKILL)
        if blow == "run":  # all others have a result now; some are taken away, so that the third blow meets a run
            for place in sorted(cells.glob("*/result.json"))[:3]:
                place.unlink()
    assert subprocess.run(command, capture_output=True).returncode == 0
    for file in ("results.csv", "answer.md", "significance.csv"):
        whole, killed = (here / folder / "small" / file for folder in ("whole", "studies"))
        assert killed.read_bytes() == whole.read_bytes(), file
    assert len(results(here / "studies" / "small")) == 6


def runs_of(study: int) -> list[int]:
    """The processes of a study's runs: forked from one that the study has started."""
    return [run for forking in children_of(study) for run in children_of(forking)]


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def in_the_middle(cells: Path) -> bool:
    """Whether a run under way has made updates."""
    logs = [path for path in cells.glob("*/log.txt") if not (path.parent / "result.json").exists()]
    return any("update 1" in log.read_text(errors="replace") for log in logs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("question: Does it run?", "qestion: Does it run?"),
            "(in small.yaml): there is no such key; nearest: ",
        ),
        (("seeds", "seeds"), ""),
        (("post_ln", "post_l"), "no strategy config post_l; nearest: post_ln"),
        (("strategies: [post_ln, own.yaml]", "strategies: []"), "strategies is empty"),
        (("lr: 0.01", "lrr: 0.01"), "lrr"),
        (("model.optimizer.init_args.lr: 0.01", "model.heads: 3"), "heads"),
        (("[tiny.yaml]", "[absent.yaml]"), "absent.yaml"),
    ],
)
def test_mistakes_are_told_before_anything_is_run(
    change: tuple[str, str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "small.yaml").write_text(STUDY.replace(*change))
    words = ["--jobs", "0"] if not said else []
    assert main(["compare", "small.yaml", *words]) == 2
    assert (said or "--jobs is 0; 1 is the least that will do") in capsys.readouterr().err
    assert not (here / "studies").exists()


def test_a_file_that_is_none(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "absent.yaml"]) == 2
    assert "absent.yaml cannot be read: No such file" in capsys.readouterr().err
    (here / "small.yaml").write_text("{")
    assert main(["compare", "small.yaml"]) == 2
    assert "small.yaml, line 2, column 1 is no YAML: " in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_studies_of_this_repository(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each key of each is one of `fit`, and its first lines say what it asks and costs."""
    monkeypatch.chdir(ROOT)
    assert path.read_text().startswith("# ")
    assert main(["compare", str(path), "--dry-run", "--out", "absent/absent"]) == 0
    *commands, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"{len(commands)} of {len(commands)} runs are left")
