"""The hub, through a stand-in for its client; and through the client itself on a folder, where it is installed."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from stabilize.data import HubCorpus
from stabilize.errors import UserError
from tests.checkout import ROOT

COMMIT = "b199e406369ec1b7634206d3ded5ba45de2fe696"
ROWS = {
    "train": [{"translation": {"en": f"line {k} in English", "de": f"Zeile {k} auf Deutsch"}} for k in range(50)],
    "validation": [{"translation": {"en": "two\nlines", "de": "zwei Zeilen"}}, {"translation": {"en": "", "de": "x"}}],
}


class Rows:
    """What `datasets.load_dataset(…, streaming=True)` gives, as far as it is used."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def shuffle(self, *, seed: int, buffer_size: int) -> Rows:
        assert buffer_size >= len(self.rows)
        return Rows(random.Random(seed).sample(self.rows, len(self.rows)))

    def take(self, count: int) -> Rows:
        return Rows(self.rows[:count])


class Hub(ModuleType):
    """Stands for the package `datasets`; notes what is asked for."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.asked: list[tuple[str | None, ...]] = []
        self.rows = dict(ROWS)

    def get_dataset_split_names(self, path: str, config_name: str | None = None, *, revision: str | None) -> list[str]:
        return [*self.rows]

    def load_dataset(
        self, path: str, name: str | None = None, *, revision: str | None, split: str, streaming: bool
    ) -> Rows:
        assert streaming
        self.asked.append((path, name, revision))
        return Rows(self.rows[split])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return hub


def corpus(folder: Path, **options: Any) -> HubCorpus:
    settings = {"path": "wmt/wmt14", "name": "de-en", "revision": COMMIT, "vocabulary": 60, "cache": str(folder)}
    return HubCorpus(**(settings | options))


def test_a_pinned_revision_is_fetched_once(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = corpus(tmp_path)
    module.setup("fit")
    assert hub.asked == [("wmt/wmt14", "de-en", COMMIT)] * 2
    assert {split: module.account[split]["pairs"] for split in ("train", "validation")} == {
        "train": 50,
        "validation": 2,
    }
    assert not module.has("test")
    (batch,) = module.val_dataloader()
    assert sorted(batch.source_text) == ["", "two lines"], "a line of evaluation text is a line of the output"
    assert module.account["train"]["origin"] == f"wmt/wmt14 of the Hugging Face hub at {COMMIT}: de-en train, en to de"
    monkeypatch.setitem(sys.modules, "datasets", None)
    again = corpus(tmp_path)
    again.setup("fit")
    assert again.account == module.account


def test_size_and_seed_choose_a_subset(hub: Hub, tmp_path: Path) -> None:
    def lines(**options: Any) -> list[Any]:
        return [*corpus(tmp_path, train_pairs=7, **options).read("train")]

    assert lines() == lines() != lines(subset_seed=2)
    assert len({tuple(row) for row in lines()} & {tuple(row["translation"].values()) for row in ROWS["train"]}) == 7
    assert [*corpus(tmp_path).read("train")] == [[*row["translation"].values()] for row in ROWS["train"]]


def test_a_dataset_without_validation_text_holds_some_out(hub: Hub, tmp_path: Path) -> None:
    del hub.rows["validation"]
    module = corpus(tmp_path, validation_pairs=5)
    module.setup("fit")
    (batch,) = module.val_dataloader()
    assert sorted(batch.source_text) == [f"line {k} in English" for k in range(45, 50)]


def test_a_hub_that_cannot_be_reached(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach\n'wmt/wmt14' on the Hub")

    monkeypatch.setattr(hub, "get_dataset_split_names", refuse)
    with pytest.raises(UserError) as error:
        corpus(tmp_path).setup("fit")
    assert str(error.value).startswith(
        f"wmt/wmt14 could not be fetched from the Hugging Face hub at {COMMIT} (ConnectionError: Couldn't reach"
        " 'wmt/wmt14' on the Hub): local files would do: --data ParallelText --data.train corpus/train.{lang}"
    )
    assert not [*tmp_path.glob("hub/*.jsonl")]


def test_a_hub_that_is_silent(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_server: str) -> None:
    """The client, which would ask again and again, is not even called (FIELD_REPORTS 4.7)."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", silent_server)
    with pytest.raises(UserError, match=r"TimeoutError: no answer in .* seconds\): local files would do"):
        corpus(tmp_path).setup("fit")
    assert not hub.asked


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:7]])
def test_what_moves_is_refused(tmp_path: Path, revision: str | None) -> None:
    with pytest.raises(UserError, match=r"data\.revision is (not given|main|b199e40), but wmt/wmt14 is no folder here"):
        corpus(tmp_path, revision=revision)


def test_a_folder_whose_content_changes_is_read_again(hub: Hub, tmp_path: Path) -> None:
    """And data.json has the checksum of the lines that were read."""
    folder = tmp_path / "dataset"
    (folder / ".cache").mkdir(parents=True)
    found = []
    for word in ("one", "two", "two"):
        hub.rows["train"] = [{"translation": {"en": f"{word} {k}", "de": f"Zeile {k}"}} for k in range(9)]
        (folder / "train.jsonl").write_text(word)
        (folder / ".cache" / "used").write_text(str(len(found)))
        module = corpus(tmp_path / "cache", path=str(folder), name=None, revision=None)
        module.setup("fit")
        found.append(module.account["train"])
        rows = [[*row["translation"].values()] for row in hub.rows["train"]]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        assert found[-1]["hashes"] == [(f"{folder}: train, en to de", hashlib.sha256(lines.encode()).hexdigest())]
        assert [*module.read("train")] == rows
    assert found[1] == found[2]
    assert len(hub.asked) == 2 * 2


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'stabilize-nmt\[hub\]'; or local files would do"):
        corpus(tmp_path).setup("fit")


def test_a_dataset_of_another_kind(hub: Hub, tmp_path: Path) -> None:
    hub.rows["train"] = [{"text": "no pair"}]
    with pytest.raises(UserError, match="has no 'translation' in its rows"):
        corpus(tmp_path).setup("fit")


@pytest.mark.parametrize("name", ["wmt14_ende", "wmt14_ende_subset"])
def test_the_shipped_configs_pin_a_commit(name: str) -> None:
    given = yaml.safe_load((ROOT / "configs" / "data" / f"{name}.yaml").read_text())["data"]["init_args"]
    assert (given["path"], given["name"], given["source"], given["target"]) == ("wmt/wmt14", "de-en", "en", "de")
    assert len(bytes.fromhex(given["revision"])) == 20


def test_the_client_itself_on_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    folder = tmp_path / "dataset"
    folder.mkdir()
    for split, rows in ROWS.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    module = corpus(tmp_path / "cache", path=str(folder), name=None, revision=None, train_pairs=20)
    module.setup("fit")
    assert [module.account[split]["pairs"] for split in ("train", "validation")] == [20, 2]
    with pytest.raises(UserError, match=r"wmt/wmt14 could not be fetched.*local files would do"):
        corpus(tmp_path / "cache").setup("fit")
