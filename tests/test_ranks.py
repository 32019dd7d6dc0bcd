"""Two processes make the run of one with the same global batch, and a run goes on with more or fewer of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim import Optimizer

from stabilize.callbacks import Checkpoints
from stabilize.cli import main
from stabilize.commands import ranks
from stabilize.data.pairs import Pairs
from stabilize.decoding import BeamSearch
from tests.checkout import ROOT
from tests.tasks import ENGLISH, GERMAN, Sentences, curve, small_task, small_trainer
from tests.test_kills import CONFIG

CLOSE = {"rtol": 0.0, "atol": 1e-6}
EPOCH = 4
"""Updates of an epoch."""


class Keep(pl.Callback):
    """Each process leaves the gradients and the lines of its updates, and the scores it knows, in a file."""

    def __init__(self) -> None:
        self.lines: list[list[int]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.scores: list[dict[str, float]] = []
        self.rows: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, number: int) -> None:
        self.rows += batch.index.tolist()

    def on_before_optimizer_step(self, trainer: pl.Trainer, task: pl.LightningModule, optimizer: Optimizer) -> None:
        self.lines, self.rows = [*self.lines, self.rows], []
        self.gradients.append({name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None})

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.scores.append({key: value.item() for key, value in trainer.callback_metrics.items() if key[:4] == "val/"})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        seen = {"lines": self.lines, "gradients": self.gradients, "scores": self.scores}
        torch.save(seen, Path(trainer.default_root_dir) / f"seen_{trainer.global_rank}.pt")


def train(folder: Path, processes: int, updates: int, start: Path | None = None) -> dict[str, Any]:
    """A run with two batches an update, however many processes share them, and a check after every second one."""
    long = " ".join(ENGLISH)
    text = {
        "train": Pairs([*ENGLISH] * 4, [*GERMAN] * 4),
        "validation": Pairs([long, ENGLISH[1], ENGLISH[2]], [" ".join(GERMAN), GERMAN[1], GERMAN[2]]),
    }
    data = Sentences(text, batch_tokens=70, evaluation_batch_tokens=1)
    several = {"devices": processes, "strategy": "ddp_fork"} if processes > 1 else {}
    states = Checkpoints(every=1, keep_last=99, dirpath=folder / "states", monitor="val/bleu", mode="max")
    options = {"val_check_interval": 4 // processes, "check_val_every_n_epoch": None, "limit_val_batches": 1.0}
    options |= {"max_steps": updates, "accumulate_grad_batches": 2 // processes, "enable_checkpointing": True}
    task = small_task(validation_search=BeamSearch(beam=1, maximum_ratio=0.1, maximum_extra=4))
    trainer = small_trainer(folder, states, Keep(), **options, **several)
    trainer.fit(task, datamodule=data, ckpt_path=start)
    seen = [torch.load(folder / f"seen_{rank}.pt") for rank in range(processes)]
    lines = [sorted(line for rank in seen for line in rank["lines"][k]) for k in range(len(seen[0]["lines"]))]
    return {"lines": lines, "gradients": seen[0]["gradients"], "scores": [rank["scores"] for rank in seen]}


def state(folder: Path, update: int) -> Path:
    """The last state of a run that was saved after so many updates."""
    paths = sorted((folder / "states").glob("last*.ckpt"))
    return next(path for path in paths if torch.load(path, weights_only=True)["global_step"] == update)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def assert_close(found: dict[str, Any], expected: dict[str, Any], since: int = 0) -> None:
    assert found["lines"] == expected["lines"][since:]
    for one, other in zip(found["gradients"], expected["gradients"][since:], strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Any]]]:
    """A folder with the run of one process and that of two, and what they saw."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, {number: train(folder / str(number), number, 2 * EPOCH + 2) for number in (1, 2)}


def test_two_processes_are_one_with_the_same_global_batch(runs: tuple[Path, dict[int, dict[str, Any]]]) -> None:
    folder, seen = runs
    assert sorted(line for update in seen[1]["lines"][:EPOCH] for line in update) == [*range(24)]
    assert_close(seen[2], seen[1])
    found, expected = (weights(state(folder / str(number), 2 * EPOCH + 2)) for number in (2, 1))
    torch.testing.assert_close(found, expected, **CLOSE)
    for key in ("train/loss", "train/tokens", "lr", "val/nll", "val/bleu"):
        assert curve(folder / "2", key) == pytest.approx(curve(folder / "1", key), rel=1e-5)
        assert curve(folder / "1", key)


def test_both_ranks_know_the_score_though_one_has_the_long_lines(runs: tuple[Path, dict[int, dict[str, Any]]]) -> None:
    """Translations of very unequal length, and the best checkpoint chosen by BLEU (FIELD_REPORTS 2.17)."""
    folder, seen = runs
    one, other = seen[2]["scores"]
    assert one == other
    assert len(one) == EPOCH + 1
    assert list((folder / "2" / "states").glob("*step=*"))


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("update", [3, EPOCH])
def test_a_run_goes_on_with_other_ranks(
    before: int, after: int, update: int, runs: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path
) -> None:
    """The same lines in the same updates; as many ranks, the same bits."""
    folder, seen = runs
    found = train(tmp_path, after, 2 * EPOCH + 2, state(folder / str(before), update))
    assert_close(found, seen[after], since=update)
    resumed, expected = (weights(state(place, 2 * EPOCH + 2)) for place in (tmp_path, folder / str(after)))
    if before == after:
        assert all(resumed[key].equal(expected[key]) for key in expected)
    torch.testing.assert_close(resumed, expected, **CLOSE)
    losses = {step: loss for step, loss in curve(folder / str(after), "train/loss").items() if step >= update}
    assert curve(tmp_path, "train/loss") == pytest.approx(losses, rel=1e-5)


