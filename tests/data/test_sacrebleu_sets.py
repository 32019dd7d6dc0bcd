"""sacreBLEU's test sets by name, from a cache and without a network (FIELD_REPORTS 4.7)."""

from __future__ import annotations

import contextlib
import hashlib
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from sacrebleu.dataset import DATASETS

from stabilize.data import ParallelText
from stabilize.errors import UserError


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, languages: str, *sides: Sequence[str]) -> Path:
    """Put a set where sacreBLEU would look for it, as it writes it."""
    place = folder / name
    (place / "raw").mkdir(parents=True)
    monkeypatch.setattr(DATASETS[name], "_outdir", str(place))
    monkeypatch.setattr(DATASETS[name], "_rawdir", str(place / "raw"))
    fields = DATASETS[name].fieldnames(languages) if sides else ()
    for number, field in enumerate(fields):
        lines = sides[number] if field.startswith(("src", "ref")) else ["x"] * len(sides[0])
        file = place / f"{name.replace('/', '_')}.{languages}.{field.replace(':', '-')}"
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return place


def data(folder: Path, test: str, **options: str) -> ParallelText:
    for language in ("en", "de", "fi"):
        (folder / f"train.{language}").write_text("".join(f"{language} line {k}\n" for k in range(30)))
    return ParallelText(train=f"{folder}/train.{{lang}}", validation_pairs=4, test=test, vocabulary=50, **options)


def test_a_set_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path, "wmt14", "en-de", ["one", "", "two"], ["eins", "", "zwei"])
    module = data(tmp_path, "sacrebleu:wmt14")
    module.setup("fit")
    (batch,) = module.test_dataloader()
    rows = dict(zip(batch.index.tolist(), zip(batch.source_text, batch.references, strict=True), strict=True))
    assert rows == {0: ("one", ("eins",)), 1: ("", ("",)), 2: ("two", ("zwei",))}
    assert module.account["test"]["origin"] == "sacrebleu:wmt14 (en to de)"


def test_a_set_with_two_references(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path, "wmt16/tworefs", "en-fi", ["one", "two"], ["yksi", "kaksi"], ["eka", "toka"])
    module = data(tmp_path, "sacrebleu:wmt16/tworefs", source="en", target="fi")
    module.setup("fit")
    (batch,) = module.test_dataloader()
    assert sorted(batch.references) == [("kaksi", "toka"), ("yksi", "eka")]


def pack(monkeypatch: pytest.MonkeyPatch, place: Path, name: str, texts: dict[str, str]) -> Path:
    """The archive of a set in its folder, with the checksum that sacreBLEU expects."""
    for file, text in texts.items():
        path = place / "unpacked" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    archive = place / "raw" / DATASETS[name]._get_tarball_filename(DATASETS[name].data[0])
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(place / "unpacked", arcname=".")
    monkeypatch.setattr(DATASETS[name], "md5", [hashlib.md5(archive.read_bytes()).hexdigest()])
    return archive


WMT21 = """
<dataset id="newstest2021"><collection id="general"><doc id="d" origlang="en">
<src lang="en"><p><seg id="1">one</seg></p></src>
<ref lang="de" translator="A"><p><seg id="1">eins</seg></p></ref>
<ref lang="de" translator="B"><p><seg id="1">ein</seg></p></ref>
<ref lang="de" translator="C"><p><seg id="1">eine</seg></p></ref>
</doc></collection></dataset>
"""


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_references_have_an_order_though_sacrebleu_takes_them_from_a_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: slice
) -> None:
    """Its fields stand in another order in each process; the first reference is the one whose loss is measured."""
    place = plant(monkeypatch, tmp_path, "wmt21/AC", "en-de")
    pack(monkeypatch, place, "wmt21/AC", {"test/newstest2021.en-de.xml": WMT21.strip()})
    monkeypatch.setattr(DATASETS["wmt21/AC"], "fieldnames", lambda _: ["src", "ref:A", "ref:B", "ref:C"][order])
    module = data(tmp_path, "sacrebleu:wmt21/AC")
    module.setup("fit")
    (batch,) = module.test_dataloader()
    assert batch.references == (("eins", "eine"),)


