"""A thousand configs with something wrong in them: each is refused in one sentence, or what runs is what it says."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonargparse import Namespace

from stabilize import cli
from stabilize.commands import training
from tests.checkout import ROOT
from tests.commands.hostile import Case, case
from tests.commands.parsing import fit_parser
from tests.limits import HangError, limited

BOUNDS: dict[str, Any] = {
    **{f"model.{stack}_layers": 1 for stack in ("encoder", "decoder")},
    **{"model.width": 64, "model.heads": 8, "model.hidden": 256, "model.maximum_length": 1024},
    **{f"model.{search}.{name}": 2 for search in ("search", "validation_search") for name in ("beam", "maximum_extra")},
    **{f"model.{search}.maximum_ratio": 1 for search in ("search", "validation_search")},
    **{"data.train_pairs": 100, "data.validation_pairs": 4, "data.test_pairs": 2, "data.vocabulary": 200},
    **{"data.batch_tokens": 256, "data.workers": 0, "trainer.max_steps": 1, "trainer.accumulate_grad_batches": 2},
}
"""No run of a test is larger, whatever the config asks for."""


@dataclasses.dataclass
class Outcome:
    """How a command ended."""

    code: int
    said: str
    command: training.Command | None


def ended(verb: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Run the command in this process."""
    commands: list[training.Command] = []
    carry_on = training.LightningCLI._run_subcommand

    def remember(command: training.Command, name: str) -> None:
        commands.append(command)
        carry_on(command, name)

    said = io.StringIO()
    with monkeypatch.context() as patched, warnings.catch_warnings(), limited():
        warnings.simplefilter("ignore")
        patched.setattr(training.Command, "_run_subcommand", remember)
        patched.setattr(sys, "path", list(sys.path))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            try:
                code = cli.main([verb, *words])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
    return Outcome(code, said.getvalue(), commands[0] if commands else None)


# ---------------------------------------------------------------------- what was said, and what was made of it


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, classes by their keys alone, without `class_path` and `init_args`."""
    if isinstance(tree, Namespace):
        tree = tree.as_dict()
    if not isinstance(tree, dict):
        return {prefix: tree}
    found = {prefix: tree["class_path"]} if "class_path" in tree else {}
    for name, value in tree.items():
        if name != "class_path":
            key = prefix if name == "init_args" else f"{prefix}.{name}".lstrip(".")
            found |= flat(value, key) if value != {} else {}
    return found


def said_by(made: Case, words: list[str]) -> dict[str, Any]:
    """What the files and flags of an accepted command line say, key by key; what is given later wins."""
    sources = [yaml.safe_load(content) for content in made.files.values()]
    for word in words[len(made.files) :]:
        key, _, value = word.removeprefix("--").partition("=")
        with contextlib.suppress(yaml.YAMLError):
            value = value if yaml.safe_load(value) is None else yaml.safe_load(value)
        sources.append({key: value})
    said: dict[str, Any] = {}
    for source in sources:
        for key, value in flat(source).items():
            key = key.replace(".init_args", "").removesuffix(".class_path")
            if not same(said.get(key, value), value) or key not in said:
                said = {other: kept for other, kept in said.items() if not other.startswith(f"{key}.")}
            said[key] = value
    return {key: value for key, value in said.items() if "+" not in key and not key.endswith(".help")}


def same(said: Any, found: Any) -> bool:
    """Whether a value in YAML and one that was made of it agree."""
    if isinstance(said, list | tuple) and isinstance(found, list | tuple):
        return len(said) == len(found) and all(map(same, said, found))
    if isinstance(said, dict) or isinstance(found, dict | Namespace):
        return {key: value for key, value in flat(said).items() if not same(value, flat(found).get(key))} == {}
    with contextlib.suppress(TypeError, ValueError):
        return float(said) == float(found)
    words, made = str(said).lower(), str(found).lower()
    alike = {"true": ("yes", "on", "true"), "false": ("no", "off", "false"), "none": ("null", "~", "none", "")}
    classes = made.count(".") > 1 and words.rpartition(".")[2] == made.rpartition(".")[2]
    return words == made or classes or words in alike.get(made, ())


def differences(said: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What became of a value is another one; a text may look like a group, and `auto` is what it finds."""
    texts = tuple(f"{key}." for key, value in found.items() if isinstance(value, str))
    unlike = [key for key, value in said.items() if not same(value, found.get(key)) and not key.startswith(texts)]
    return [f"{key}: {said[key]!r} became {found.get(key)!r}" for key in unlike if said[key] != "auto"]


def in_the_objects(command: training.Command) -> dict[str, Any]:
    """The settings of a run as its objects have them, as far as they keep them under the names in the config."""
    task, trainer, config = command.model, command.trainer, flat(command.config[command.subcommand])
    found = {f"model.{key}": value for key, value in flat(task.spec()).items()}
    found |= {f"model.clipping{'.' * bool(key)}{key}": value for key, value in flat(task.clipping.spec()).items()}
    if task.decoder_stabilizer is None:
        found["model.decoder_stabilizer"] = None
    holders = {"data": command.datamodule, "trainer": trainer, "model": task}
    holders |= {"model.search": task.search, "model.validation_search": task.validation_search}
    for callback in trainer.callbacks:
        holders |= {key: callback for key, kind in training.MONITORS.items() if type(callback) is kind}
    if trainer.optimizers:
        optimizer = trainer.optimizers[0]
        found["model.optimizer"] = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        found |= {f"model.optimizer.{key}": value for key, value in optimizer.defaults.items()}
    plain = (bool, int, float, str, type(None))
    for key in config:
        group, _, name = key.rpartition(".")
        value = getattr(holders.get(group), name, found)
        of_lightning = group == "trainer" and config[key] is None  # which has values of its own for that
        if isinstance(value, plain) and key not in found and not of_lightning:
            found[key] = value
    return found


