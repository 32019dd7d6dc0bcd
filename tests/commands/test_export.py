"""`stabilize export`: what is there afterwards, and what is said where nothing is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stabilize import export
from stabilize.checkpoint import DurableFiles
from stabilize.cli import main
from stabilize.errors import UserError
from stabilize.strategies import PostNorm, PreNorm, RMSNorm, Stabilizer
from stabilize.task import TranslationTask
from stabilize.tokens import BEGIN, END
from tests.tasks import small_task


def saved(task: TranslationTask, path: Path) -> Path:
    """A checkpoint of a task as it is."""
    whole = {"task": task.spec(), "tokenizer": task.tokenizer.model, "precision": "32-true", "global_step": 1}
    DurableFiles().save_checkpoint(whole | {"state_dict": task.state_dict()}, path)
    return path


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for a target: it writes a file, and computes what `off` adds to the model's own log p."""
    stand_in = SimpleNamespace(off=0.0, remarks=[], task=None)

    def write(task: TranslationTask, folder: Path) -> list[str]:
        stand_in.task = task
        (folder / "model").write_text("weights")
        return stand_in.remarks

    def log_probabilities(folder: Path, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        assert (folder / "model").exists()
        rows = export.log_probabilities(stand_in.task, sources, targets)
        rows[-1][-1] += stand_in.off
        return rows

    stand_in.write, stand_in.log_probabilities = write, log_probabilities
    monkeypatch.setitem(sys.modules, "stabilize.export.ctranslate2", stand_in)
    return stand_in


def test_what_was_written_is_there_whole_with_how_near_it_comes(
    tmp_path: Path, target: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, output = saved(small_task(), tmp_path / "a.ckpt"), tmp_path / "made" / "model"
    target.off, target.remarks = 4e-4, ["a norm has another epsilon"]
    assert main(["export", str(checkpoint), "--to", "ctranslate2", "--output", str(output)]) == 0
    assert [path.name for path in output.iterdir()] == ["model"]
    assert [path.name for path in output.parent.iterdir()] == ["model"]
    note, told = capsys.readouterr().out.splitlines()
    assert note == "note: a norm has another epsilon; it makes a difference of less than 0.001"
    assert "log p of a token differs by at most 4.0e-04 on 8 random sentence pairs" in told


@pytest.mark.parametrize("off", [2e-3, float("nan")])
def test_what_computes_something_else_is_refused_and_gone(
    tmp_path: Path, target: Any, off: float, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = saved(small_task(), tmp_path / "a.ckpt")
    target.off, target.remarks = off, ["a norm has another epsilon"]
    assert main(["export", str(checkpoint), "--to", "ctranslate2", "--output", str(tmp_path / "model")]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "log p of a token there differs by up to" in told
    assert told.endswith("more than 0.001; a norm has another epsilon; --to safetensors takes every model")
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_log_p_of_a_token_is_that_of_the_model() -> None:
    task = small_task()
    sources, targets = [[5, 6, 7], [8]], [[9, 10], [11, 12, 13]]
    for source, wanted, found in zip(sources, targets, export.log_probabilities(task, sources, targets), strict=True):
        hidden = task.model(torch.tensor([[*source, END]]), torch.tensor([[BEGIN, *wanted]]))
        log_p = task.model.project(hidden).log_softmax(-1)[0]
        assert found == pytest.approx([log_p[at, token].item() for at, token in enumerate([*wanted, END])], abs=1e-5)


@pytest.mark.parametrize(("kind", "package"), [("safetensors", "safetensors"), ("ctranslate2", "ctranslate2")])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, package: str
) -> None:
    for name in (package, f"{package}.torch", f"{package}.specs"):
        monkeypatch.setitem(sys.modules, name, None)
    checkpoint = saved(small_task(), tmp_path / "a.ckpt")
    assert main(["export", str(checkpoint), "--to", kind, "--output", str(tmp_path / "model")]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert f"--to {kind} needs {package}" in told
    assert told.endswith("which is not installed; pip install 'stabilize-nmt[export]'")
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_folder_that_is_there_and_a_checkpoint_that_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = saved(small_task(), tmp_path / "a.ckpt")
    words = ["--to", "safetensors", "--output", str(tmp_path)]
    assert main(["export", str(checkpoint), *words]) == 2
    assert "is there already; give the name of a new folder" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none.ckpt"), *words]) == 2
    assert "there is no such file" in capsys.readouterr().err
    spec = small_task().spec()
    spec["stabilizer"]["placement"]["class_path"] = "package_that_is_not_here.Placement"
    whole = torch.load(checkpoint, weights_only=True) | {"task": spec}
    DurableFiles().save_checkpoint(whole, checkpoint)
    assert main(["export", str(checkpoint), *words]) == 2
    assert "needs a strategy that is not here: No module named 'package_that_is_not_here'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stabilizers", "shape", "why"),
    [
        ((Stabilizer(norm=RMSNorm()),), {}, "with RMSNorm has biases"),
        ((Stabilizer(PostNorm()),), {"positions": "learned"}, "with learned positions is post-norm"),
        ((Stabilizer(),), {"activation": "swiglu"}, "has a gated feed-forward branch, model.activation swiglu"),
        ((Stabilizer(PostNorm()), Stabilizer(PreNorm())), {}, "is pre-norm in one stack and post-norm in the other"),
    ],
)
def test_what_transformers_has_not_is_said(stabilizers: Any, shape: dict[str, str], why: str) -> None:
    from stabilize.export.huggingface import chosen
    from stabilize.export.plain import read

    task = small_task(stabilizers[0], decoder_stabilizer=stabilizers[-1], **shape).eval()
    with pytest.raises(UserError, match=why) as raised:
        chosen(read(task.model, task.sizes))
    assert str(raised.value).startswith("no encoder-decoder of transformers ")
    assert str(raised.value).endswith("; --to ctranslate2 would do")
    for stabilizer, architecture in ((Stabilizer(PreNorm()), "Blenderbot"), (Stabilizer(PostNorm()), "Marian")):
        task = small_task(stabilizer).eval()
        assert chosen(read(task.model, task.sizes)) == architecture
