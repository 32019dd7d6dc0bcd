"""`stabilize probe`: what it prints and writes, and that its numbers are those of the first update."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.image import imread

from stabilize.cli import main
from stabilize.commands import training
from stabilize.commands.overlays import gathered
from stabilize.commands.probe import LISTS
from stabilize.commands.profiles import BARS, spark
from tests.checkout import ROOT

TINY = """
model:
  stabilizer: {placement: B2T}
  encoder_layers: 2
  decoder_layers: 3
  width: 8
  heads: 2
  hidden: 8
  dropout: 0.1
data:
  class_path: SyntheticCorpus
  init_args: {train_pairs: 200, validation_pairs: 4, test_pairs: 0, vocabulary: 60, batch_tokens: 96}
trainer: {accelerator: cpu}
"""
BY_LAYER = {
    "activation_rms": 0,
    "similarity": 1,
    "similarity_centered": 1,
    "gradient_norm": 0,
    "activation_gradient_norm": 0,
}
"""The lists of a stack in probe.json, and by how many they are shorter than the stack."""
NUMBERS = {"first_to_last", "slope", "activation_slope", "rms_growth", "mean_similarity"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with `tiny.yaml` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def probed(*words: str) -> dict[str, Any]:
    """What probe.json says after the command."""
    assert main(["probe", "-c", "tiny.yaml", "--out", "found", *words]) == 0
    return json.loads(Path("found/probe.json").read_text(encoding="utf-8"))


def test_strategies_and_depths_side_by_side(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, depths = ["post_ln", "pre_ln", "b2t", "deepnorm"], [2, 4]
    found = probed("--strategies", *names, "--depths", *map(str, depths))
    assert [(probe["strategy"], probe["layers"]) for probe in found["probes"]] == [
        (name, {"encoder": depth, "decoder": depth}) for name in names for depth in depths
    ]
    for probe in found["probes"]:
        assert probe["refused"] is None
        assert set(probe["stacks"]) == {"encoder", "decoder"}
        for stack in probe["stacks"].values():
            assert set(stack) == {*BY_LAYER, *NUMBERS, "verdict", "words", "derived"}
            for key, fewer in BY_LAYER.items():
                assert len(stack[key]) == probe["layers"]["encoder"] - fewer
            assert all(math.isfinite(number) for key in (*BY_LAYER, *NUMBERS) for number in _numbers(stack[key]))
            assert (stack["derived"] is not None) == (probe["strategy"] in ("post_ln", "pre_ln"))
    said = capsys.readouterr().out
    for name in names:
        assert len(re.findall(rf"^{name} +[24] [{BARS}]+ ", said, re.MULTILINE)) == 4  # a row a stack and depth
        assert re.search(rf"^{name}: encoder \w+ at", said, re.MULTILINE)
    assert "healthy: gradient norm and activation RMS" in said  # the rule
    assert "derived: pre-norm: flat" in said
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
    assert sorted(path.name for path in here.iterdir()) == ["found", "tiny.yaml"]
    pictures = sorted((here / "found").glob("*.png"))
    assert [picture.stem for picture in pictures] == ["activation_rms", "gradient", "similarity"]
    assert all(imread(picture).std() > 0 for picture in pictures)


def _numbers(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def test_one_config_is_shown_layer_by_layer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--config=tiny.yaml"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^ +1( +[\d.]+){8} $", said, re.MULTILINE)
    assert re.search(r"^ +3 {10,}[\d.]+ ", said, re.MULTILINE)  # the decoder is deeper
    assert re.search(r"^tiny: encoder \w+ \(layer 1 receives", said, re.MULTILINE)
    (folder,) = (here / "probes").iterdir()
    assert f"wrote {folder.relative_to(here)}: probe.json, gradient.png" in said
    (found,) = json.loads((folder / "probe.json").read_text())["probes"]
    assert (found["strategy"], found["layers"]) == ("tiny", {"encoder": 2, "decoder": 3})


def test_a_single_layer_has_no_slope(here: Path) -> None:
    (found,) = probed("--depths", "1")["probes"]
    assert found["stacks"]["encoder"]["slope"] is None
    assert found["stacks"]["encoder"]["verdict"] == "healthy"


def test_the_same_seed_finds_the_same_and_all_models_start_alike(here: Path) -> None:
    twice = [probed("--strategies", "pre_ln", "post_ln", "--depths", "2", "3") for _ in range(2)]
    assert twice[0] == twice[1]
    (alone,) = probed("--strategies", "post_ln", "--depths", "3")["probes"]
    assert alone == twice[0]["probes"][3]
    (other,) = probed("--strategies", "post_ln", "--depths", "3", "--seed_everything", "2")["probes"]
    assert other["stacks"] != alone["stacks"]


@pytest.mark.parametrize("strategy", ["admin", "hyper_connections"])
def test_the_numbers_are_those_of_a_first_update(strategy: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, and with what Admin measures before it."""
    monkeypatch.setattr(training.Trainer, "explain", lambda *_: None)  # the card of fit draws random numbers
    (found,) = probed("--strategies", strategy)["probes"]
    words = ["-c", str(ROOT / f"configs/strategies/{strategy}.yaml"), "--trainer.logger=CSVLogger"]
    words += ["--trainer.logger.save_dir=logged", "--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
    words += ["--gradient_ratio.every=1", "--gradient_ratio.activations=true", "--layer_similarity.every=1"]
    assert main(["fit", "-c", "tiny.yaml", *words]) == 0
    (path,) = here.glob("logged/**/metrics.csv")
    logged: dict[str, str] = {}
    for row in csv.DictReader(path.read_text().splitlines()):
        logged |= {key: value for key, value in row.items() if value}
    for stack, depth in found["layers"].items():
        here_found = found["stacks"][stack]
        for layer in range(depth):
            key = f"{stack}/layer_{layer + 1:03d}"
            assert here_found["gradient_norm"][layer] == pytest.approx(float(logged[f"gradient_norm/{key}"]), rel=1e-4)
            if layer < depth - 1:
                for kind, mine in (("", "similarity"), ("_centered", "similarity_centered")):
                    value = float(logged[f"layer_similarity{kind}/{key}"])
                    assert here_found[mine][layer] == pytest.approx(value, abs=1e-4)
        ratio = here_found["activation_gradient_norm"][0] / here_found["activation_gradient_norm"][-1]
        assert ratio == pytest.approx(float(logged[f"activation_gradient_ratio/{stack}/first_to_last"]), rel=1e-4)


def test_what_cannot_be_built_is_a_row_and_the_rest_is_measured(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    norm = ["--model.stabilizer.norm", "MaskedBatchNorm"]
    refused, measured, gated = probed("--strategies", "qk_norm", "pre_ln", "rezero", *norm)["probes"]
    assert refused["refused"].startswith("QKNorm cannot be combined with MaskedBatchNorm")
    assert refused["stacks"] == {}
    assert measured["stacks"]["decoder"]["verdict"] == "healthy"
    assert gated["stacks"]["encoder"]["verdict"] == "no gradient"
    assert gated["stacks"]["encoder"]["first_to_last"] is None
    said = capsys.readouterr().out
    assert len(re.findall(r"^qk_norm +\d +refused", said, re.MULTILINE)) == 2
    assert "qk_norm: 2+3 layers refused: QKNorm cannot be combined with" in said
    assert main(["probe", "-c", "tiny.yaml", "--strategies", "qk_norm", "--out", "found", *norm]) == 2
    assert capsys.readouterr().err.startswith("error: QKNorm cannot be combined with MaskedBatchNorm")


def test_a_strategy_is_found_by_path_and_settings_come_in_yaml(here: Path) -> None:
    (here / "mine.yml").write_text("model: {stabilizer: {placement: SandwichNorm}}\n")
    (here / "pre_ln.yaml").write_text("model: {stabilizer: {placement: PeriNorm}}\n")
    alike = probed("--strategies", "pre_ln.yaml", "pre_ln")["probes"]
    assert [probe["strategy"] for probe in alike] == ["pre_ln.yaml", "pre_ln"]
    assert alike[0]["stacks"] != alike[1]["stacks"]
    (here / "study.yaml").write_text("strategies: [mine.yml, pre_ln]\ndepths: [2]\ntokens: 30\n")
    found = probed("-c", "study.yaml")
    assert [probe["strategy"] for probe in found["probes"]] == ["mine", "pre_ln"]
    assert found["sentences"] == 1
    assert probed("-c", "study.yaml", "--tokens=96")["sentences"] > 1


def test_a_config_of_fit_will_do(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "-c", "tiny.yaml", "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    printed["model"]["compile_layers"] = printed["model"]["checkpoint_layers"] = True
    (here / "printed.yaml").write_text(yaml.safe_dump(printed))
    assert probed("-c", "printed.yaml")["probes"][0]["stacks"] == probed()["probes"][0]["stacks"]


WRONG = {
    "unknown strategy": (["--strategies", "post_ln", "b2"], "no strategy config b2; nearest: b2t"),
    "no strategy": (["--strategies"], "strategies is empty; --strategies post_ln pre_ln would do"),
    "no such path": (["--strategies", "gone.yaml"], "the config gone.yaml cannot be read: No such file"),
    "a mistake in a strategy": (["--strategies", "bad.yaml"], "model.stabilizer.placement is PrNorm (in bad.yaml): "),
    "no layers": (["--depths", "6", "0"], "depths is 6, 0; 1 is the least that will do"),
    "fewer than none": (["--depths", "-1"], "depths is -1; 1 is the least that will do"),
    "no depth": (["--depths"], "depths is empty; 1 is the least that will do"),
    "no number": (["--depths", "6", "deep"], "depths is [6, deep]: expected a list of int"),
    "no tokens": (["--tokens=0"], "tokens is 0; 1 is the least that will do"),
    "a file in the way": (["--out", "tiny.yaml"], "the folder tiny.yaml cannot be made: File exists"),
    "an option mistyped": (["--depth", "6"], "depth is 6: there is no such key"),
    "a combination": (["--model.stabilizer.residual=HyperConnections"], "HyperConnections cannot be combined with B2T"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_one_sentence_before_any_work(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bad.yaml").write_text("model: {stabilizer: {placement: PrNorm}}\n")
    words, start = WRONG[name]
    assert main(["probe", "-c", "tiny.yaml", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(f"error: {start}")
    assert sorted(path.name for path in here.iterdir()) == ["bad.yaml", "tiny.yaml"]


def test_lists_are_typed_word_by_word() -> None:
    words = ["--strategies", "a", "b", "-c", "x.yaml", "--depths", "6", "-1", "--seed_everything", "1"]
    rest = ["-c", "x.yaml", "--seed_everything", "1"]
    assert gathered(words, LISTS) == [*rest, "--strategies=[a, b]", "--depths=[6, -1]"]


def test_spark_lines() -> None:
    assert spark([1.0] * 3) == "███"
    assert spark([10.0 ** (-step / 2) for step in range(9)]) == "█▇▆▅▄▃▂▁▁"
    assert spark([1e-30, 0.0, math.nan, 1.0]) == "▁▁?█"
    assert spark([1e-3] * 50 + [1e-1] * 50, width=4) == "▄▄██"
    assert spark([0.0, 0.0]) == "▁▁"


@pytest.mark.soak
def test_four_strategies_at_five_depths_take_less_than_a_minute(tmp_path: Path) -> None:
    """Of a processor's time, one thread: other jobs on the machine do not count."""
    command = f"""probe -c {ROOT}/configs/quickstart.yaml --strategies post_ln pre_ln b2t deepnorm
        --depths 6 12 18 50 100 --out {tmp_path}"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "stabilize", *command.split()], check=True, env=environment, cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    found = json.loads((tmp_path / "probe.json").read_text())["probes"]
    assert len(found) == 20
    decoders, encoders = (
        {(probe["strategy"], probe["layers"][stack]): probe["stacks"][stack] for probe in found}
        for stack in ("decoder", "encoder")
    )
    for depth in (6, 12, 18, 50, 100):
        for name in ("post_ln", "pre_ln"):
            assert encoders[name, depth]["verdict"] == "healthy"
            assert encoders[name, depth]["derived"]["agrees"]
    for depth in (12, 18, 50, 100):
        assert decoders["post_ln", depth]["verdict"] == "vanishing"
        assert decoders["post_ln", depth]["derived"]["agrees"]
    for depth in (6, 12, 18, 50, 100):
        for name in ("pre_ln", "deepnorm"):
            assert decoders[name, depth]["verdict"] == "healthy"
        assert decoders["pre_ln", depth]["derived"]["agrees"]
