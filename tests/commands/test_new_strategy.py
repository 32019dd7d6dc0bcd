"""`stabilize new-strategy`: what it writes works as it stands, on every axis, here and in a fresh environment."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
from pathlib import Path

import pytest

from stabilize.cli import main
from stabilize.commands.menu import MENU
from stabilize.commands.new_strategy import EXAMPLES
from stabilize.strategies import AXES, NoWarmup, Stabilizer, Strategy
from stabilize.strategies.menu import entry
from tests import checkout, environments
from tests.checkout import ROOT
from tests.tasks import fit, sentence_batch, small_task, small_trainer, weights

every_axis = pytest.mark.parametrize("axis", MENU)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(name: str, axis: str, monkeypatch: pytest.MonkeyPatch) -> type[Strategy]:
    """The class of a package that was written into the working folder just now."""
    folder = Path("written")
    assert main(["new-strategy", axis, name, f"--folder={folder}"]) == 0
    (module,) = folder.glob("stabilize_*.py")
    monkeypatch.syspath_prepend(folder.resolve())
    return getattr(importlib.import_module(module.stem), name)


@every_axis
def test_what_is_written_trains_and_makes_a_difference(axis: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = {axis: written(f"Trained{axis.title()}", axis, monkeypatch)()}
    plain = {"warmup": NoWarmup()}
    changed = (plain | strategy, {}) if axis in AXES else (plain, strategy)
    ended = []
    for axes, others in ((plain, {}), changed):
        task = small_task(Stabilizer(**axes), encoder_layers=2, **others)
        fit(small_trainer(here, logger=False, max_steps=2), task, [sentence_batch(0, 1), sentence_batch(2, 3)])
        ended.append(weights(task)["model.source_embedding.weight"])
    assert ended[1].isfinite().all()
    assert (ended[1] - ended[0]).abs().max() > 1e-4


@every_axis
def test_what_is_written_has_the_form_of_the_menu(
    axis: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = written(f"Read{axis.title()}", axis, monkeypatch)
    about = entry(strategy)
    assert about.sentence.endswith(".")
    assert about.equation == EXAMPLES[axis].equation
    assert about.paper
    assert issubclass(strategy, MENU[axis])
    ((name, option),) = inspect.signature(strategy).parameters.items()
    assert f"    {name}: " in inspect.getdoc(strategy)
    assert strategy().spec()["init_args"] == {name: option.default}
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["strategies", axis]) == 0
    assert f"{about.sentence} (third party: {strategy.__module__})" in capsys.readouterr().out


REFUSED = {
    "no class name": (["residual", "half-sum"], "NAME is half-sum; "),
    "a word of Python": (["residual", "None"], "NAME is None; "),
    "a name of the menu": (["residual", "PreNorm"], "NAME is PreNorm, which is taken by stabilize.strategies."),
    "the name of a base": (["residual", "Residual"], "NAME is Residual, which is taken by stabilize.strategies."),
    "the name of the framework": (["norm", "Nmt"], "NAME is Nmt, whose package would be called stabilize-nmt like "),
    "no axis": (["residul", "Halves"], "no axis residul; nearest: residual"),
    "no name": (["residual"], "new-strategy: the following arguments are required: NAME; "),
    "a folder that is there": (["residual", "Halves", "--folder", "there"], "the folder there is there already; "),
    "below a file": (["residual", "Halves", "--folder", "file/halves"], "file/halves cannot be written: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_sentence(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "there").mkdir()
    (here / "file").touch()
    words, start = REFUSED[name]
    assert main(["new-strategy", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {start}")
    assert output.err.count("\n") == 1
    assert {path.name for path in here.iterdir()} == {"there", "file"}


def test_the_folder_can_be_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-strategy", "warmup", "RMSWarmUp2", "--folder", "mine/warm"]) == 0
    assert {path.name for path in (here / "mine" / "warm").iterdir()} == {
        "pyproject.toml",
        "README.md",
        "stabilize_rms_warm_up2.py",
        "test_stabilize_rms_warm_up2.py",
    }
    assert "pip install -e mine/warm && stabilize fit" in capsys.readouterr().out


@pytest.mark.soak
def test_what_is_written_is_installed_and_trains_in_a_fresh_environment(here: Path) -> None:
    commands = environments.make(here / "environment")
    source = checkout.copy_to(here / "checkout")
    small = "--data.init_args.train_pairs=300 --data.init_args.baselines=false --trainer.max_steps=5"
    script = f"""
        python -m pip install --quiet --no-deps --no-build-isolation {source}
        stabilize new-strategy residual HalvedSum
        python -m pytest -q stabilize-halved-sum
        python -m pip install --quiet --no-deps --no-build-isolation -e stabilize-halved-sum
        stabilize strategies residual HalvedSum
        stabilize strategies residual | grep -A 1 HalvedSum
        stabilize fit -c {ROOT}/configs/quickstart.yaml {small} --model.stabilizer.residual HalvedSum \\
            --model.stabilizer.residual.gain 0.25 --trainer.limit_val_batches=1 --trainer.limit_test_batches=1
        grep -A 2 stabilize_halved_sum.HalvedSum runs/*/config.yaml | grep 'gain: 0.25'
        python -m pip uninstall --quiet --yes stabilize-halved-sum
        ! stabilize explain -c {ROOT}/configs/quickstart.yaml --model.stabilizer.residual HalvedSum
    """
    ended = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        env={**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "150"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "stabilize_halved_sum.HalvedSum\n" in ended.stdout
    assert "gain: float = 0.5" in ended.stdout
    assert "(third party: stabilize_halved_sum)" in ended.stdout
    assert "HalvedSum" in ended.stderr.splitlines()[-1]
