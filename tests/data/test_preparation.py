"""Prepared text on the disk: made once, whole or not at all, opened without a scan (FIELD_REPORTS 5.9, 5.10)."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stabilize.data import ParallelText, Tokenizer, cleaning, preparation
from stabilize.data.cache import Cache
from stabilize.data.loader import BatchLoader
from stabilize.data.preparation import Preparation
from stabilize.errors import UserError
from tests.tasks import Sentences, small_task

ENGLISH = [f"a line with {'many ' * (k % 7)}words {k}" for k in range(90)]
GERMAN = [f"eine Zeile mit {'vielen ' * (k % 5)}Wörtern {k}" for k in range(90)]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """90 pairs, every seventh of them blank, and chunks of ten lines."""
    monkeypatch.setattr(preparation, "CHUNK", 10)
    for language, lines in (("en", ENGLISH), ("de", GERMAN)):
        written = ["" if k % 7 == 3 else line for k, line in enumerate(lines)]
        (tmp_path / f"train.{language}").write_text("".join(f"{line}\n" for line in written), encoding="utf-8")
        (tmp_path / f"test.{language}").write_text("".join(f"{line}\n" for line in lines[:5]), encoding="utf-8")
    return tmp_path


def data(folder: Path, cache: str = "cache", **options: Any) -> ParallelText:
    settings = {"train": f"{folder}/train.{{lang}}", "test": f"{folder}/test.{{lang}}", "validation_pairs": 8}
    return ParallelText(**({**settings, "vocabulary": 100, "cache": f"{folder}/{cache}"} | options))


def ready(folder: Path, cache: str = "cache", **options: Any) -> ParallelText:
    module = data(folder, cache, **options)
    module.setup("fit")
    return module


def files(folder: Path) -> dict[str, bytes]:
    """Name and content of all that is prepared in a folder."""
    found = [path for path in folder.glob("*/**/*") if path.is_file() and path.suffix not in (".lock", ".json")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if "files" not in path.parts}


def batches(loader: BatchLoader) -> list[list[Any]]:
    return [[part.tolist() for part in batch[:3]] for batch in loader]


class Killed(BaseException):
    """Nothing catches it."""


def test_what_a_kill_left_is_gone_on_from(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(corpus, "whole")
    by_length, encode_all = cleaning.Policy.by_length, Tokenizer.encode_all
    encoded: list[str] = []

    def count(self: Tokenizer, texts: list[str], threads: int = 1) -> Any:
        encoded.extend(texts)
        return encode_all(self, texts, threads)

    def kill(self: cleaning.Policy, met: Any, lines: Any, lengths: Any) -> Any:
        if lines[0] >= 40:
            raise Killed
        return by_length(self, met, lines, lengths)

    with monkeypatch.context() as patch:
        patch.setattr(cleaning.Policy, "by_length", kill)
        with pytest.raises(Killed):
            ready(corpus, "killed")
    (part,) = (corpus / "killed").glob("*/ids-*.part")
    with open(part / "source.values", "ab") as half_written:
        half_written.write(b"half of a chunk")
    monkeypatch.setattr(Tokenizer, "encode_all", count)
    ready(corpus, "killed")
    assert not {ENGLISH[k] for k in range(5, 40)} & {*encoded}, "what was done is done once"
    assert files(corpus / "killed") == files(corpus / "whole")
    assert len(files(corpus / "whole")) == 5 + 1 + 5


def test_a_kill_while_lines_are_read_leaves_nothing_half(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(cleaning.Marks, "account", kill)
        with pytest.raises(Killed):
            ready(corpus, "killed")
    ready(corpus, "killed")
    ready(corpus, "whole")
    assert files(corpus / "killed") == files(corpus / "whole")


def test_of_several_at_once_one_prepares(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for step in ("_clean", "_learn", "_tokenise"):
        does = getattr(Preparation, step)

        def note(self: Preparation, *arguments: Any, step: str = step, does: Any = does) -> None:
            made.append(step)
            does(self, *arguments)

        monkeypatch.setattr(Preparation, step, note)
    with ThreadPoolExecutor(4) as pool:
        modules = [*pool.map(lambda _: ready(corpus), range(4))]
    assert sorted(made) == ["_clean", "_learn", "_tokenise"]
    first, *others = (batches(module.train_dataloader()) for module in modules)
    assert all(other == first for other in others)


def test_a_prepared_corpus_is_opened_without_reading_it(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = batches(ready(corpus).train_dataloader())

    def read(*_: Any) -> Any:
        raise AssertionError("the training text is read again")

    for step in ("_clean", "_learn", "_tokenise"):
        monkeypatch.setattr(Preparation, step, read)
    module = ready(corpus)
    pairs = module._splits["train"]
    assert all(isinstance(array, np.memmap) for array in (pairs._source.values, pairs._target.ends, pairs._lines))
    assert batches(module.train_dataloader()) == expected


def test_pairs_travel_to_another_process_as_names_of_files(corpus: Path) -> None:
    pairs = ready(corpus, sampling=0.1)._splits["train"]
    sent = pickle.dumps(pairs)
    rows = np.array([3, 0, 7])
    assert pickle.loads(sent)[rows].target.tolist() == pairs[rows].target.tolist()
    assert pairs._source.values.tobytes() not in sent
    assert ENGLISH[0].encode() not in sent


def test_other_text_or_other_rules_are_prepared_anew(corpus: Path) -> None:
    assert ready(corpus).account["train"]["pairs"] == 70
    assert ready(corpus, drop=["in_test"]).account["train"]["pairs"] == 66
    assert ready(corpus, maximum_length=ready(corpus).longest_line - 1).account["train"]["pairs"] < 70
    with (corpus / "train.en").open("a") as english, (corpus / "train.de").open("a") as german:
        english.write("one line more\n")
        german.write("eine Zeile mehr\n")
    assert ready(corpus).account["train"]["lines"] == 83


def test_a_file_listed_twice_is_read_twice(corpus: Path) -> None:
    """In one cache with the text that has it once, whichever is prepared first."""
    once, twice = (
        {"train": [f"{corpus}/{name}.{{lang}}" for name in names], "test": None}
        for names in (("train", "test"), ("train", "train", "test"))
    )
    for cache, order in (("cache", (once, twice)), ("other", (twice, once))):
        found = [ready(corpus, cache, **options).account["train"]["lines"] for options in order]
        assert sorted(found) == [90 + 5 - 8, 90 + 90 + 5 - 8]
        assert (found[0] < found[1]) == (order[0] is once)
    account = ready(corpus, **twice).account["train"]
    assert [Path(path).name for path, _ in account["hashes"]] == ["train.en", "train.de"] * 2 + ["test.en", "test.de"]


def test_the_last_lines_are_held_out_where_there_is_no_validation_text(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ready(corpus)
    assert "the last 8 lines of" in capsys.readouterr().out
    shown = {}
    for batch in module.val_dataloader():
        shown |= dict(zip(batch.index.tolist(), batch.source_text, strict=True))
    assert [shown[line] for line in range(8)] == ["" if k % 7 == 3 else ENGLISH[k] for k in range(82, 90)]
    trained = {line for batch in module.train_dataloader() for line in batch.index.tolist()}
    assert trained == {k for k in range(82) if k % 7 != 3}
    assert module.account["validation"]["lines"] == module.account["validation"]["pairs"] == 8
    with pytest.raises(UserError, match=r"has 90 lines, of which the last 1,000 would be held out.*validation_pairs"):
        ready(corpus, validation_pairs=None)


def test_a_large_text_is_sampled_for_the_tokenizer_on_both_sides(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    train = Tokenizer.train

    def note(lines: Any, **options: Any) -> Tokenizer:
        seen.extend(lines)
        return train(seen, **options)

    monkeypatch.setattr(preparation, "TRAINING_LINES", 40)
    monkeypatch.setattr(Tokenizer, "train", note)
    ready(corpus)
    kept = [k for k in range(82) if k % 7 != 3]
    assert seen == [line for k in kept[::4] for line in (ENGLISH[k], GERMAN[k])]


def test_damage_in_the_cache_is_said(corpus: Path) -> None:
    ready(corpus)
    (damaged,) = (corpus / "cache").glob("*/ids-*/target.values")
    damaged.write_bytes(damaged.read_bytes()[:-2])
    with pytest.raises(UserError, match=rf"{damaged.parent} is damaged: remove it"):
        ready(corpus)


def test_a_cache_that_cannot_be_written(corpus: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be kept in .*train\.en/below: Not a directory; data.cache"):
        ready(corpus, cache="train.en/below")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Cache("here").folder == Path("here")
    monkeypatch.setenv("STABILIZE_CACHE", "~/there")
    assert Cache().folder == Path.home() / "there"
    monkeypatch.delenv("STABILIZE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache().folder == tmp_path / "stabilize"


def test_a_file_is_hashed_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, path = Cache(str(tmp_path / "cache")), tmp_path / "text"
    path.write_text("one")
    os.utime(path, (1e9, 1e9))
    first = cache.hash_of(str(path))
    path.write_text("two")
    os.utime(path, (1e9, 1e9))
    assert cache.hash_of(str(path)) != first, "same size, same time"
    monkeypatch.setattr("stabilize.data.cache.FRESH", -1e9)
    known = cache.hash_of(str(path))
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("an unchanged file is read again"))
    assert cache.hash_of(str(path)) == known


def test_ids_are_the_same_in_every_process(corpus: Path) -> None:
    """However Python's hashes fall, and with nothing prepared."""
    code = (
        "import sys; from stabilize.data import ParallelText;"
        "data = ParallelText(train=sys.argv[1] + '/train.{lang}', validation_pairs=8, vocabulary=100,"
        " drop=['duplicate'], cache=sys.argv[2]); data.setup('fit');"
        "print(data.account['train']['sha256'], data.account['tokenizer']['sha256'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(corpus), str(corpus / "other")],
        env=os.environ | {"PYTHONHASHSEED": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    account = ready(corpus, drop=["duplicate"], test=None).account
    assert done.stdout.splitlines()[-1] == f"{account['train']['sha256']} {account['tokenizer']['sha256']}"


def test_a_checkpoint_keeps_its_vocabulary() -> None:
    """More text gives other pieces; a run that goes on has the ones it began with, and no others."""
    before, more = Tokenizer.train(ENGLISH, vocabulary=60), Tokenizer.train(ENGLISH + GERMAN, vocabulary=60)
    module = Sentences()
    module.given_tokenizer = before
    module.setup("fit")
    assert module.tokenizer is before
    task = small_task()
    task.tokenizer = more
    saved = {"task": task.spec(), "optimizers": [], "tokenizer": before.model}
    with pytest.raises(UserError, match=rf"the checkpoint's tokenizer \({before.hash}\) is not this run's"):
        task.on_load_checkpoint(saved)
    swapped = before.model.replace(b"\x0a\x01a", b"\x0a\x01b", 1)
    assert Tokenizer(swapped).hash != before.hash


@pytest.mark.soak
def test_processes_at_once_after_a_kill(tmp_path: Path) -> None:
    """One is killed for good while it tokenises, then three start together; what they have is what one alone has."""
    for language, word in (("en", "line"), ("de", "Zeile")):
        text = "".join(f"{word} {k} {word * (k % 9)} {k * k}\n" for k in range(300_000))
        (tmp_path / f"train.{language}").write_text(text, encoding="utf-8")
    code = (
        "import sys; from stabilize.data import ParallelText;"
        "data = ParallelText(train=sys.argv[1] + '/train.{lang}', validation_pairs=8, vocabulary=300,"
        " cache=sys.argv[2]); data.setup('fit'); print(data.account['train']['sha256'])"
    )

    def start(cache: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / cache)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    killed = start("killed")
    while not [*tmp_path.glob("killed/*/ids-*.part/state.json")]:
        assert killed.poll() is None, "it was over before it could be killed"
    killed.kill()
    killed.communicate()
    (state,) = tmp_path.glob("killed/*/ids-*.part/state.json")
    assert json.loads(state.read_text())["chunks"] < 15
    together = [start("killed") for _ in range(3)]
    said = {process.communicate()[0].splitlines()[-1] for process in together}
    assert {process.returncode for process in together} == {0}
    assert said == {start("whole").communicate()[0].splitlines()[-1]}
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
