"""A run that is killed goes on as if nothing had happened, whatever it was doing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkout import ROOT
from tests.commands.cues import FILES

BETWEEN = ("batch_start", "backward", "step", "batch_end", "meanwhile", "validation_batch")
AT_THE_START = ("set_up", "restored", "clock")
EVERYWHERE = [*BETWEEN, *FILES, *AT_THE_START]
CONFIG = """
seed_everything: 3
model:
  stabilizer:
    placement: B2T
    warmup: {class_path: Linear, init_args: {updates: 20, total: 120}}
  encoder_layers: 2
  decoder_layers: 2
  width: 16
  heads: 2
  hidden: 32
  dropout: 0.2
  optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.01}}
  clipping: ZClip
  validation_search: {beam: 1, maximum_ratio: 0.1, maximum_extra: 4}
data:
  class_path: SyntheticCorpus
  init_args: {train_pairs: 150, validation_pairs: 9, test_pairs: 4, vocabulary: 100, batch_tokens: 96,
              evaluation_batch_tokens: 40}
trainer:
  accelerator: cpu
  max_steps: 100
  accumulate_grad_batches: 2
  val_check_interval: 7
  check_val_every_n_epoch: null
  log_every_n_steps: 3
  num_sanity_val_steps: 0
  callbacks:
  - {class_path: EarlyStopping, init_args: {monitor: val/nll, patience: 1000}}
  - {class_path: tests.commands.cues.Record, init_args: {path: record.jsonl}}
checkpoint: {every: 3, save_top_k: 2}
gradient_ratio: {every: 2, activations: true, roles: true, figures: false}
layer_similarity: {every: 2, figures: false}
activation_scale: {every: 3, figures: false}
update_ratio: {every: 3, figures: false}
epsilon_audit: {every: 3, figures: false}
attention_entropy: {every: 3, figures: false}
spike_guard: {every: 4}
"""
STATEFUL = """
model:
  stabilizer:
    placement: PreNorm
    norm: {class_path: PowerNorm, init_args: {warmup: 10}}
    warmup: {class_path: Linear, init_args: {updates: 20, total: 120}}
trainer:
  max_steps: 60
  callbacks+:
  - {class_path: stabilize.callbacks.WeightAverage, init_args: {decay: 0.9}}
spike_guard: {every: 4, policy: rollback, deviations: 2.5, window: 20, back: 4, patience: 1000}
"""
"""What has more to remember, and goes back now and then: 2.5 standard deviations are no rare jump."""


def fit(folder: Path, more: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "more.yaml").write_text(more)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "stabilize", "fit", "--config=run.yaml", "--config=more.yaml", "--ckpt_path=auto"]
    command += words
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=7200)


def records(folder: Path) -> list[tuple[tuple[str, int], dict[str, Any]]]:
    """What was written down, each with its place in the run."""
    lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [(("update", line["update"]) if "update" in line else ("batch", line["batch"]), line) for line in lines]


def events(folder: Path) -> set[str]:
    """The lines about what stood out, of all run folders."""
    return {line for path in folder.glob("runs/*/events.jsonl") for line in path.read_text().splitlines()}


def newest(folder: Path) -> Path:
    """The run folder that was made last."""
    return max((folder / "runs").iterdir(), key=lambda run: run.stat().st_mtime_ns)


def unlike(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two checkpoints differ in any bit; a path counts by its name alone."""
    if isinstance(one, dict):
        one, other = ({Path(str(key)).name: value for key, value in part.items()} for part in (one, other))
        both = {key: unlike(one.get(key), other.get(key), f"{where}/{key}") for key in {**one, **other}}
        return [place for places in both.values() for place in places]
    if isinstance(one, list | tuple) and len(one) == len(other):
        return [place for k, pair in enumerate(zip(one, other, strict=True)) for place in unlike(*pair, f"{where}/{k}")]
    if isinstance(one, Tensor):
        return [] if one.equal(other) else [where]
    if isinstance(one, str) and one.endswith(".ckpt"):
        one, other = Path(one).name, Path(other).name
    return [] if one == other or (one != one and other != other) else [f"{where}: {one!r}, {other!r}"]


MAY_DIFFER = (
    *("/run/words", "/run/name", "/run/folder", "/run/line", "/callbacks/Die", "/dirpath", "/tokens_per_second"),
    ".next_quadratic_mean",
)
"""What says where, and how fast; the last of an average of weights, which has no use for what each forward proposes,
and which no checkpoint has."""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("more", "moments"),
    [("{}", [*EVERYWHERE, *BETWEEN, "clock"]), (STATEFUL, ["restored", "clock", "clock", "stepped_back", *BETWEEN])],
    ids=["plain", "stateful"],
)
def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_not(
    tmp_path: Path, more: str, moments: list[str]
) -> None:
    whole = fit(tmp_path / "whole", more)
    assert whole.returncode == 0, whole.stderr
    expected = dict(records(tmp_path / "whole"))
    assert len([place for place, _ in expected if place == "update"]) == (100 if more == "{}" else 60)

    chance, killed, survived = random.Random(6), tmp_path / "killed", []
    chance.shuffle(moments)
    for moment in moments:
        numbers = {"clock": (100, 1500), "set_up": (1, 1), "restored": (1, 1)} | dict.fromkeys(FILES, (1, 3))
        number = chance.randint(*numbers.get(moment, (3, 9)))
        words = ["--trainer.callbacks+=tests.commands.cues.Die", f"--trainer.callbacks.when={moment}"]
        words += [f"--trainer.callbacks.number={number}", f"--data.workers={chance.choice([0, 0, 2])}"]
        ended = fit(killed, more, *words)
        assert ended.returncode == -signal.SIGKILL, (moment, ended.stdout, ended.stderr)
        survived.append(moment)
    assert fit(killed, more).returncode == 0
    found = records(killed)
    assert {place for place, _ in found} == set(expected)
    assert all(line == expected[place] for place, line in found)
    assert events(killed) == events(tmp_path / "whole")
    assert ("rolled back" in str(events(killed))) == (more == STATEFUL)

    places = [newest(tmp_path / name) / "checkpoints" / "last.ckpt" for name in ("whole", "killed")]
    states = [torch.load(place, weights_only=True) for place in places]
    assert [place for place in unlike(*states) if not any(part in place for part in MAY_DIFFER)] == []
    again = len(found) - len(expected)
    print(f"{len(survived)} kills survived ({', '.join(survived)}); {again} records made again, all the same")
