"""`stabilize translate`: a pipe that gives line k for line k, whatever comes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stabilize.cli import main
from stabilize.commands import translate
from stabilize.commands.translate import Translator, lines_of
from stabilize.data.pairs import Pairs
from stabilize.decoding import BeamSearch
from stabilize.errors import UserError
from stabilize.task import TranslationTask
from tests.checkout import ROOT
from tests.tasks import ENGLISH, GERMAN, Sentences, small_task, small_trainer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that knows its six sentences."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(1)
    task = small_task(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01), width=32)
    trainer = small_trainer(folder, max_steps=60, log_every_n_steps=60)
    trainer.fit(task, datamodule=Sentences(batch_tokens=1000))
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


class Pipe:
    """The lines that the command makes of bytes, in this process, and what it says beside them."""

    def __init__(self, checkpoint: Path, capture: pytest.CaptureFixture[bytes], patch: pytest.MonkeyPatch) -> None:
        self.checkpoint, self.capture, self.patch = checkpoint, capture, patch
        self.said = ""

    def __call__(self, given: bytes, *words: str, code: int = 0) -> list[str]:
        self.capture.readouterr()
        with tempfile.TemporaryFile() as file:
            file.write(given)
            file.seek(0)
            self.patch.setattr(sys, "stdin", file)
            assert main(["translate", "--checkpoint", str(self.checkpoint), *words]) == code
        out, said = self.capture.readouterr()
        self.said = said.decode()
        *lines, rest = out.decode().split("\n")
        assert rest == ""
        return lines


@pytest.fixture
def pipe(checkpoint: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Pipe:
    return Pipe(checkpoint, capsysbinary, monkeypatch)


def text(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def test_it_writes_what_predict_does(pipe: Pipe, checkpoint: Path, tmp_path: Path) -> None:
    """With the same search; of its own batches, without the text that it was trained on."""
    sources = [*ENGLISH, "", "the dog reads the cat", "\u3000 \u200b", ENGLISH[2]]
    data = Sentences({"test": Pairs(sources, ["x"] * len(sources))})
    task = TranslationTask.load_from_checkpoint(checkpoint, search=BeamSearch(beam=4, length_penalty=0.5))
    small_trainer(tmp_path).predict(task, datamodule=data)
    *expected, _ = (tmp_path / "translations" / "predict.txt").read_text(encoding="utf-8").split("\n")
    options = ["--beam", "4", "--length_penalty", "0.5"]
    assert pipe(text(*sources), *options, "--batch_tokens", "20") == expected
    assert pipe(text(*sources), *options, "--read_ahead", "1") == expected
    assert sum(a == b for a, b in zip(expected, GERMAN, strict=False)) > 3, "a model that knows nothing shows little"
    assert expected[6] == expected[8] == ""
    assert "10 lines" in pipe.said


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_it_computes_in_the_precision_of_a_trainer(
    pipe: Pipe, checkpoint: Path, tmp_path: Path, precision: str
) -> None:
    data = Sentences({"test": Pairs(ENGLISH, ["x"] * len(ENGLISH))})
    task = TranslationTask.load_from_checkpoint(checkpoint, search=BeamSearch(beam=4))
    small_trainer(tmp_path, precision=precision).predict(task, datamodule=data)
    *expected, _ = (tmp_path / "translations" / "predict.txt").read_text(encoding="utf-8").split("\n")
    scored = pipe(text(*ENGLISH), "--beam", "4", "--precision", precision, "--scores")
    assert [line.split("\t")[1] for line in scored] == expected
    assert scored != pipe(text(*ENGLISH), "--beam", "4", "--scores"), "float32 has other scores"


def test_several_batches_at_once_are_those_one_after_the_other(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a thread, which computes by itself: same lines, same order, same scores."""
    options = ["--beam", "3", "--batch_tokens", "12", "--scores"]
    alone = pipe(text(*ENGLISH * 3), *options)
    search, computing, both = BeamSearch.n_best, set(), threading.Barrier(2)

    def watched(self: BeamSearch, *arguments: Any) -> Any:
        if threading.get_ident() not in computing:
            computing.add(threading.get_ident())
            both.wait(60)  # until another thread has a batch too
        assert torch.get_num_threads() == 1
        return search(self, *arguments)

    monkeypatch.setattr(BeamSearch, "n_best", watched)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert pipe(text(*ENGLISH * 3), *options) == alone
    finally:
        torch.set_num_threads(threads)
    assert len(computing) == 2


