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

KILLS = 20
BETWEEN = ("batch_start", "backward", "step", "batch_end", "meanwhile")
IN_A_CHECKPOINT = ("half_written", "unnamed", "named")
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


def fit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(CONFIG)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "stabilize", "fit", "--config=run.yaml", "--ckpt_path=auto", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=7200)


def records(folder: Path) -> list[tuple[tuple[str, int], dict[str, Any]]]:
    """What was written down, each with its place in the run."""
    lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [(("update", line["update"]) if "update" in line else ("batch", line["batch"]), line) for line in lines]


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


MAY_DIFFER = ("/run/words", "/run/name", "/callbacks/Die", "/dirpath")


@pytest.mark.soak
def test_a_run_that_is_killed_twenty_times_is_the_run_that_was_not(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    expected = dict(records(tmp_path / "whole"))
    assert len([place for place, _ in expected if place == "update"]) == 100

    chance, killed, survived = random.Random(6), tmp_path / "killed", []
    moments = [*BETWEEN, *IN_A_CHECKPOINT, "validation_batch"] * 2 + ["validation_batch", "meanwhile", *IN_A_CHECKPOINT]
    chance.shuffle(moments)
    assert len(moments) >= KILLS
    for moment in moments[:KILLS]:
        number = chance.randint(1, 3) if moment in IN_A_CHECKPOINT else chance.randint(3, 9)
        words = ["--trainer.callbacks+=tests.commands.cues.Die", f"--trainer.callbacks.when={moment}"]
        words += [f"--trainer.callbacks.number={number}", f"--data.workers={chance.choice([0, 0, 2])}"]
        ended = fit(killed, *words)
        assert ended.returncode == -signal.SIGKILL, (moment, ended.stdout, ended.stderr)
        survived.append(moment)
    assert fit(killed).returncode == 0
    found = records(killed)
    assert {place for place, _ in found} == set(expected)
    assert all(line == expected[place] for place, line in found)

    places = [newest(tmp_path / name) / "checkpoints" / "last.ckpt" for name in ("whole", "killed")]
    states = [torch.load(place, weights_only=True) for place in places]
    assert [place for place in unlike(*states) if not any(part in place for part in MAY_DIFFER)] == []
    again = len(found) - len(expected)
    print(f"{len(survived)} kills survived ({', '.join(survived)}); {again} records made again, all the same")