ANOTHER_BY_RULE = {"trainer.precision", "trainer.default_root_dir"}
"""Keys for which the trainer has another value than was given: the name in full, the run's folder."""


def modest(config: dict[str, Any]) -> list[str] | None:
    """Flags that make a run small; none where it needs other processes, nodes or processors."""
    if (config["trainer.devices"], config["trainer.num_nodes"], config["trainer.strategy"]) not in (
        ("auto", 1, "auto"),
        (1, 1, "auto"),
        ("1", 1, "auto"),
    ):
        return None
    flags = {key: bound for key, bound in BOUNDS.items() if config.get(key) is not None and not config[key] <= bound}
    if config["trainer.max_steps"] < 0:
        flags["trainer.max_steps"] = 1
    if "model.width" in flags or "model.heads" in flags:
        flags |= {"model.width": 16, "model.heads": 2}
    return [f"--{key}={value}" for key, value in flags.items()]


def fault(made: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, fits: bool = True) -> tuple[str, str]:
    """How the command took a case, and what is wrong with that.

    Args:
        fits: whether it also trains, where it was not refused.
    """
    monkeypatch.setenv("WANDB_MODE", "disabled")  # its processes cost more than the run
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    words = made.write(folder)
    before = set(folder.iterdir())
    try:
        looked = ended("explain", words, monkeypatch)
        if looked.code == 2:
            return "refused", wrong_refusal(looked.said, made, monkeypatch, "explain") or traces(folder, before)
        if looked.code or looked.command is None:
            return "refused", f"exit code {looked.code}: {looked.said}"
        config = flat(looked.command.config["explain"])
        unlike = differences(said_by(made, words), config)
        smaller = modest(config) if fits else None
        if unlike or smaller is None:
            return "explained", "; ".join(unlike)
        words += smaller
        run = ended("fit", words, monkeypatch)
        if run.code == 2:
            wrong = wrong_refusal(run.said, made, monkeypatch, "fit", *smaller)
            return "refused before training", wrong or traces(folder, before)
        if run.code or run.command is None:
            return "trained", f"exit code {run.code}: {run.said}"
        trainer = run.command.trainer
        written = Path(trainer.default_root_dir) / "config.yaml"
        if not written.exists():
            return "trained", "" if trainer.fast_dev_run else "no config.yaml"
        config = flat(yaml.safe_load(written.read_text()))
        unlike = differences(said_by(made, words), config)
        objects = {key: value for key, value in in_the_objects(run.command).items() if key in config}
        unlike += differences({key: config[key] for key in objects if key not in ANOTHER_BY_RULE}, objects)
        return "trained", "; ".join(unlike)
    except HangError:
        return "hangs", "hangs"
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"


def traces(folder: Path, before: set[Path]) -> str:
    left = [str(path.relative_to(folder)) for path in set(folder.rglob("*")) - before if path.is_file()]
    return f"a refused run left {', '.join(left)}" if left else ""


def wrong_refusal(said: str, made: Case, monkeypatch: pytest.MonkeyPatch, verb: str, *flags: str) -> str:
    """What is wrong with a message: it is one sentence that names a file, or a key or value that was changed.

    Some configs need text, a package or a processor that is not here: what they get as they are will do as well.
    """
    lines = [line for line in said.splitlines() if not line.startswith(("wandb: ", "warning: "))]
    if len(lines) != 1 or not lines[0].startswith("error: ") or "Traceback" in said or len(said) > 1500:
        return f"not one sentence: {said[-800:]}"
    names = {name for name in {*made.files, *made.names} if len(name) > 1}
    if any(name[:40] in said for name in names):
        return ""
    with tempfile.TemporaryDirectory() as place:
        for name, content in made.plain.items():
            Path(place, name).write_bytes(content)
        plain = ended(verb, [*(f"--config={place}/{name}" for name in made.plain), *flags], monkeypatch)
    return "" if plain.said == said else f"names nothing of {names}: {said}"


@pytest.fixture(scope="module")
def keys() -> list[str]:
    return [action.dest for action in fit_parser()._actions if action.dest not in ("help", "config", "print_config")]


@pytest.mark.parametrize("number", range(40))
def test_it_is_refused_in_a_sentence_or_what_it_says_is_what_runs(
    number: int, keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = case(number, keys)
    _, wrong = fault(made, tmp_path, monkeypatch, fits=number < 5)
    assert not wrong, made.what


@pytest.mark.soak
@pytest.mark.parametrize("start", range(0, 1000, 50))
def test_so_are_a_thousand(start: int, keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How they were taken is printed, for `pytest -s`."""
    how: Counter[str] = Counter()
    faults = {}
    for number in range(start, start + 50):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(folder)
            taken, wrong = fault(case(number, keys), folder, patched)
        how[taken] += 1
        if wrong:
            faults[number] = wrong
        shutil.rmtree(folder)
    with capsys.disabled():
        print(f"\n{start} to {start + 49}: {dict(how)}")
    assert not faults


@pytest.mark.soak
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=st.integers(1020, 2**63))
def test_so_is_any_other(number: int, keys: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    made = case(number, keys)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        _, wrong = fault(made, folder, patched, fits=False)
    assert not wrong, made.what


@pytest.mark.soak
@pytest.mark.parametrize("number", range(1000, 1020))
def test_so_is_one_in_a_process_of_its_own(number: int, keys: list[str], tmp_path: Path) -> None:
    made = case(number, keys)
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | made.environment
    command = [sys.executable, "-m", "stabilize", "explain", *made.write(tmp_path)]
    looked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert looked.returncode in (0, 2), looked.stderr
    assert "Traceback" not in looked.stdout + looked.stderr