TWO = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.accumulate_grad_batches=1"]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The command that trains with `CONFIG`, in a process of its own."""
    (folder / "run.yaml").write_text(CONFIG)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "stabilize", "fit", "--config=run.yaml", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def callback(kind: str, **arguments: Any) -> list[str]:
    """Options that add one of the callbacks of `cues`."""
    added = [f"--trainer.callbacks+=tests.commands.cues.{kind}"]
    return added + [f"--trainer.callbacks.{key}={value}" for key, value in arguments.items()]


STOPPED = [
    '--trainer.callbacks+={"class_path": "tests.callbacks.poison.Poison", "init_args": {"updates": {"4": "nan"}}}',
    "--spike_guard.policy=stop",
    "--checkpoint.every=1",
]
ENDINGS = [
    (["SIGTERM", 0], 143),
    (["SIGTERM", 1], 143),
    (["SIGINT", 0], 130),
    (["SIGINT", 1], 130),
    (STOPPED, 3),
]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), pytest.param("SIGINT", 130, marks=pytest.mark.soak)])
def test_a_signal_to_one_ends_both(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
    Path("run.yaml").write_text(CONFIG)
    words = [*TWO, "--trainer.strategy=ddp_fork", *callback("SendSignal", name=name, update=3, rank=1)]
    assert main(["fit", "--config=run.yaml", *words]) == code
    said = capfd.readouterr()
    assert said.out.count("ended after update 3; it goes on with --ckpt_path runs/") == 1
    assert "error" not in said.err
    (last,) = tmp_path.glob("runs/*/checkpoints/last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 3


@pytest.mark.soak
@pytest.mark.parametrize(("ending", "code"), ENDINGS)
def test_processes_end_together_with_the_code_of_the_first(ending: list[Any], code: int, tmp_path: Path) -> None:
    """However long the first of them closes: a code of another would look like a death, which ends the first too."""
    words = ending
    if ending is not STOPPED:
        words = callback("SendSignal", name=ending[0], update=3, rank=ending[1])
    process = start(tmp_path, *TWO, *words, *callback("CloseLast"))
    said, _ = process.communicate(timeout=600)
    assert process.returncode == code, said
    assert json.loads((tmp_path / "codes").read_text()) == [0]
    assert said.count("ended after update 3; " if ending is not STOPPED else "stopped: update 4: ") == 1
    assert ranks.LOST not in said
    (last,) = tmp_path.glob("runs/*/checkpoints/last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 3


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["backward", "validation_batch"])
def test_a_rank_that_dies_ends_the_other(rank: int, when: str, tmp_path: Path) -> None:
    """Within seconds, with a sentence; the run then goes on with one process from its last state."""
    process = start(tmp_path, *TWO, *callback("Die", when=when, number=8, rank=rank))
    said, _ = process.communicate(timeout=600)  # whoever is left holds the pipe open
    seconds = time.time() - (tmp_path / "died").stat().st_mtime
    print(f"rank {rank} died in {when}: the other had ended after {seconds:.0f} s, exit code {process.returncode}")
    assert seconds < 60
    assert process.returncode == (-signal.SIGKILL if rank == 0 else 2)
    assert ranks.LOST in said
    alone = start(tmp_path, "--ckpt_path=last")
    said, _ = alone.communicate(timeout=600)
    assert alone.returncode == 0, said
    last = max(tmp_path.glob("runs/*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    assert torch.load(last, weights_only=True)["global_step"] == 100


def test_a_rank_does_not_outlive_the_process_that_started_it(tmp_path: Path) -> None:
    """Though nothing tells it: a rank that waits for a GPU."""
    waits = (
        "import time; from stabilize.commands import ranks; ranks.LOOKED_FOR_EVERY = 0.01; "
        "ranks.Watch().first(); print('waits', flush=True); time.sleep(600)"
    )
    first = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {waits!r}]).wait()"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", first], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.kill()
    assert process.stdout.read() == f"error: {ranks.LOST}\n"  # and its end, for it holds the pipe open
    process.wait()
    process.stdout.close()


WATCHES = """
import subprocess, sys, time
from stabilize.commands import ranks
ranks.LOOKED_FOR_EVERY = ranks.TIME_TO_END = 0.01
watch = ranks.Watch()
ended, waits = (subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) for script in sys.argv[1:])
watch.others([ended, waits])
"""
"""A first process that has started two others."""


@pytest.mark.parametrize(
    ("other", "then", "code"),
    [("raise SystemExit(1)", "time.sleep(600)", 2), ("", "ended.wait(); waits.communicate(); watch.over()", 0)],
)
def test_the_first_process_ends_where_another_has_failed(other: str, then: str, code: int) -> None:
    """And the others with it, but not where one is done sooner."""
    command = [sys.executable, "-c", f"{WATCHES}{then}", other, "input()"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert (f"error: {ranks.LOST}" in ended.stderr) == (code == 2)
