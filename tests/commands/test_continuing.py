"""To go on and to fine-tune, what a run takes along, and what SLURM and a full disk do to one."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger

from stabilize import checkpoint
from stabilize.cli import main
from tests.checkout import ROOT
from tests.commands.test_training import TINY
from tests.tasks import ENGLISH, GERMAN, curve, rows

VALIDATED = ["--trainer.val_check_interval=2", "--trainer.check_val_every_n_epoch=null"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with `tiny.yaml` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def fit(*words: str) -> tuple[int, Path]:
    """The exit code and the folder of a run."""
    code = main(["fit", "--config=tiny.yaml", "--trainer.log_every_n_steps=1", *words])
    return code, max(Path("runs").iterdir(), key=lambda run: run.stat().st_mtime_ns)


def state(run: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)


def cue(kind: str, **arguments: Any) -> str:
    """An option that adds one of the callbacks of `cues`."""
    callback = {"class_path": f"tests.commands.cues.{kind}", "init_args": arguments}
    Path(f"{kind}.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks+": [callback]}}))
    return f"--config={kind}.yaml"


def equal_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one["state_dict"][key].equal(value) for key, value in other["state_dict"].items())


# ---------------------------------------------------------------------- to go on, and to fine-tune


def test_to_fine_tune_is_to_begin_with_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counters, optimiser and schedule begin anew, and it is said (FIELD_REPORTS 2.9)."""
    _, first = fit("--trainer.max_steps=3")
    weights = f"--weights={first}/checkpoints/last.ckpt"
    capsys.readouterr()
    code, tuned = fit(weights, "--trainer.max_steps=2", "--model.optimizer.lr=0")
    said = capsys.readouterr().out
    assert code == 0
    assert f"fine-tunes the weights of {first}/checkpoints/last.ckpt, update 3: counters, optimiser, schedule, " in said
    assert "are reset" in said
    assert state(tuned)["global_step"] == 2
    assert equal_weights(state(tuned), state(first))
    assert [state(run)["run"]["name"] for run in (first, tuned)] == [first.name, tuned.name]
    _, tuned = fit(weights, "--trainer.max_steps=2")
    capsys.readouterr()
    assert curve(tuned, "lr") == pytest.approx({0: 1e-4, 1: 2e-4})
    assert list(curve(tuned, "train/tokens").values()) == list(curve(first, "train/tokens").values())[:2]
    config = f"--config={tuned}/config.yaml"
    code, resumed = fit(config, f"--ckpt_path={tuned}/checkpoints/last.ckpt", "--trainer.max_steps=3")
    assert code == 0
    assert curve(resumed, "lr") == pytest.approx({2: 3e-4})
    assert "fine-tunes" not in capsys.readouterr().out  # its config names the weights that it began with


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_weights_that_do_not_fit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, first = fit("--checkpoint.save_weights_only=true", *VALIDATED)
    best = first / "checkpoints" / "update_2.ckpt"
    capsys.readouterr()
    for words, start in (
        ([f"--weights={best}", "--model.width=4"], "the checkpoint is of another model: model.width is 8 in the ch"),
        (["--weights=nowhere.ckpt"], "weights is nowhere.ckpt, but there is no such file"),
        ([f"--ckpt_path={best}"], f"ckpt_path is {best}, which has weights alone; --weights {best} would do"),
    ):
        assert main(["fit", "--config=tiny.yaml", *words]) == 2
        assert capsys.readouterr().err.startswith(f"error: {start}")
    assert len(list(Path("runs").iterdir())) == 1
    code, tuned = fit(f"--weights={best}", "--model.optimizer.lr=0")
    assert code == 0
    assert equal_weights(state(tuned), torch.load(best, weights_only=True))
    assert fit(f"--ckpt_path={first}/checkpoints/last.ckpt", "--trainer.max_steps=3")[0] == 0