def test_few_lines_are_shared_out_and_one_line_has_all_threads(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, seen = BeamSearch.n_best, []

    def watched(self: BeamSearch, model: Any, source: torch.Tensor, count: int) -> Any:
        seen.append((len(source), torch.get_num_threads()))
        return search(self, model, source, count)

    monkeypatch.setattr(BeamSearch, "n_best", watched)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        translator = Translator(TranslationTask.load_from_checkpoint(checkpoint).eval(), BeamSearch(beam=1))
        translator([line.encode() for line in ENGLISH[:1] * 6])
        assert seen == [(3, 1), (3, 1)]
        translator([ENGLISH[0].encode()])
        assert seen[2:] == [(1, 2)]
    finally:
        torch.set_num_threads(threads)


def test_nothing_that_may_come_loses_a_line(pipe: Pipe) -> None:
    """A byte-order mark, CRLF, a lone CR, NUL, what is not UTF-8, U+2028, a very long line, no line feed at the end."""
    good = ENGLISH[1].encode()
    odd = [b"\xef\xbb\xbf" + good, good + b"\r", b"\r", b"\0", b"\0" + good, good.replace(b"o", b"\xff", 1)]
    odd += [
        "a\u2028dog\x85 sleeps\x0c".encode(),
        b"\xe2\x80\xa8",
        b"a dog " * 60_000,
        "\U0001f642 \ud800".encode("utf-8", "surrogatepass"),
    ]
    given = b"\n".join([good, *odd, good])
    found = pipe(given, "--maximum_source", "30")
    assert len(found) == len(odd) + 2
    assert found[0] == found[1] == found[2] == found[5] == found[-1] != ""
    assert found[3] == found[4] == found[8] == ""
    said = pipe.said
    assert "line 7 is not UTF-8" in said
    assert "line 10 is cut, of which only the first 29 tokens were read" in said
    assert re.search(r"12 lines, .*2 not UTF-8", said)
    assert "1 cut" in said


def test_entities_are_read_as_characters_where_asked(pipe: Pipe) -> None:
    """As `data.unescape` does in training."""
    escaped, plain = text("a dog &amp; a cat sleeps"), text("a dog & a cat sleeps")
    assert pipe(escaped, "--unescape", "--scores") == pipe(plain, "--scores") != pipe(escaped, "--scores")


def test_nothing_in_nothing_out(pipe: Pipe) -> None:
    assert pipe(b"") == []
    assert pipe(b"\n") == [""]
    assert pipe(b"\n\n") == ["", ""]


def test_several_translations_of_each_line(pipe: Pipe) -> None:
    found = [line.split(" ||| ") for line in pipe(text(ENGLISH[1], "", ENGLISH[3]), "--n_best", "3")]
    assert [number for number, _, _ in found] == ["0"] * 3 + ["1"] + ["2"] * 3
    assert [translation for number, translation, _ in found if number == "1"] == [""]
    for line, source in (("0", ENGLISH[1]), ("2", ENGLISH[3])):
        of_line = [(float(score), translation) for number, translation, score in found if number == line]
        assert of_line == sorted(of_line, key=lambda entry: -entry[0])
        assert len({translation for _, translation in of_line}) > 1
        (best,) = pipe(text(source), "--scores")
        assert best == f"{of_line[0][0]:.6f}\t{of_line[0][1]}"


def test_every_setting_of_the_search_counts(pipe: Pipe) -> None:
    (cut,) = pipe(text(ENGLISH[2]), "--maximum_ratio", "0", "--maximum_extra", "2", "--beam", "1")
    (long,) = pipe(text(ENGLISH[1]), "--minimum_length", "25", "--beam", "1")
    (usual,) = pipe(text(ENGLISH[1]), "--normalization", "gnmt", "--beam", "2")
    assert len(cut) < len(usual) < len(long)
    pipe(text(ENGLISH[2]), "--maximum_ratio", "0", "--maximum_extra", "2")
    assert "1 truncated at the length limit" in pipe.said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--beam", "0"], "beam of BeamSearch is 0"),
        (["--length_penalty", "nan"], "length_penalty of BeamSearch is nan"),
        (["--normalization", "median"], "translate: argument --normalization: invalid choice: 'median'"),
        (["--n_best", "6"], "n_best is 6 and beam 5; n_best from 1 to 5 would do"),
        (["--batch_tokens", "0"], "translate.batch_tokens is 0"),
        (["--maximum_source", "1"], "translate.maximum_source is 1; 2 is the least"),
        (["--device", "abacus"], "device is abacus"),
        (["--precision", "8"], "translate: argument --precision: invalid choice: '8'"),
        (["--beem", "5"], "unrecognized arguments: --beem"),
        (["--checkpoint", "absent.ckpt"], "checkpoint is absent.ckpt, but there is no such file"),
        (["--checkpoint", "last"], "checkpoint is last, but no run in runs has one"),
    ],
)
def test_what_cannot_be(
    pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pipe(text(*ENGLISH), *words, code=2) == []
    assert re.search(told, pipe.said)


LACKING: dict[str, Callable[[dict[str, Any]], None]] = {
    "RuntimeError": lambda saved: saved["task"].pop("hidden"),
    "KeyError: 'precision'": lambda saved: saved.pop("precision"),
    "Missing key": lambda saved: saved["state_dict"].popitem(),
    "KeyError: 'stabilizer'": lambda saved: saved["task"].pop("stabilizer"),
}


@pytest.mark.parametrize("told", LACKING)
def test_a_checkpoint_that_lacks_a_part(pipe: Pipe, checkpoint: Path, tmp_path: Path, told: str) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    LACKING[told](saved)
    torch.save(saved, tmp_path / "bad.ckpt")
    assert pipe(text(*ENGLISH), "--checkpoint", str(tmp_path / "bad.ckpt"), code=2) == []
    start = f"error: checkpoint is {tmp_path}/bad.ckpt, which is damaged, or of another version of stabilize: "
    assert pipe.said.startswith(start)
    assert told in pipe.said
    assert "--debug" not in pipe.said


def test_the_newest_checkpoint(pipe: Pipe, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "checkpoints" / "last.ckpt").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    assert pipe(text(ENGLISH[1]), "--checkpoint", "last") == pipe(text(ENGLISH[1]))


# ---------------------------------------------------------------------- lines


@given(parts=st.lists(st.binary(max_size=6) | st.sampled_from([b"\n", b"a\n", b"\n\n"])), most=st.integers(1, 4))
def test_lines_come_back_however_they_are_sent(parts: list[bytes], most: int) -> None:
    read, write = os.pipe()
    for part in parts:
        os.write(write, part)
    os.close(write)
    try:
        found = list(lines_of(read, most))
    finally:
        os.close(read)
    whole = b"".join(parts)
    expected = whole.split(b"\n")
    assert [line for chunk in found for line in chunk] == (expected if expected[-1] else expected[:-1])
    assert all(1 <= len(chunk) <= most for chunk in found)


def test_what_has_arrived_is_not_kept_waiting() -> None:
    read, write = os.pipe()
    chunks = lines_of(read, 100)
    for sent, expected in ((b"one\ntwo\nthr", [b"one", b"two"]), (b"ee\n", [b"three"])):
        os.write(write, sent)
        assert next(chunks) == expected
    os.write(write, b"last")
    os.close(write)
    assert list(chunks) == [[b"last"]]
    os.close(read)


def test_what_cannot_be_read_is_one_sentence() -> None:
    folder = os.open("/", os.O_RDONLY)
    try:
        with pytest.raises(UserError, match="translate: standard input cannot be read: Is a directory; "):
            next(lines_of(folder, 1))
    finally:
        os.close(folder)


def test_a_line_without_end_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(translate, "LONGEST", 10)
    (tmp_path / "in").write_bytes(b"x" * 200_000 + b"\nshort\n" + b"y" * 70_000)
    with (tmp_path / "in").open("rb") as file:
        assert list(lines_of(file.fileno(), 10)) == [[b"x" * 10, b"short", b"y" * 10]]


def test_few_faults_are_told_one_by_one(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = TranslationTask.load_from_checkpoint(checkpoint)
    translator = Translator(task, BeamSearch(beam=1))
    translator([b"\xff"] * 9)
    assert capsys.readouterr().err.count("is not UTF-8") == 5
    assert str(translator).startswith("9 lines, 9 not UTF-8")


# ---------------------------------------------------------------------- pipes


def started(checkpoint: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "stabilize", "translate", "--checkpoint", str(checkpoint), "--beam", "2", *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


def test_a_line_is_answered_before_the_next_is_asked_and_ctrl_c_ends_it(checkpoint: Path) -> None:
    process = started(checkpoint)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for english in ENGLISH[:3]:
            process.stdin.write(text(english))
            process.stdin.flush()
            assert process.stdout.readline().endswith(b"\n")
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, rest) == (130, b"")
    assert b"3 lines" in said
    assert b"Traceback" not in said


def test_a_reader_that_goes_away_ends_it(checkpoint: Path) -> None:
    process = started(checkpoint, "--read_ahead", "5")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, said = process.communicate(text(*ENGLISH * 20), timeout=300)
    assert process.returncode == 141
    assert b"Traceback" not in said
    assert b"Error" not in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_has_no_room_is_one_sentence(checkpoint: Path, unbuffered: str) -> None:
    """Whether it is written at once or when the interpreter ends."""
    command = [sys.executable, "-m", "stabilize", "translate", "--checkpoint", str(checkpoint), "--beam", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        end = subprocess.run(
            command, cwd=ROOT, env=environment, input=text(*ENGLISH), stdout=full, stderr=subprocess.PIPE, timeout=300
        )
    *_, line = end.stderr.decode().splitlines()
    assert line == "error: the output cannot be written: No space left on device; another disk would do"
    assert end.returncode == 2
