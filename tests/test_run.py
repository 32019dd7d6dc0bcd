"""Whole runs through the command, and what they leave: scores, files, every metric under its name."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import math
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sacrebleu
import torch
import wandb
import yaml

from stabilize.cli import main
from stabilize.task import TranslationTask
from tests import wandb_file
from tests.checkout import ROOT
from tests.tasks import ENGLISH, GERMAN, rows

BLANK = 2
"""The test line without a source."""

MODEL = """
    --model.stabilizer.placement B2T --model.stabilizer.warmup NoWarmup --model.decoder_stabilizer.placement PostNorm
    --model.decoder_stabilizer.warmup NoWarmup --model.decoder_stabilizer.epsilon.value 1e-4
    --model.encoder_layers 2 --model.decoder_layers 2 --model.width 16 --model.heads 2 --model.hidden 32
    --model.dropout 0
"""
TRAINING = """
    --model.optimizer torch.optim.Adam --model.optimizer.lr 0.01 --model.clipping GlobalNorm
    --trainer.max_steps 60 --trainer.log_every_n_steps 10 --trainer.val_check_interval 30
    --trainer.check_val_every_n_epoch null --gradient_ratio.every 20 --gradient_ratio.activations true
    --layer_similarity.every 30 --activation_scale.every 20 --update_ratio.every 20 --epsilon_audit.every 20
    --attention_entropy.every 20 --spike_guard.every 20 --test_after_fit true --data.baselines true
