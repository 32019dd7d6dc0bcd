"""Real text from a small model to scores: the same at any number of processes, and the `sacrebleu` command's."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilize import kernels
from stabilize.cli import main
from stabilize.commands.translate import Translator
from stabilize.data import ParallelText
from stabilize.decoding import BeamSearch
from stabilize.strategies import NoWarmup, Stabilizer
from stabilize.task import TranslationTask
from tests.checkout import ROOT
from tests.tasks import small_trainer

TEXTS = {
    "multi30k": ("multi30k/train.{lang}.gz", "multi30k/test_2016_flickr.{lang}.gz"),
    "wmt": ("wmt/wmt-mix-10k.train.{lang}.gz", "wmt/generaltest2022.en-de.{lang}.gz"),
}


def head(path: Path, count: int | None) -> list[bytes]:
    with gzip.open(path) as file:
        return list(itertools.islice(file, count))


def part_of(shared: Path, folder: Path, name: str, learnt: int, new: int | None) -> None:
    """Write train.{en,de}, the first lines of a text, and test.{en,de}: these, and lines that are new."""
    for language in ("en", "de"):
        train, test = (shared / path.format(lang=language) for path in TEXTS[name])
        known = head(train, learnt)
        (folder / f"train.{language}").write_bytes(b"".join(known))
        (folder / f"test.{language}").write_bytes(b"".join(known + head(test, new)))


def data(folder: Path, **options: Any) -> ParallelText:
    train, test = (str(folder / f"{split}.{{lang}}") for split in ("train", "test"))
    return ParallelText(train=train, validation=train, test=test, vocabulary=500, **options)


def trained(folder: Path, updates: int) -> TranslationTask:
    """A small model that knows its training text well enough to score something."""
    shape = {"encoder_layers": 1, "decoder_layers": 1, "width": 64, "heads": 4, "hidden": 128, "dropout": 0.0}
    adam = functools.partial(torch.optim.Adam, lr=5e-3)
    search = BeamSearch(beam=3, maximum_ratio=1.5, maximum_extra=5)
    task = TranslationTask(Stabilizer(warmup=NoWarmup()), optimizer=adam, label_smoothing=0.0, search=search, **shape)
    trainer = small_trainer(folder / "training", max_steps=updates, log_every_n_steps=updates)
    trainer.fit(task, datamodule=data(folder, batch_tokens=1000))
    return task


def files_written(
    task: TranslationTask, text: Path, processes: int, *, folder: str, precision: Any = "32-true"
) -> dict[str, bytes]:
    """The files that a test with so many processes writes."""
    strategy = {"devices": processes, "strategy": "ddp_fork"} if processes > 1 else {}
    lines = data(text, evaluation_batch_tokens=2000)
    lines.given_tokenizer = task.tokenizer
    trainer = small_trainer(text / folder, precision=precision, **strategy)
    trainer.test(task, datamodule=lines, verbose=False)
    return {name: (text / folder / "translations" / name).read_bytes() for name in ("test.txt", "test.json")}


def sacrebleu_command(folder: Path) -> list[dict[str, Any]]:
    """What the `sacrebleu` command says of a written output, every digit of it."""
    command = [sys.executable, "-m", "sacrebleu", "../test.de", "-i", "translations/test.txt", "-w", "12"]
    command += ["-m", "bleu", "chrf", "ter"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return json.loads(said)


@pytest.mark.parametrize(
    ("name", "learnt", "new", "updates"),
    [
        ("multi30k", 30, 12, 80),
        ("wmt", 12, 6, 60),
        pytest.param("multi30k", 2000, None, 600, marks=pytest.mark.soak),
        pytest.param("wmt", 1000, None, 600, marks=pytest.mark.soak),
    ],
)
def test_batches_and_processes_change_no_byte_and_scores_are_those_of_the_sacrebleu_command(
    shared_data: Path, tmp_path: Path, name: str, learnt: int, new: int | None, updates: int
) -> None:
    part_of(shared_data, tmp_path, name, learnt, new)
    task = trained(tmp_path, updates)
    found = {processes: files_written(task, tmp_path, processes, folder=str(processes)) for processes in (1, 2, 3)}
    assert found[1] == found[2] == found[3]

    sources = (tmp_path / "test.en").read_bytes().split(b"\n")[:-1]
    with kernels.constant_weights():  # as `stabilize translate` has it
        for tokens in (1, 300, 4096):
            translations = Translator(task.eval(), task.search, batch_tokens=tokens)(sources)
            assert "".join(f"{text}\n" for ((text, _),) in translations).encode() == found[1]["test.txt"]

    facts = json.loads(found[1]["test.json"])
    assert facts["lines"] == facts["of"] == len((tmp_path / "test.de").read_bytes().split(b"\n")) - 1
    assert facts["scores"]["bleu"] > 0.1, "scores of nothing would say little"
    for score, said in zip(("bleu", "chrf", "ter"), sacrebleu_command(tmp_path / "1"), strict=True):
        assert f"{facts['scores'][score]:.12f}" == f"{said['score']:.12f}"
        assert facts["signatures"][score] == said["signature"]


@pytest.mark.soak
def test_in_bfloat16_the_number_of_processes_changes_no_byte(shared_data: Path, tmp_path: Path) -> None:
    """Batches are cut before they are shared out; other batches may change a line there."""
    part_of(shared_data, tmp_path, "multi30k", 300, 400)
    task = trained(tmp_path, 250)
    found = {
        processes: files_written(task, tmp_path, processes, folder=f"bfloat16_{processes}", precision="bf16-mixed")
        for processes in (1, 2, 3)
    }
    assert found[1] == found[2] == found[3]
    facts = json.loads(found[1]["test.json"])
    assert facts["precision"] == "bf16-mixed"
    assert facts["scores"]["bleu"] > 1
    assert found[1]["test.txt"] != files_written(task, tmp_path, 1, folder="float32")["test.txt"]


RUN = """
model: {encoder_layers: 1, decoder_layers: 1, width: 64, heads: 4, hidden: 128, dropout: 0.0, search: {beam: 3}}
data:
  class_path: ParallelText
  init_args: {train: "train.{lang}", validation: "train.{lang}", test: "test.{lang}", evaluation_batch_tokens: 200}
