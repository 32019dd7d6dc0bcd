"""Checkpoints that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilize import checkpoint
from stabilize.callbacks import Checkpoints
from stabilize.checkpoint import DurableFiles, check_model
from stabilize.errors import UserError
from stabilize.strategies import PostNorm, PreNorm, Stabilizer

SAVED: dict[str, Any] = {
    "task": {},
    "tokenizer": b"pieces",
    "state_dict": {"w": torch.arange(20_000.0)},
    "optimizer_states": [],
    "global_step": 1,
}


def test_what_was_there_is_untouched_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "run" / "checkpoints" / "last.ckpt"
    DurableFiles().save_checkpoint(SAVED, place)
    before = place.read_bytes()

    def full(given: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"last\.ckpt cannot be written: No space left on device"):
        DurableFiles().save_checkpoint(SAVED | {"global_step": 2}, place)
    assert place.read_bytes() == before
    assert [path.name for path in place.parent.iterdir()] == ["last.ckpt"]


def test_a_name_is_given_to_what_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls, which no test can see by pulling the plug."""
    calls: list[str] = []
    synchronize, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda *given: calls.append("fsync") or synchronize(*given))
    monkeypatch.setattr(Path, "replace", lambda *given: calls.append("replace") or replace(*given))
    DurableFiles().save_checkpoint(SAVED, tmp_path / "last.ckpt")
    assert calls == ["fsync", "replace", "fsync"]
    assert checkpoint.read(tmp_path / "last.ckpt")["global_step"] == 1


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_byte_that_has_changed_is_seen(tmp_path: Path, share: float) -> None:
    place = tmp_path / "last.ckpt"
    DurableFiles().save_checkpoint(SAVED, place)
    whole = bytearray(place.read_bytes())
    whole[int(share * len(whole))] ^= 0xFF
    place.write_bytes(whole)
    with pytest.raises(UserError, match="damaged"):
        checkpoint.read(place)


def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path.glob("*/checkpoints")) is None
    places = [tmp_path / run / "checkpoints" / f"{name}.ckpt" for run in ("a", "b") for name in ("update_1", "last")]
    for age, place in enumerate(places):
        DurableFiles().save_checkpoint(SAVED, place)
        os.utime(place, (age, age))
    assert checkpoint.newest(tmp_path.glob("*/checkpoints")) == places[-1]
    for damaged in (3, 2):
        places[damaged].write_bytes(places[damaged].read_bytes()[:-100])
        os.utime(places[damaged], (damaged, damaged))
    with pytest.warns(UserWarning, match=f"is damaged; {places[1]} is taken") as said:
        assert checkpoint.newest(tmp_path.glob("*/checkpoints")) == places[1]
    assert len(said) == 2


def test_the_advice_is_a_good_checkpoint_of_the_same_runs(tmp_path: Path) -> None:
    good, bad = (tmp_path / "elsewhere" / run / "checkpoints" / "last.ckpt" for run in ("a", "b"))
    for age, place in enumerate((good, bad)):
        DurableFiles().save_checkpoint(SAVED, place)
        if place == bad:
            bad.write_bytes(bad.read_bytes()[:-100])
        os.utime(place, (age, age))
    with pytest.raises(UserError, match=rf"{bad}, which is damaged .*; the newest is {good}$"):
        checkpoint.read(bad)
    good.unlink()
    with pytest.raises(
        UserError, match=rf"no such file; a run has its own in {tmp_path}/elsewhere/<run id>/checkpoints$"
    ):
        checkpoint.read(good)


def test_what_a_killed_process_has_left_half_written_is_cleared(tmp_path: Path) -> None:
    """But not what one that lives, or one of another machine, is writing."""
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    killed.kill()
    killed.communicate()
    names = [f".last.ckpt.{process}{checkpoint.PARTIAL}" for process in (killed.pid, os.getpid())]
    for name in (*names, f".last.ckpt.{killed.pid}.another-machine.partial", "last.ckpt"):
        (tmp_path / name).touch()
    checkpoint.clear(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        names[1],
        f".last.ckpt.{killed.pid}.another-machine.partial",
        "last.ckpt",
    }


def test_the_state_before_is_whole_though_it_could_not_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that knows no second names, and is full."""
    last, before = tmp_path / "last.ckpt", tmp_path / "last-1.ckpt"
    last.write_text("the newest")
    before.write_text("the one before")

    def full(source: Path, copy: Path) -> None:
        copy.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", lambda *_: os.chdir(tmp_path / "nowhere"))
    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="No space left"):
        Checkpoints(dirpath=tmp_path)._step_back(last)
    assert [path.read_text() for path in (last, before)] == ["the newest", "the one before"]
    monkeypatch.undo()
    Checkpoints(dirpath=tmp_path)._step_back(last)
    assert [path.read_text() for path in (last, before)] == ["the newest"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "last-1.ckpt"}


def test_a_decoder_stabilizer_like_the_encoders_is_no_other_model() -> None:
    alone = {"stabilizer": Stabilizer(PostNorm()).spec(), "decoder_stabilizer": None, "width": 8}
    named = alone | {"decoder_stabilizer": Stabilizer(PostNorm()).spec()}
    check_model(alone, named)
    check_model(named, alone)
    with pytest.raises(UserError) as raised:
        check_model(alone, alone | {"decoder_stabilizer": Stabilizer(PreNorm()).spec()})
    assert "model.decoder_stabilizer.placement is PostNorm in the checkpoint and PreNorm here; " in str(raised.value)
    assert "None" not in str(raised.value)