def test_further_references_in_files(tmp_path: Path) -> None:
    for name, text in {"en": "one\ntwo\n", "de": "eins\nzwei\n", "other": "a\nb\n", "short": "a\n"}.items():
        (tmp_path / f"test.{name}").write_text(text)
    module = data(tmp_path, f"{tmp_path}/test.{{lang}}", test_references=[f"{tmp_path}/test.other"])  # type: ignore[arg-type]
    module.setup("fit")
    (batch,) = module.test_dataloader()
    assert sorted(batch.references) == [("eins", "a"), ("zwei", "b")]
    with pytest.raises(UserError, match=r"test\.en has 2 lines but .*test\.de has 2 lines but .*short has 1 lines"):
        data(tmp_path, f"{tmp_path}/test.{{lang}}", test_references=[f"{tmp_path}/test.short"]).setup("fit")  # type: ignore[arg-type]


def test_references_of_several_files_are_refused_with_a_remedy(tmp_path: Path) -> None:
    for name in ("test1.en", "test1.de", "test2.en", "test2.de", "other"):
        (tmp_path / name).write_text("one\n")
    for pattern, refused in (("test1*", False), ("test*", True)):
        module = data(tmp_path, f"{tmp_path}/{pattern}.{{lang}}", test_references=[f"{tmp_path}/other"])  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"test\*\.{lang}, means 2: join") if refused else contextlib.nullcontext():
            module.setup("test")


def test_a_cache_that_was_cut_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = plant(monkeypatch, tmp_path, "wmt14", "en-de", ["one", "two"], ["eins"])
    with pytest.raises(UserError, match=r"wmt14\.en-de\.src has 2 lines but .*wmt14\.en-de\.ref has 1 lines"):
        data(tmp_path, "sacrebleu:wmt14").setup("fit")
    (place / "raw" / DATASETS["wmt14"]._get_tarball_filename(DATASETS["wmt14"].data[0])).write_bytes(b"half of it")
    with pytest.raises(UserError, match=r"is damaged or came in half: remove the folder .*/wmt14, or local files"):
        data(tmp_path, "sacrebleu:wmt14").setup("fit")


def test_text_that_was_cut_short_beside_its_archive_is_not_what_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both sides alike, so that no count of lines tells."""
    place = plant(monkeypatch, tmp_path, "wmt14", "en-de", ["one"], ["eins"])
    paths = dict(zip(("src", "ref"), DATASETS["wmt14"].langpairs["en-de"], strict=True))
    segments = {"src": ("one", "two"), "ref": ("eins", "zwei")}
    texts = {paths[side]: "".join(f'<seg id="1">{text}</seg>\n' for text in segments[side]) for side in paths}
    archive = pack(monkeypatch, place, "wmt14", texts)
    module = data(tmp_path, "sacrebleu:wmt14", cache=f"{tmp_path}/cache")
    module.setup("test")
    (batch,) = module.test_dataloader()
    assert sorted(zip(batch.source_text, batch.references, strict=True)) == [("one", ("eins",)), ("two", ("zwei",))]
    assert [Path(path).name for path, _ in module.account["test"]["hashes"]] == ["wmt14.en-de.src", "wmt14.en-de.ref"]
    archive.write_bytes(b"damaged since, and not needed any more")
    assert [*data(tmp_path, "sacrebleu:wmt14", cache=f"{tmp_path}/cache").read("test")] == [*module.read("test")]


def test_a_server_that_is_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent_server: str) -> None:
    plant(monkeypatch, tmp_path, "wmt14", "en-de")
    monkeypatch.setattr(DATASETS["wmt14"], "data", [f"{silent_server}/test.tgz"] * 9)
    with pytest.raises(UserError, match=r"could not be fetched \(TimeoutError: no answer in .* local files would do"):
        data(tmp_path, "sacrebleu:wmt14").setup("fit")


def test_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path, "wmt14", "en-de")
    with pytest.raises(UserError) as error:
        data(tmp_path, "sacrebleu:wmt14").setup("fit")
    said = str(error.value)
    assert said.startswith(f"sacrebleu:wmt14: {tmp_path}/wmt14 does not have it, and https://")
    assert "could not be fetched" in said
    assert "local files would do, as corpus/test.{lang}" in said


def test_no_such_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sacrebleu:wmt99: sacreBLEU has no such test set for en-de, but .*wmt14, "):
        data(tmp_path, "sacrebleu:wmt99").setup("fit")