trainer: {accelerator: cpu}
"""


@pytest.mark.soak
def test_processes_that_the_command_starts_change_no_byte(shared_data: Path, tmp_path: Path) -> None:
    """Each with a Python of its own (`ddp`), not a copy of this one."""
    part_of(shared_data, tmp_path, "multi30k", 30, 12)
    trained(tmp_path, 80).trainer.save_checkpoint(tmp_path / "weights.ckpt")
    (tmp_path / "run.yaml").write_text(RUN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "stabilize", "test", "--config=run.yaml", "--ckpt_path=weights.ckpt"]
    for name, flags in (("one", []), ("two", ["--trainer.devices=2", "--trainer.strategy=ddp"])):
        words = [*command, f"--trainer.default_root_dir={name}", "--model.stabilizer.warmup=NoWarmup", *flags]
        ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    one, two = (next((tmp_path / name).glob("*/translations")) for name in ("one", "two"))
    for file in ("test.txt", "test.json"):
        assert (one / file).read_bytes() == (two / file).read_bytes()
    assert json.loads((one / "test.json").read_text(encoding="utf-8"))["scores"]["bleu"] > 1


def test_one_command_goes_from_wmt_text_to_the_same_scores_again(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """configs/experiments/wmt_subset.yaml, cut short: `pytest -m experiment -k wmt` runs the whole of it."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "data").symlink_to(shared_data)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = f"--config={ROOT / 'configs' / 'experiments' / 'wmt_subset.yaml'}"
    search = [f"--model.search.{flag}" for flag in ("beam=2", "maximum_ratio=0", "maximum_extra=6", "minimum_length=5")]
    short = ["--trainer.max_steps=2", "--trainer.limit_test_batches=2", "--data.evaluation_batch_tokens=300"]
    short += [
        "--data.vocabulary=1000",
        "--data.batch_tokens=300",
        "--model.encoder_layers=1",
        "--model.decoder_layers=1",
    ]
    for name in ("one", "two"):
        assert main(["fit", config, *search, *short, f"--trainer.default_root_dir={name}"]) == 0
    one, two = (next((tmp_path / "here" / name).glob("*/translations")) for name in ("one", "two"))
    assert (one / "test.txt").read_bytes() == (two / "test.txt").read_bytes()
    assert (one / "test.txt").read_text(encoding="utf-8").strip(), "equal outputs of nothing would say little"
    facts, again = (json.loads((folder / "test.json").read_text(encoding="utf-8")) for folder in (one, two))
    assert facts["scores"] == again["scores"]
    assert facts["text_sha256"] == again["text_sha256"]
    assert facts["lines"] < facts["of"] == 2037