"""


class Text(NamedTuple):
    """A corpus in files: what is learnt is also what is asked, so that a small model has a score to be compared."""

    folder: Path

    @property
    def flags(self) -> list[str]:
        folder = self.folder
        paths = [f"--data.{split}={folder}/{split}.{{lang}}" for split in ("train", "validation", "test")]
        return ["--data", "ParallelText", *paths, "--data.vocabulary=60", "--data.batch_tokens=200"]

    @property
    def reference(self) -> Path:
        return self.folder / "test.de"


def stabilize(verb: str, where: Path, *flags: str) -> Path:
    """Run the command; the folder of the run."""
    common = ["--trainer.accelerator", "cpu", "--trainer.default_root_dir", str(where), *shlex.split(MODEL)]
    assert main([verb, *common, *flags, "--debug"]) == 0
    wandb.teardown()  # waits for its process, which writes the last records after the run is finished
    (folder,) = where.iterdir()
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp("text")
    blank = list(ENGLISH)
    blank[BLANK] = ""
    for split, sources in (("train", ENGLISH), ("validation", ENGLISH), ("test", blank)):
        for language, lines in (("en", sources), ("de", GERMAN)):
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return Text(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text: Text) -> Path:
    """The folder of a run that was trained, checked twice and tested."""
    return stabilize("fit", tmp_path_factory.mktemp("runs"), *text.flags, *shlex.split(TRAINING))


# ---------------------------------------------------------------------- scores


def sacrebleu_command(translations: Path, reference: Path) -> dict[str, dict[str, Any]]:
    """What the `sacrebleu` command says of two files, by metric."""
    command = [sys.executable, "-m", "sacrebleu", str(reference), "-i", str(translations), "-m", "bleu", "chrf"]
    said = subprocess.run([*command, "-w", "6"], capture_output=True, text=True, check=True).stdout
    return {score["name"].lower().rstrip("2"): score for score in json.loads(said)}


def test_the_scores_are_those_of_the_sacrebleu_command(run: Path, text: Text) -> None:
    said = sacrebleu_command(run / "translations" / "test.txt", text.reference)
    (logged,) = (row for row in rows(run) if "test/bleu" in row)
    written = json.loads((run / "translations" / "test.json").read_text())
    for name in ("bleu", "chrf"):
        assert logged[f"test/{name}"] == pytest.approx(said[name]["score"], abs=1e-4)
        assert written["scores"][name] == pytest.approx(said[name]["score"], abs=1e-4)
        assert dict(part.split(":") for part in written["signatures"][name].split("|")) == dict(
            part.split(":") for part in said[name]["signature"].split("|")
        )
    assert logged["test/bleu"] > 40, "a model that has not learnt its six sentences says little about the score"
    assert logged["test/bleu"] < 100


def test_translations_stand_line_for_line(run: Path) -> None:
    lines = (run / "translations" / "test.txt").read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    assert len(lines) == len(ENGLISH)
    assert lines[BLANK] == ""
    right = sum(line == reference for line, reference in zip(lines, GERMAN, strict=True))
    assert right >= 4
    assert not any(mark in line for line in lines for mark in ("▁", "@@", "⁇", "<s>", "</s>", "<unk>", "<pad>"))


def test_a_score_comes_with_its_provenance(run: Path) -> None:
    facts = json.loads((run / "translations" / "test.json").read_text())
    assert facts["versions"]["sacrebleu"] == sacrebleu.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["precision"] == "32-true"
    weights = run / "checkpoints" / "last.ckpt"
    assert facts["checkpoint"] == str(weights)
    assert facts["checkpoint_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert facts["text_sha256"] == json.loads((run / "data.json").read_text())["test"]["sha256"]
    assert facts["lines"] == len(ENGLISH)
    assert facts["empty"] == 1
    assert facts["update"] == 60
    assert facts["search"]["beam"] == 5
    assert [sample["source"] for sample in facts["samples"]] == ["" if k == BLANK else e for k, e in enumerate(ENGLISH)]
    assert [sample["reference"] for sample in facts["samples"]] == list(GERMAN)
    assert set(facts["scores"]) == {"bleu", "chrf", "chrf++", "ter", "bleu_word_by_word", "bleu_nearest_neighbour"}
    assert facts["text"].endswith("test.{lang} (en to de)")


# ---------------------------------------------------------------------- metrics

STACKS, BOTH = ("encoder", "decoder"), ("layer_001", "layer_002")
EVERY_LAYER = ("activation_rms", "update_ratio", "epsilon_audit", "attention_entropy", "attention_logit")
METRICS = {
    *(f"train/{name}" for name in ("loss", "nll", "perplexity", "tokens", "tokens_per_second")),
    "lr",
    *(f"gradient_norm/{stack}/{layer}" for stack in STACKS for layer in BOTH),
    "gradient_norm/total",
    "gradient_norm/total_clipped",
    *(
        f"{kind}gradient_ratio/{stack}/{name}"
        for kind in ("", "activation_")
        for stack in STACKS
        for name in ("layer_001", "first_to_last")
    ),
    *(
        f"layer_similarity{kind}/{stack}/{name}"
        for kind in ("", "_centered")
        for stack in STACKS
        for name in ("layer_001", "mean")
    ),
    *(f"{kind}/{stack}/{layer}" for kind in EVERY_LAYER for stack in STACKS for layer in BOTH),
    *(f"cross_attention_{what}/decoder/{layer}" for what in ("entropy", "logit") for layer in BOTH),
    *(f"activation_rms/{stack}/slope" for stack in STACKS),
    *(f"stability/{name}" for name in ("spikes", "spike_score/loss", "spike_score/gradient_norm", "diverged")),
    *(f"{split}/{name}" for split in ("val", "test") for name in ("loss", "nll", "bleu", "chrf")),
    *(f"{split}/{name}" for split in ("val", "test") for name in ("lines", "empty", "truncated")),
    "test/chrf++",
    "test/ter",
    "test/bleu_word_by_word",
    "test/bleu_nearest_neighbour",
}


def test_every_metric_has_the_name_that_was_promised(run: Path) -> None:
    with (run / "metrics.csv").open(newline="") as file:
        assert set(next(csv.reader(file))) == METRICS | {"epoch", "step"}


def test_the_steps_are_updates_and_never_go_back(run: Path) -> None:
    steps = [row["step"] for row in rows(run)]
    assert steps == sorted(steps)
    of = {key: [row["step"] for row in rows(run) if key in row] for key in METRICS}
    assert all(steps == sorted(set(steps)) for steps in of.values())
    assert of["train/loss"] == of["lr"] == list(range(9, 60, 10))
    assert of["gradient_ratio/decoder/first_to_last"] == of["gradient_norm/total"] == list(range(19, 60, 20))
    assert of["update_ratio/encoder/layer_001"] == of["stability/spikes"] == list(range(19, 60, 20))
    assert of["layer_similarity/encoder/mean"] == list(range(29, 60, 30))
    assert of["val/bleu"] == of["val/nll"] == [29, 59]
    assert of["test/bleu"] == [60]


def test_weights_and_biases_has_every_number_that_the_table_has(run: Path) -> None:
    """And in the same order: nothing was dropped for coming late."""
    logged = wandb_file.history(run)
    internal = [row["_step"] for row in logged]
    assert internal == list(range(len(logged)))
    steps = [row["trainer/global_step"] for row in logged]
    assert steps == sorted(steps)
    for key in METRICS:
        expected = [(row["step"], row[key]) for row in rows(run) if key in row]
        found = [(row["trainer/global_step"], row[key]) for row in logged if key in row]
        assert len(found) == len(expected) > 0, key
        for (step, value), (expected_step, expected_value) in zip(found, expected, strict=True):
            assert step == expected_step, key
            assert value == pytest.approx(expected_value), key
            assert math.isfinite(value), key


def test_weights_and_biases_knows_the_stabilizers_and_the_signature(run: Path) -> None:
    config = wandb_file.config(run)
    assert config["stabilizer"]["placement"]["class_path"].endswith(".B2T")
    assert (config["validation_lines"], config["test_lines"]) == (len(ENGLISH), len(ENGLISH))
    assert config["stabilizer"]["epsilon"]["init_args"] == {"value": 1e-5}
    assert config["decoder_stabilizer"]["placement"]["class_path"].endswith(".PostNorm")
    assert config["decoder_stabilizer"]["epsilon"]["init_args"] == {"value": 1e-4}
    assert config["encoder_layers"] == 2
    assert "tok:13a" in config["signatures"]["bleu"]


def test_everything_in_weights_and_biases_is_drawn_by_update(run: Path) -> None:
    assert wandb_file.axes(run) == {"trainer/global_step": "", "*": "trainer/global_step"}


def test_the_summary_sorts_runs_and_is_in_the_folder_too(run: Path) -> None:
    written = json.loads((run / "summary.json").read_text())
    sent = wandb_file.summary(run)
    assert {key: sent[key] for key in written} == written
    best = max(row["val/bleu"] for row in rows(run) if "val/bleu" in row)
    assert written["best/val_bleu"] == pytest.approx(best)
    assert written["best/val_bleu_update"] in (30, 60)
    assert "tok:13a" in written["best/bleu_signature"]
    assert written["stability/verdict"] == "healthy"
    ratios = [v for row in rows(run) for k, v in row.items() if re.fullmatch(r"gradient_ratio/\w+/layer_\d+", k)]
    assert written["stability/worst_ratio"] == pytest.approx(max(ratios, key=lambda ratio: abs(math.log(ratio))))
    assert "stability/diverged_at" not in written
    assert 1 < written["train/word_entropy"] < math.log(60)


def test_weights_and_biases_has_samples_and_pictures(run: Path) -> None:
    logged = wandb_file.history(run)
    media = run / "wandb" / "latest-run" / "files"
    tables = [row["samples.path"] for row in logged if "samples.path" in row]
    assert len(tables) == 2
    last = json.loads((media / tables[-1]).read_text())
    assert last["columns"] == ["source", "reference", "translation"]
    assert [row[:2] for row in last["data"]] == [list(pair) for pair in zip(ENGLISH, GERMAN, strict=True)][:5]
    pictures = {
        f"{kind}_{stack}"
        for kind in (
            "gradient_ratio",
            "activation_gradient_ratio",
            "layer_similarity",
            "similarity_matrix",
            "layer_similarity_centered",
            "similarity_matrix_centered",
            *EVERY_LAYER,
        )
        for stack in STACKS
    } | {f"cross_attention_{what}_decoder" for what in ("entropy", "logit")}
    assert {path.stem for path in (run / "figures").glob("*.png")} == pictures
    suffix = ".filenames"
    sent = {key.removesuffix(suffix): row[key] for row in logged for key in row if key.endswith(suffix)}
    assert set(sent) == {f"figures/{name}" for name in pictures}
    assert all((media / picture).is_file() for (picture,) in sent.values())


def test_the_workspace_shows_what_a_run_logs(run: Path, tmp_path: Path) -> None:
    """Each key and pattern of the workspace that `dashboard` builds is one of this run."""
    assert main(["dashboard", "--spec", str(tmp_path / "spec.json")]) == 0
    spec = json.loads((tmp_path / "spec.json").read_text())["spec"]["section"]
    logged = {key.partition(".")[0] for row in wandb_file.history(run) for key in row}
    panels = [panel for section in spec["panelBankConfig"]["sections"] for panel in section["panels"]]
    curves = [panel["config"] for panel in panels if panel["viewType"] == "Run History Line Plot"]
    assert len(curves) > 15
    for curve in curves:
        assert curve["xAxis"] == "trainer/global_step"
        assert set(curve["metrics"]) <= logged | {"stability/skipped_updates", "stability/rollbacks"}  # of a policy
        pattern = curve.get("metricRegex")
        assert curve["metrics"] or len([key for key in logged if re.search(pattern, key)]) <= 2, curve
        assert curve["metrics"] or any(re.search(pattern, key) for key in logged), curve
    pictures = {key for panel in panels for key in panel["config"].get("mediaKeys", [])}
    assert pictures
    assert pictures <= logged
    assert "samples" in json.dumps([panel["config"] for panel in panels if panel["viewType"] == "Weave"])
    (runs,) = spec["runSets"]
    columns = {column.removeprefix("summary:") for column in runs["runFeed"]["columnOrder"]} - {"run:displayName"}
    only_where_lost = {"stability/diverged_at"}
    assert columns - only_where_lost <= set(wandb_file.summary(run)) | logged


def test_the_tools_of_weights_and_biases_take_the_run(run: Path) -> None:
    """`wandb sync` would send it, and `wandb beta leet` shows it in a terminal until it is told to quit."""
    (offline,) = (run / "wandb").glob("offline-run-*")
    wandb = Path(sys.executable).parent / "wandb"
    listed = subprocess.run([wandb, "sync", "--dry-run", offline], capture_output=True, text=True)
    assert "Would sync 1 run" in listed.stdout + listed.stderr
    ours, theirs = pty.openpty()
    shown = subprocess.Popen([wandb, "beta", "leet", offline], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen = b""
    while b"help" not in screen:
        screen += os.read(ours, 65536)
    os.write(ours, b"q")
    with contextlib.suppress(OSError):  # the terminal is gone when the program is
        while os.read(ours, 65536):
            pass
    assert shown.wait() == 0


def test_a_run_of_a_study(text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the name and the group that are asked for, as many threads, and a validation that translates nothing."""
    monkeypatch.setenv("WANDB_NAME", "pre_ln-depth=3")
    monkeypatch.setenv("WANDB_RUN_GROUP", "depth")
    threads = torch.get_num_threads()
    flags = ["--threads=1", "--model.validation_scores=[]", "--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    try:
        folder = stabilize("fit", tmp_path, *text.flags, *flags, "--trainer.check_val_every_n_epoch=null")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    (record,) = [record.run for record in wandb_file.records(folder) if record.HasField("run")]
    assert (record.display_name, record.run_group) == ("pre_ln-depth=3", "depth")
    (validated,) = [row for row in rows(folder) if "val/nll" in row]
    assert not {"val/bleu", "val/lines"} & validated.keys()


# ---------------------------------------------------------------------- the folder, and going on from it


def test_the_folder_has_what_was_promised(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names == {
        *("config.yaml", "checkpoints", "data.json", "metrics.csv", "summary.json"),
        *("figures", "translations", "wandb", "tokenizer.model"),
    }
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert resolved["model"]["stabilizer"]["placement"]["class_path"].endswith("B2T")
    assert (run / "checkpoints" / "last.ckpt").is_file()


def test_a_checkpoint_of_the_command_loads_without_it(run: Path) -> None:
    path = run / "checkpoints" / "last.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] == 60
    task = TranslationTask.load_from_checkpoint(path)
    assert task.tokenizer.model == (run / "tokenizer.model").read_bytes()
    found = task.search(task.model, torch.tensor([[*task.tokenizer.encode(ENGLISH[0]), 3]]))
    written = (run / "translations" / "test.txt").read_text(encoding="utf-8").split("\n")
    assert task.tokenizer.decode(found[0].ids) == written[0]


def test_testing_a_checkpoint_repeats_the_score_at_its_update(run: Path, text: Text, tmp_path: Path) -> None:
    flags = [*text.flags, "--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    tested = stabilize("test", tmp_path / "test", *flags)
    for name in ("test.txt", "test.json"):
        there, here = (folder / "translations" / name for folder in (run, tested))
        if name == "test.txt":
            assert here.read_text() == there.read_text()
        else:
            old, new = json.loads(there.read_text()), json.loads(here.read_text())
            assert new["update"] == old["update"] == 60
            assert new["scores"] == {key: old["scores"][key] for key in ("bleu", "chrf", "chrf++", "ter")}
            assert new["samples"] == old["samples"]
            for key in ("text_sha256", "checkpoint", "checkpoint_sha256", "precision", "versions"):
                assert new[key] == old[key]
    assert [row["step"] for row in rows(tested)] == [60]
    assert [row["trainer/global_step"] for row in wandb_file.history(tested)] == [60]


def test_prediction_writes_the_translations(run: Path, text: Text, tmp_path: Path) -> None:
    flags = [*text.flags, "--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    folder = stabilize("predict", tmp_path / "predict", *flags, "--trainer.logger", "false")
    expected = (run / "translations" / "test.txt").read_text()
    assert (folder / "translations" / "predict.txt").read_text() == expected


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_goes_on_where_another_ended(run: Path, text: Text, tmp_path: Path) -> None:
    """The numbers follow on, and no step is there twice."""
    flags = [*text.flags, *shlex.split(TRAINING), "--test_after_fit", "false", "--trainer.max_steps", "70"]
    flags += ["--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "--gradient_ratio.activations", "false"]
    resumed = stabilize("fit", tmp_path / "resumed", *flags)
    training = [row for row in rows(resumed) if "train/tokens" in row]
    assert [row["step"] for row in training] == [69]
    before = [row["train/tokens"] for row in rows(run) if "train/tokens" in row]
    assert training[0]["train/tokens"] - before[-1] == pytest.approx(before[-1] - before[-2], rel=0.2)
    steps = [row["trainer/global_step"] for row in wandb_file.history(resumed)]
    assert steps == sorted(steps)
    assert min(steps) >= 60


# ---------------------------------------------------------------------- what others do to a run

TALKATIVE = """
import wandb
from lightning.pytorch import Callback


class Talkative(Callback):
    def on_train_batch_end(self, trainer, *_):
        wandb.log({"mine/without_step": 1.0})
        wandb.log({"mine/with_step": 1.0}, step=1000 + trainer.global_step)
"""


def test_numbers_survive_a_callback_that_logs_by_itself(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of its own, or none: the run's numbers all arrive, on their own axis (FIELD_REPORTS 3.7)."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    (tmp_path / "own.yaml").write_text("trainer: {callbacks: [{class_path: talkative.Talkative}]}\n")
    flags = [*text.flags, *shlex.split(TRAINING), "--test_after_fit", "false", "-c", str(tmp_path / "own.yaml")]
    logged = wandb_file.history(folder := stabilize("fit", tmp_path / "runs", *flags))
    assert sum("mine/with_step" in row for row in logged) > 0
    for key in ("train/loss", "val/bleu", "gradient_ratio/decoder/first_to_last", "stability/spikes"):
        expected = [(row["step"], row[key]) for row in rows(folder) if key in row]
        found = [(row["trainer/global_step"], row[key]) for row in logged if key in row]
        assert found == [(step, pytest.approx(value)) for step, value in expected]
        assert found


def started(where: Path, text: Text, *flags: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    words = ["fit", f"--trainer.default_root_dir={where}", "--trainer.accelerator=cpu", *text.flags, *flags]
    command = [sys.executable, "-m", "stabilize", *words, *shlex.split(MODEL)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_run_that_is_killed_leaves_its_numbers(text: Text, tmp_path: Path) -> None:
    """In the table: all before the update that was said last (FIELD_REPORTS 3.5)."""
    process = started(tmp_path, text, "--trainer.max_steps=1000000", "--trainer.log_every_n_steps=10")
    assert process.stdout is not None
    try:
        updates = (int(found[1]) for line in process.stdout if (found := re.match(r"update (\d+):", line)))
        said = next(update for update in updates if update >= 50)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    (folder,) = tmp_path.iterdir()
    steps = [row["step"] for row in rows(folder) if "train/loss" in row]
    assert steps[: said // 10 - 1] == list(range(9, said - 10, 10))
    assert json.loads((folder / "summary.json").read_text())["stability/verdict"]


def test_two_processes_make_one_run(text: Text, tmp_path: Path) -> None:
    """Flags as an agent of a sweep writes them: one folder, one voice, one model (FIELD_REPORTS 3.9)."""
    flags = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_steps=20", "--model.optimizer.lr=0.01"]
    flags += ["--trainer.log_every_n_steps=10", "--gradient_ratio.every=10", "--spike_guard.every=10"]
    process = started(tmp_path, text, *flags)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, output
    (folder,) = tmp_path.iterdir()
    assert len([line for line in output.splitlines() if line.startswith("update 10:") and "val/" not in line]) == 1
    assert output.count("verdict: ") == 1
    assert output.replace("\n", "").count(str(folder)) == 1
    found = [row["train/tokens"] for row in rows(folder) if "train/tokens" in row]
    assert len(found) == 2
    assert json.loads((folder / "summary.json").read_text())["stability/verdict"]
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1
