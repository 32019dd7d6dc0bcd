"""Means of checkpoints: which are taken, what the mean is, what is refused, and that the file is a checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilize import averaging, checkpoint
from stabilize.averaging import Which
from stabilize.checkpoint import DurableFiles
from stabilize.cli import main
from stabilize.errors import UserError
from stabilize.strategies import PostNorm, PreNorm, Stabilizer
from stabilize.task import TranslationTask

TASK = {"stabilizer": Stabilizer(PreNorm()).spec(), "decoder_stabilizer": None, "width": 8}


def saved(update: int, **other: Any) -> dict[str, Any]:
    weights = {"w": torch.full((3,), float(update)), "half": torch.tensor(0.1, dtype=torch.bfloat16)}
    counters = {"count": torch.tensor(update)}
    whole = {"task": TASK, "tokenizer": b"pieces", "global_step": update, "state_dict": weights | counters}
    return whole | {"optimizer_states": [{}], "lr_schedulers": [], "callbacks": {}} | other


def ranked(path: Path, update: int, score: float, mode: str = "min", monitor: str = "val/nll") -> None:
    """A file as ModelCheckpoint leaves it: it knows its own score and those of others."""
    key = f"ModelCheckpoint{ {'monitor': monitor, 'mode': mode, 'every_n_train_steps': 0} }"
    scores = {"run_before/update_1.ckpt": torch.tensor(-1.0), str(path): torch.tensor(score)}
    state = {"monitor": monitor, "best_k_models": scores, "current_score": torch.tensor(99.0)}
    DurableFiles().save_checkpoint(saved(update, callbacks={key: state, "Other": {"x": 1}}), path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Scores 3, 1, 4, 2 at updates 1 to 4, and the last state again as last.ckpt."""
    folder = tmp_path / "run" / "checkpoints"
    for update, score in enumerate((3.0, 1.0, 4.0, 2.0), 1):
        ranked(folder / f"update_{update}.ckpt", update, score)
    DurableFiles().save_checkpoint(torch.load(folder / "update_4.ckpt", weights_only=True), folder / "last.ckpt")
    return folder.parent


def chosen(run: Path, **which: int) -> list[int]:
    return [one.update for one in averaging.choose(averaging.found([run]), Which(**which))]


def test_the_newest_and_the_best_are_taken(run: Path) -> None:
    assert chosen(run, last=2) == [4, 3]
    assert chosen(run, best=2) == [4, 2]
    assert chosen(run) == [4, 3, 2, 1]
    for update, score in ((1, 3.0), (2, 1.0), (3, 4.0), (4, 2.0)):
        ranked(run / "checkpoints" / f"update_{update}.ckpt", update, score, "max")
    assert chosen(run, best=2) == [3, 1]
    (run / "checkpoints" / "update_4.ckpt").unlink()
    assert chosen(run, last=2) == [4, 3], "last.ckpt is a state like any other"
    assert chosen(run, best=9) == [3, 2, 1], "but says no score of its own"


def test_runs_that_went_on_are_taken_together(run: Path, tmp_path: Path) -> None:
    ranked(tmp_path / "next" / "checkpoints" / "update_5.ckpt", 5, 0.5)
    both = averaging.found([run, tmp_path / "next"])
    assert [one.update for one in averaging.choose(both, Which(best=2))] == [5, 2]