def test_going_on_and_fine_tuning_of_the_readme(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--ckpt_path auto` with more `--trainer.max_steps` goes on, and with `--weights` it begins with them once."""
    _, first = fit()
    words = ["--ckpt_path", "auto", "--weights", f"{first}/checkpoints/last.ckpt", "--trainer.default_root_dir=tuned"]
    for updates, said in (("2", "fine-tunes the weights"), ("4", "goes on from tuned/")):
        capsys.readouterr()
        assert main(["fit", f"--config={first}/config.yaml", *words, "--trainer.max_steps", updates]) == 0
        output = capsys.readouterr().out
        assert ("fine-tunes" in output, "goes on from" in output) == ("fine" in said, "goes" in said)
        assert said in output
    newest = max(Path("tuned").iterdir(), key=lambda run: run.stat().st_mtime_ns)
    assert state(newest)["global_step"] == 4


def test_only_a_run_with_the_same_settings_goes_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of several seeds and strategies in one folder; what decides no weight may change."""
    _, first = fit()
    newest = f"{first}/checkpoints/last.ckpt"
    for key, value in (("model.stabilizer.placement", "PreNorm"), ("seed_everything", "2")):
        none = f"no run in runs has these settings; in the newest, {newest}, {key} is "
        capsys.readouterr()
        assert main(["fit", "--config=tiny.yaml", f"--{key}={value}", "--ckpt_path=last"]) == 2
        assert f"error: ckpt_path is last, but {none}" in capsys.readouterr().err
        code, other = fit(f"--{key}={value}", "--ckpt_path=auto")
        assert code == 0
        assert f"a fresh start: {none}" in capsys.readouterr().out
        newest = f"{other}/checkpoints/last.ckpt"
    assert state(other)["global_step"] == 2
    half = first / "checkpoints" / f".last.ckpt.{2**22 + 1}{checkpoint.PARTIAL}"  # no process has such a number
    half.touch()
    others = ["--model.search.beam=2", "--data.workers=1", "--data.evaluation_maximum_length=30"]
    code, resumed = fit("--trainer.max_steps=3", "--ckpt_path=auto", *others)
    assert code == 0
    assert not half.exists()
    assert f"goes on from {first}/checkpoints/last.ckpt" in capsys.readouterr().out
    assert state(resumed)["run"]["name"] == first.name


def test_the_config_of_a_run_goes_on_with_that_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or what went on from it, though another with the same settings is newer."""
    _, first = fit()
    _, other = fit()
    for updates in (3, 4):
        code, resumed = fit(f"--config={first}/config.yaml", "--ckpt_path=auto", f"--trainer.max_steps={updates}")
        assert code == 0
        assert state(resumed)["run"]["name"] == first.name
        assert state(resumed)["global_step"] == updates
    capsys.readouterr()
    assert fit(f"--config={other}/config.yaml", "--ckpt_path=last", "--trainer.max_steps=5")[0] == 0
    assert f"goes on from {other}/checkpoints/last.ckpt" in capsys.readouterr().out
    assert fit(f"--config={other}/config.yaml", "--ckpt_path=last", "--trainer.max_steps=5")[0] == 0
    assert "there is nothing left to train: " in capsys.readouterr().out


def test_the_config_of_a_run_that_went_on_stands_for_that_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not for the one before it: its weights are asked for, and a fit of it begins at the beginning."""
    fit()
    _, second = fit("--ckpt_path=last", "--trainer.max_steps=3")
    assert state(second)["global_step"] == 3
    config = f"--config={second}/config.yaml"
    for verb in ("test", "validate", "predict"):
        capsys.readouterr()
        assert main([verb, config]) == 2
        assert f"error: {verb} needs weights: --ckpt_path; the newest is {second}/" in capsys.readouterr().err
    code, again = fit(config, "--trainer.max_steps=1")
    assert (code, state(again)["global_step"]) == (0, 1)
    assert "goes on from" not in capsys.readouterr().out


def told(*words: str) -> list[str]:
    """The warnings of a run."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert main(["fit", "--config=tiny.yaml", *words]) == 0
    return [str(warning.message) for warning in said]


def test_what_is_not_as_it_was_is_told(here: Path) -> None:
    """Key, then and now, in one sentence, where a checkpoint of other settings is named; nothing where none differs."""
    clipped = ["--model.clipping=GlobalNorm", "--model.clipping.value"]
    _, first = fit(*clipped, "1")
    path = ["--trainer.max_steps=3", f"--ckpt_path={first}/checkpoints/last.ckpt"]
    assert not [warning for warning in told(*clipped, "1", *path) if "in the checkpoint and" in warning]
    words = [*clipped, "2", "--seed_everything=2", "--model.label_smoothing=0.2", "--data.sampling=0.1"]
    (said,) = (
        each for each in told(*words, "--trainer.accumulate_grad_batches=2", *path) if "the checkpoint and" in each
    )
    expected = {
        "seed_everything": (1, 2),
        "model.label_smoothing": (0.1, 0.2),
        "model.clipping.value": (1.0, 2.0),
        "data.sampling": (0.0, 0.1),
        "trainer.accumulate_grad_batches times processes": (1, 2),
    }
    parts = [f"{key} is {then} in the checkpoint and {now} here" for key, (then, now) in expected.items()]
    assert said == f"{'; '.join(parts)}; the run goes on with what is here, and with the checkpoint's tokenizer"


CORPUS = """
data:
  class_path: ParallelText
  init_args: {train: "train.{lang}", validation: "train.{lang}", test: "train.{lang}", vocabulary: 60, batch_tokens: 96}
"""


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_the_vocabulary_belongs_to_the_checkpoint(process: bool, here: Path) -> None:
    """The corpus has grown, and strings have other hashes (FIELD_REPORTS 5.10)."""
    Path("corpus.yaml").write_text(CORPUS)
    for language, lines in (("en", ENGLISH), ("de", GERMAN)):
        Path(f"train.{language}").write_text("\n".join(lines * 9) + "\n")
    _, first = fit("--config=corpus.yaml")
    for language in ("en", "de"):
        with Path(f"train.{language}").open("a") as file:
            file.write("quite zany yaks vex jovial wizards\n" * 30)
    words = ["--config=corpus.yaml", "--trainer.max_steps=4", "--ckpt_path=last", "--test_after_fit=true"]
    if process:
        command = [sys.executable, "-m", "stabilize", "fit", "--config=tiny.yaml", *words]
        environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        said = ended.stderr
    else:
        said = "\n".join(told(*words))
    resumed = max(Path("runs").iterdir(), key=lambda run: run.stat().st_mtime_ns)
    assert state(resumed)["tokenizer"] == state(first)["tokenizer"]
    accounts = [json.loads((run / "data.json").read_text()) for run in (first, resumed)]
    assert accounts[0]["tokenizer"] == accounts[1]["tokenizer"]
    hashes = " in the checkpoint and ".join(account["train"]["sha256"][:12] for account in accounts)
    assert (
        f"the SHA-256 of the training text is {hashes} here; the run goes on with what is here, and with the ch" in said
    )
    assert "the epoch starts again" in said
    assert state(resumed)["global_step"] == 4


def test_a_checkpoint_is_opened_where_nothing_else_is(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In a fresh process, without text, config and command, with the sizes that the text had (FIELD_REPORTS 2.16)."""
    _, run = fit("--data.vocabulary=70")
    script = (
        "import sys, torch; from stabilize.task import TranslationTask; "
        "task = TranslationTask.load_from_checkpoint(sys.argv[1]); "
        "found = task.search(task.model, torch.tensor([[*task.tokenizer.encode('the dog sees'), 3]])); "
        "print(task.model.target_embedding.weight.shape[0], task.tokenizer.vocabulary, len(found))"
    )
    moved = tmp_path_factory.mktemp("elsewhere") / "weights.ckpt"
    (run / "checkpoints" / "last.ckpt").rename(moved)
    opened = subprocess.run(
        [sys.executable, "-c", script, moved.name],
        cwd=moved.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (opened.stdout, opened.returncode) == ("70 70 1\n", 0), opened.stderr


def test_all_that_counts_over_a_run_goes_on_in_another_folder(here: Path) -> None:
    """The best checkpoints, early stopping, the summary, the run in Weights & Biases; the last state is the last."""
    words = [
        "--trainer.max_steps=8",
        "--model.optimizer.lr=0.5",
        *VALIDATED,
        "--checkpoint.save_top_k=2",
        "--checkpoint.every=5",
    ]
    words += ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/nll"]
    words += ["--trainer.callbacks.patience=9", "--spike_guard.every=1", "--gradient_ratio.every=2"]
    _, whole = fit(*words)
    _, first = fit(*words, cue("SendSignal", name="SIGTERM", update=5))
    code, resumed = fit(*words, "--ckpt_path=last")
    assert code == 0
    assert [state(first, name)["global_step"] for name in ("last", "last-1")] == [5, 4]  # saved twice, kept once
    expected, found = state(whole), state(resumed)
    assert found["global_step"] == 8
    assert equal_weights(found, expected)
    for key, value in expected["callbacks"].items():
        if key.startswith("Checkpoints"):
            scores = [
                {Path(path).name: score.item() for path, score in part["best_k_models"].items()}
                for part in (found["callbacks"][key], value)
            ]
            assert scores[0] == scores[1]
            assert len(scores[0]) == 2
            assert len({score for run in (whole, first) for score in curve(run, "val/nll").values()}) > 2
            assert found["callbacks"][key]["best_model_score"] == value["best_model_score"]
            assert all(Path(path).is_file() for path in found["callbacks"][key]["best_k_models"])
        if key.startswith("EarlyStopping"):
            assert value["wait_count"] > 0
            assert found["callbacks"][key] == value
    summaries = [json.loads((run / "summary.json").read_text()) for run in (resumed, whole)]
    assert Path(summaries[0].pop("checkpoint")).resolve().parents[1].name == first.name
    assert summaries[0] == summaries[1]
    (record,) = resumed.glob("wandb/offline-run-*")
    assert record.name.endswith(f"-{first.name}")
    assert state(resumed, "last-1")["global_step"] < 8


@pytest.mark.parametrize("end", [["--trainer.max_steps=4"], ["--trainer.max_steps=-1", "--trainer.max_epochs=1"]])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_in_the_very_last_update(
    name: str, end: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command then does what was left to do; a longer run goes on as if it had been longer at once."""
    batches = ["--trainer.limit_train_batches=4", *VALIDATED[1:], "--trainer.val_check_interval=999"]
    words = [*batches, "--test_after_fit=true", *end]
    code, first = fit(*words, cue("SendSignal", name=name, update=4))
    assert code == 128 + signal.Signals[name]
    assert state(first)["global_step"] == 4
    assert "test/bleu" not in capsys.readouterr().out
    code, _ = fit(*words, "--ckpt_path=last")
    assert code == 0
    assert "test/bleu" in capsys.readouterr().out
    longer = [*batches, "--trainer.max_steps=9"]
    _, resumed = fit(*longer, f"--ckpt_path={first}/checkpoints/last.ckpt")
    _, whole = fit(*longer)
    assert equal_weights(state(resumed), state(whole))
    assert list(curve(resumed, "train/loss").items()) == list(curve(whole, "train/loss").items())[4:]


def test_a_test_ends_at_once(here: Path) -> None:
    _, first = fit()
    words = ["test", "--config=tiny.yaml", f"--ckpt_path={first}/checkpoints/last.ckpt"]
    assert main([*words, cue("SendSignal", name="SIGTERM")]) == 143
    assert not list(Path("runs").glob("*/translations/*"))


# ---------------------------------------------------------------------- SLURM

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"), "1"),
    **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0"),
}
"""What SLURM tells a process of a job."""


def stub(folder: Path, code: int = 0) -> Path:
    """A `scontrol` that writes down what it is asked."""
    (folder / "bin").mkdir(exist_ok=True)
    command = folder / "bin" / "scontrol"
    command.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\necho no such job >&2\nexit {code}\n')
    command.chmod(0o755)
    return command.parent


def test_a_slurm_job_is_queued_again_and_goes_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, value in JOB.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PATH", str(stub(here)), prepend=":")
    words = ["--trainer.max_steps=5", cue("SendSignal", name="SIGUSR1", update=3, times=2)]
    code, first = fit(*words)
    assert code == 128 + signal.SIGUSR1
    assert "_job4711_" in first.name
    assert state(first)["global_step"] == 3
    assert (here / "asked").read_text() == "requeue 4711\n"
    assert "job 4711 is queued again" in capsys.readouterr().out

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    code, resumed = fit(*words)
    assert code == 0
    assert f"goes on from {first}/checkpoints/last.ckpt" in capsys.readouterr().out
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert fit("--trainer.max_steps=2")[0] == 0
    assert fit("--trainer.max_steps=2")[0] == 0
    assert "goes on from" not in capsys.readouterr().out  # the same command twice in one script of the job
    code, other = fit(*words, "--seed_everything=2", "--trainer.max_steps=2")
    assert code == 0
    assert state(other)["global_step"] == 2
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    _, whole = fit("--trainer.max_steps=5")
    assert equal_weights(state(resumed), state(whole))
    assert [row["train/loss"] for run in (first, resumed) for row in rows(run) if "train/loss" in row] == list(
        curve(whole, "train/loss").values()
    )


def test_a_slurm_that_does_not_want_the_job_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, value in JOB.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PATH", str(stub(here, 1)), prepend=":")
    code, first = fit(cue("SendSignal", name="SIGUSR1", update=1))
    assert code == 128 + signal.SIGUSR1
    assert "scontrol requeue 4711 failed (no such job): submit the job again" in capsys.readouterr().out
    assert state(first)["global_step"] == 1


# ---------------------------------------------------------------------- a full disk


def test_a_full_disk_ends_the_run_with_its_last_state(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, small = fit("--trainer.max_steps=1")
    size = (small / "checkpoints" / "last.ckpt").stat().st_size
    full = cue("FillDisk", update=3, size=size // 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        code, run = fit("--trainer.max_steps=6", "--checkpoint.every=1", full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    last = run / "checkpoints" / "last.ckpt"
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: the checkpoint {last.with_name('next.ckpt')} cannot be written: ")
    assert "checkpoints of before are whole; the newest is " in said
    found = sorted(path.name for path in last.parent.iterdir())
    assert found == ["last-1.ckpt", "last.ckpt"]
    assert [state(run, name)["global_step"] for name in ("last", "last-1")] == [2, 1]
    code, resumed = fit("--trainer.max_steps=6", "--ckpt_path=last")
    assert code == 0
    assert state(resumed)["global_step"] == 6


def test_no_room_for_the_table_is_told_too(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/metrics.csv")

    monkeypatch.setattr(CSVLogger, "save", full)
    assert main(["fit", "--config=tiny.yaml", "--trainer.log_every_n_steps=1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: No space left on device (runs/metrics.csv); checkpoints of before are whole; ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--trainer.logger=false"],
            r"the checkpoint \S+/next.ckpt cannot be written: Read-only file system; checkpoints of before are whole",
        ),
        ([], r"\S+/metrics.csv cannot be used: Read-only file system; what is in the run folder is kept"),
    ],
)
def test_a_run_folder_that_becomes_read_only(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """After its first checkpoint, as a disk does that has an error."""
    opened = io.open

    def read_only(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if "runs/" in str(file) and mode[0] != "r" and [*here.glob("runs/*/checkpoints/last.ckpt")]:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))
        return opened(file, mode, *rest, **options)

    with monkeypatch.context() as patched:
        for module in (io, builtins):
            patched.setattr(module, "open", read_only)
        code, run = fit("--trainer.max_steps=6", "--checkpoint.every=1", *words)
    assert code == 2
    assert re.match(f"error: {said}", capsys.readouterr().err.splitlines()[-1])
    assert state(run)["global_step"] == 1
    code, resumed = fit("--trainer.max_steps=3", "--ckpt_path=last")
    assert code == 0
    assert state(resumed)["global_step"] == 3


@pytest.mark.soak
def test_a_disk_that_is_really_full(here: Path) -> None:
    """A disk of 3 MB in memory, for which one has to be root."""
    disk = here / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no disk of its own can be mounted here")
    try:
        words = ["fit", "--config=../tiny.yaml", "--trainer.max_steps=500", "--checkpoint.every=1"]
        words += ["--checkpoint.keep_last=999", "--trainer.log_every_n_steps=1"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "stabilize", *words]
        ended = subprocess.run(command, cwd=disk, env=environment, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 2
        assert "No space left on device" in ended.stderr or "cannot be written" in ended.stderr
        assert "Traceback" not in ended.stderr
        states = sorted(disk.glob("runs/*/checkpoints/last*.ckpt"))
        updates = [torch.load(path, weights_only=True)["global_step"] for path in states]
        assert len(updates) > 5
        assert sorted(updates) == list(range(1, len(updates) + 1))
        assert states[-1].name == "last.ckpt"
        assert torch.load(states[-1], weights_only=True)["global_step"] == len(updates)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.soak
def test_a_slurm_job_in_a_process_of_its_own(here: Path) -> None:
    """As `srun` starts it: the signal comes from outside, SLURM's SIGTERM right after it."""
    environment = os.environ | JOB | {"PATH": f"{stub(here)}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    words = ["--config=tiny.yaml", "--trainer.max_steps=60", "--trainer.log_every_n_steps=1"]
    command = [sys.executable, "-m", "stabilize", "fit", *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("update 10:"):
            process.send_signal(signal.SIGUSR1)
        if line.startswith("SIGUSR1: "):
            process.send_signal(signal.SIGTERM)
    process.stdout.close()
    assert process.wait() == 128 + signal.SIGUSR1, said
    assert (here / "asked").read_text() == "requeue 4711\n"
    environment |= {"SLURM_RESTART_COUNT": "1"}
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "goes on from" in again.stdout
    _, whole = fit("--trainer.max_steps=60")
    first, second = sorted(Path("runs").glob("*_job4711_*"))
    assert equal_weights(state(second), state(whole))
    assert 10 <= state(first)["global_step"] < 60