def test_the_mean_is_taken_in_float64_and_the_rest_from_the_newest(run: Path) -> None:
    paths = [one.path for one in averaging.choose(averaging.found([run]), Which(best=3))]
    mean = averaging.average(paths, Which(best=3))
    assert mean["state_dict"]["w"].tolist() == pytest.approx([(4 + 2 + 1) / 3] * 3)
    assert mean["state_dict"]["w"].dtype == torch.float32
    assert mean["state_dict"]["half"].equal(torch.tensor(0.1, dtype=torch.bfloat16)), "of equal numbers that number"
    assert mean["state_dict"]["count"] == 4
    assert mean["global_step"] == 4
    assert not {"optimizer_states", "lr_schedulers", "callbacks"} & mean.keys()
    assert mean["averaged"]["which"] == "best 3"
    assert [Path(file["file"]).name for file in mean["averaged"]["files"]] == [
        "update_4.ckpt",
        "update_2.ckpt",
        "update_1.ckpt",
    ]
    assert mean["averaged"]["files"][1]["sha256"] == hashlib.sha256(paths[1].read_bytes()).hexdigest()


def test_a_mean_in_float32_would_be_another(tmp_path: Path) -> None:
    """1e8 and small numbers: float32 would lose them."""
    for update, value in enumerate((1.0, 1e8, -1e8), 1):
        weights = {"w": torch.tensor([value])}
        DurableFiles().save_checkpoint(saved(update, state_dict=weights), tmp_path / f"{update}.ckpt")
    mean = averaging.average([tmp_path / f"{update}.ckpt" for update in (2, 1, 3)], Which())
    assert mean["state_dict"]["w"].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (
            {"task": TASK | {"stabilizer": Stabilizer(PostNorm()).spec()}},
            "of another model than .*update_4.*: model.stabilizer.placement is PostNorm there and PreNorm here",
        ),
        ({"task": TASK | {"width": 16}}, "model.width is 16 there and 8 here"),
        ({"tokenizer": b"other"}, "has another tokenizer than"),
        ({"state_dict": {"w": torch.zeros(4)}}, "has other weights than"),
        ({"state_dict": saved(1)["state_dict"] | {"w": torch.full((3,), math.nan)}}, "weights that are not finite, w"),
    ],
)
def test_checkpoints_that_do_not_go_together_are_refused_by_name(run: Path, other: dict[str, Any], why: str) -> None:
    path = run / "checkpoints" / "update_1.ckpt"
    DurableFiles().save_checkpoint(saved(1, **other), path)
    with pytest.raises(UserError, match=why) as raised:
        averaging.average([run / "checkpoints" / "update_4.ckpt", path], Which())
    assert str(path) in str(raised.value)


def test_which_cannot_be_told_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="last 1 and best 2; one of them would do"):
        Which(last=1, best=2)
    with pytest.raises(UserError, match=r"average\.last is -1"):
        Which(last=-1)
    DurableFiles().save_checkpoint(saved(7), tmp_path / "alone.ckpt")
    with pytest.raises(UserError, match="have no scores"):
        averaging.choose(averaging.found([tmp_path / "alone.ckpt"]), Which(best=1))
    ranked(run / "checkpoints" / "update_9.ckpt", 9, 30.0, "max", "val/bleu")
    with pytest.raises(UserError, match=r"val/bleu \(highest best\) and val/nll \(lowest best\)"):
        chosen(run, best=2)
    (run / "checkpoints" / "update_2.ckpt").write_bytes(b"half of it")
    with pytest.raises(UserError, match=r"^checkpoint is .*update_2\.ckpt, which is damaged"):
        averaging.found([run])


# ---------------------------------------------------------------------- the commands

TINY = """
model:
  encoder_layers: 1
  decoder_layers: 1
  width: 8
  heads: 2
  hidden: 8
  search: {beam: 1, maximum_ratio: 0.1, maximum_extra: 2}
  validation_search: {beam: 1, maximum_ratio: 0.1, maximum_extra: 2}
data:
  class_path: SyntheticCorpus
  init_args: {train_pairs: 200, validation_pairs: 4, test_pairs: 4, vocabulary: 60, batch_tokens: 96}
trainer: {accelerator: cpu, max_steps: 6, num_sanity_val_steps: 0, val_check_interval: 2, log_every_n_steps: 1}
checkpoint: {save_top_k: 3}
test_after_fit: true
test_average: {best: 3}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a config in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


@pytest.fixture(scope="module")
def six_updates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs folder of a config above."""
    folder = tmp_path_factory.mktemp("six")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        (folder / "tiny.yaml").write_text(TINY)
        assert main(["fit", "-c", "tiny.yaml"]) == 0
    return folder / "runs"


def newest(runs: Path) -> Path:
    """The folder of the newest run, as it is called from the current folder."""
    return max(runs.iterdir(), key=lambda folder: folder.stat().st_mtime_ns).relative_to(Path.cwd())


def facts_of(run: Path) -> dict[str, Any]:
    """What stands beside the translations of a run's test."""
    return json.loads((run / "translations" / "test.json").read_text())


def test_from_the_run_to_the_test_of_its_average(
    here: Path, six_updates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of the README: stabilize average, and test, predict and fit with what it wrote."""
    shutil.copytree(six_updates, here / "runs", ignore=shutil.ignore_patterns("wandb"))
    run = newest(here / "runs")
    mean = checkpoint.read(run / "average_best_3.ckpt")
    states = [checkpoint.read(path)["state_dict"] for path in (run / "checkpoints").glob("update_*.ckpt")]
    assert len(states) == 3
    for name, value in mean["state_dict"].items():
        torch.testing.assert_close(value, torch.stack([state[name] for state in states]).mean(0), msg=name)
    facts = facts_of(run)
    assert facts["checkpoint"] == f"runs/{run.name}/average_best_3.ckpt"

    capsys.readouterr()
    assert main(["average", str(run), "--best", "3", "--output", "average.ckpt"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == "average of 3: average.ckpt"
    assert "update_6.ckpt: update 6, val/nll " in told[0]
    again = checkpoint.read(here / "average.ckpt")["state_dict"]
    assert all(value.equal(again[name]) for name, value in mean["state_dict"].items())
    TranslationTask.load_from_checkpoint("average.ckpt")

    config, weights = f"--config={run}/config.yaml", "--ckpt_path=average.ckpt"
    assert main(["test", config, weights]) == 0
    assert "tests the average" not in capsys.readouterr().out
    assert facts_of(newest(here / "runs"))["scores"] == facts["scores"]
    assert main(["predict", config, weights]) == 0
    assert main(["fit", config, weights]) == 2
    assert "has weights alone; --weights average.ckpt would do" in capsys.readouterr().err
    assert main(["average", str(run), "--last", "2", "--output", "average.ckpt"]) == 2
    assert "--output average.ckpt is there already" in capsys.readouterr().err
    assert main(["average", str(run), "--last", "5", "--output", "new.ckpt"]) == 2
    assert "there are 3 to choose from" in capsys.readouterr().err
    assert main(["average", str(run), "--output", "new.ckpt"]) == 2
    assert "--last 5 or --best 5 would do" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "count", "updates"), [("best", 3, [6, 4, 2]), ("last", 2, [7, 6])])
def test_a_run_that_went_on_averages_what_it_would_have_without_the_stop(
    here: Path, six_updates: Path, capsys: pytest.CaptureFixture[str], kind: str, count: int, updates: list[int]
) -> None:
    """Of one update, without a validation: of its own it has no more than its last state."""
    shutil.copytree(six_updates, here / "runs", ignore=shutil.ignore_patterns("wandb"))
    before = newest(here / "runs") / "checkpoints"
    flags = ["--test_average.best=0", f"--test_average.{kind}={count}", "--trainer.max_steps=7"]
    assert main(["fit", "-c", "tiny.yaml", "--ckpt_path=last", *flags]) == 0
    run = newest(here / "runs")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["last.ckpt"]
    mean = checkpoint.read(run / f"average_{kind}_{count}.ckpt")
    files = [Path(file["file"]) for file in mean["averaged"]["files"]]
    assert [checkpoint.read(path)["global_step"] for path in files] == updates
    assert {path.parent for path in files} <= {before, run / "checkpoints"}
    states = [checkpoint.read(path)["state_dict"] for path in files]
    for name, value in mean["state_dict"].items():
        torch.testing.assert_close(value, torch.stack([state[name] for state in states]).mean(0), msg=name)
    assert facts_of(run)["checkpoint"] == str(run / f"average_{kind}_{count}.ckpt")
    assert "(test_average asks for" not in capsys.readouterr().out


def averaged(run: Path) -> list[tuple[str, int]]:
    """The run and the update of each state in the one mean of a run."""
    (mean,) = run.glob("average_*.ckpt")
    states = [checkpoint.read(Path(file["file"])) for file in checkpoint.read(mean)["averaged"]["files"]]
    return [(state["run"]["folder"], state["global_step"]) for state in states]


def test_states_of_another_run_in_the_same_folder_are_not_averaged(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of an unrelated run, nor of one that went on from the same state; and all runs of the line count."""
    flags = ["--checkpoint.dirpath=shared", "--checkpoint.keep_last=9", "--trainer.val_check_interval=1"]
    flags += ["--trainer.logger=false"]
    last = ["--test_average.best=0", "--test_average.last=4"]
    fit = ["fit", "-c", "tiny.yaml", *flags, *last]
    quick = [*fit, "--test_average.last=0", "--test_after_fit=false"]
    assert main([*quick, "--trainer.max_steps=2"]) == 0
    first = newest(here / "runs")
    shutil.copy(here / "shared" / "last.ckpt", here / "shared" / "two.ckpt")
    assert main([*quick, "--trainer.max_steps=4", "--ckpt_path=shared/two.ckpt"]) == 0  # its states are newer
    assert main([*quick, "--trainer.max_steps=3", "--ckpt_path=shared/two.ckpt"]) == 0
    second = newest(here / "runs")
    assert main([*fit, "--trainer.max_steps=4", "--ckpt_path=shared/last.ckpt"]) == 0
    third = newest(here / "runs")
    assert averaged(third) == [(third.name, 4), (second.name, 3), (first.name, 2), (first.name, 1)]
    assert main([*fit, "--trainer.max_steps=1", "--seed_everything=2"]) == 0
    alone = newest(here / "runs")
    assert averaged(alone) == [(alone.name, 1)]
    assert "tests the average of 1 checkpoints (test_average asks for 4)" in capsys.readouterr().out


def test_an_average_of_fewer_says_of_how_many(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "-c", "tiny.yaml", "--trainer.max_steps=4"]) == 0
    run = newest(here / "runs")
    mean = run / "average_best_2.ckpt"
    assert f"tests the average of 2 checkpoints (test_average asks for 3), {mean}" in capsys.readouterr().out
    assert checkpoint.read(mean)["averaged"]["which"] == "best 2"
    assert facts_of(run)["checkpoint"] == str(mean)


def test_where_there_is_no_average_the_final_weights_are_tested(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training is done by then: nothing is refused."""
    assert main(["fit", "-c", "tiny.yaml", "--trainer.max_steps=1"]) == 0
    run = newest(here / "runs")
    assert "tests the final weights: no checkpoint is ranked by val/nll" in capsys.readouterr().out
    assert facts_of(run)["checkpoint"] == str(run / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--test_average.best=4"], "test_average is best 4, but checkpoint.save_top_k is 3"),
        (["--test_average.best=0", "--test_average.last=4"], "test_average is last 4, but checkpoint.keep_last is 2"),
        (["--test_after_fit=false"], "test_average is best 3, but test_after_fit is false"),
    ],
)
def test_an_average_that_cannot_be_is_refused_before_training(
    here: Path, capsys: pytest.CaptureFixture[str], flags: list[str], why: str
) -> None:
    assert main(["fit", "-c", "tiny.yaml", *flags]) == 2
    assert why in capsys.readouterr().err
    assert not list(here.glob("runs/*"))
