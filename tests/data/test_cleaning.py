"""Dirt in text: what is repaired, dropped or only counted; evaluation keeps every line (FIELD_REPORTS 5.1, 5.3, 5.5,
5.6)."""

from __future__ import annotations

import hashlib
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stabilize.cli import main
from stabilize.data import ParallelText, Tokenizer
from stabilize.data.cleaning import RULES, as_written, clean, is_blank
from stabilize.tokens import END, PAD

CLEAN = [(f"the {k}th line of the text".encode(), f"die {k}. Zeile in dem Text".encode()) for k in range(200)]
TEST = [(f"a line {k} to be asked".encode(), f"eine Zeile {k} zum Fragen".encode()) for k in range(100)]

# Pairs with their faults. Each training pair that is dropped counts under one reason, the first in the order of RULES.
PLANTED = [
    (b"\xef\xbb\xbfwith a mark", b"mit einer Marke", {"byte_order_mark"}),
    (b"with a return\r", b"mit Wagenlauf\r", {"windows_line_end"}),
    (b"two\rlines", b"zwei Zeilen", {"carriage_return"}),
    ("two\u2028parts".encode(), "zwei\u2029Teile".encode(), {"line_separator"}),
    (b"a bell \x07", b"eine Glocke", {"control_character"}),
    (b"a nothing \0", b"ein Nichts", {"control_character"}),
    ("a next\u0085line".encode(), b"noch\x0ceine\x1cZeile", {"control_character"}),
    (b"it &apos;s escaped", b"das ist &quot; maskiert &quot;", {"escaped_entity"}),
    (b"caf\xe9", b"Kaffee", {"invalid_utf8"}),
    (b"a surrogate", b"ein \xed\xa0\x80 Surrogat", {"invalid_utf8"}),
    (b"", b"nichts", {"blank"}),
    (b"nothing", " \t\u3000\u00a0\u2003".encode(), {"blank"}),
    ("\u200b\u2060\u00ad".encode(), "\u2800\u3164".encode(), {"blank"}),
    (b"\xef\xbb\xbf \r", b"nichts", {"byte_order_mark", "windows_line_end", "blank"}),
    (b"Copied 1984", b"Copied 1984", {"copied"}),
    (*CLEAN[3], {"duplicate"}),
    (CLEAN[4][0] + b"\r", CLEAN[4][1], {"windows_line_end", "duplicate"}),
    (TEST[5][0], b"etwas anderes", {"in_test"}),
    (b"something else", TEST[7][1], {"in_test"}),
    (b"too long " * 90, b"zu lang", {"too_long"}),
    (b"a b c d e f g h i j k l m n o p q r s", b"z", {"length_ratio"}),
    (b" Copied  1985", b"Copied 1985 ", {"copied"}),
    (CLEAN[5][0].replace(b" ", b"  "), CLEAN[5][1] + b" ", {"duplicate"}),
    (b"another thing", b" " + TEST[8][1].replace(b" ", "\u00a0".encode()), {"in_test"}),
]
DROPPED_ALWAYS = {"invalid_utf8", "blank", "too_long"}
REPAIRED = {"byte_order_mark", "windows_line_end", "carriage_return", "line_separator", "control_character"}


def write(folder: Path, name: str, pairs: list[tuple[bytes, bytes]]) -> None:
    for side, language in enumerate(("en", "de")):
        (folder / f"{name}.{language}").write_bytes(b"".join(pair[side] + b"\n" for pair in pairs))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Every fault, in the training and in the test text."""
    dirty = [(source, target) for source, target, _ in PLANTED]
    write(tmp_path, "train", CLEAN + dirty)
    write(tmp_path, "validation", CLEAN[:10])
    write(tmp_path, "test", TEST + dirty)
    return tmp_path


def ready(folder: Path, **options: Any) -> ParallelText:
    paths = {name: f"{folder}/{name}.{{lang}}" for name in ("train", "validation", "test")}
    settings = {**paths, "vocabulary": 120, "maximum_length": 100, "byte_fallback": False}
    module = ParallelText(**(settings | options))
    module.setup("fit")
    return module


def expected(done: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (_, _, faults) in enumerate(PLANTED, start=len(CLEAN) + 1):
        for rule in faults:
            before = found.setdefault(rule, {"pairs": 0, "first_line": number, "done": done[rule]})
            before["pairs"] += 1
    return found


@pytest.mark.parametrize("drop", [(), ("copied", "duplicate", "in_test", "length_ratio")])
@pytest.mark.parametrize("unescape", [False, True])
def test_each_planted_fault_is_counted_under_its_reason(corpus: Path, drop: tuple[str, ...], unescape: bool) -> None:
    write(corpus, "test", TEST)
    module = ready(corpus, drop=drop, unescape=unescape)
    dropping = DROPPED_ALWAYS | {*drop}
    done = {rule: "dropped" if rule in dropping else "repaired" if rule in REPAIRED else "kept" for rule in RULES}
    done["escaped_entity"] = "repaired" if unescape else "kept"
    account = module.account["train"]
    assert account["rules"] == expected(done)
    left = [k for k, (_, _, faults) in enumerate(PLANTED, start=len(CLEAN)) if not faults & dropping]
    assert account["lines"] == len(CLEAN) + len(PLANTED)
    assert account["pairs"] == len(CLEAN) + len(left)
    lines = [int(line) for batch in module.train_dataloader() for line in batch.index]
    assert sorted(lines) == [*range(len(CLEAN)), *left]


def test_the_first_fault_is_found_again_in_its_file(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several files, and of lines that were held out."""
    for number, at in ((1, 0), (2, 150), (3, 180)):
        write(corpus, f"part-{number}", [*CLEAN[at : at + 20], (b"", b"nichts"), (b"caf\xe9", b"Kaffee")])
    module = ready(corpus, train=[f"{corpus}/part-{number}.{{lang}}" for number in (2, 3, 1)], drop=["duplicate"])
    assert module.account["train"]["rules"]["blank"]["first_file"] == f"{corpus}/part-2.en"
    assert "first_file" not in module.account["test"]["rules"]["blank"]
    held_out = ready(corpus, train=f"{corpus}/part-*.{{lang}}", validation=None, validation_pairs=21)
    for account in (module.account["train"], held_out.account["validation"]):
        for rule, wanted in (("blank", b""), ("invalid_utf8", b"caf\xe9")):
            found = account["rules"][rule]
            assert Path(found["first_file"]).read_bytes().split(b"\n")[found["first_line"] - 1] == wanted
    assert held_out.account["validation"]["rules"]["blank"]["first_file"] == f"{corpus}/part-3.en"
    assert "(part-2.en:21)" in capsys.readouterr().out


def test_further_references_are_looked_at_too(corpus: Path) -> None:
    """They are scored: one that is blank or no text costs points."""
    other = [b"eine", b"", b"caf\xe9", *[b"noch eine"] * (len(TEST) - 3)]
    write(corpus, "other", [(line, line) for line in other])
    write(corpus, "test", TEST)
    rules = ready(corpus, test_references=[f"{corpus}/other.en"]).account["test"]["rules"]
    assert {rule: met["first_line"] for rule, met in rules.items() if rule != "length_ratio"} == {
        "blank": 2,
        "invalid_utf8": 3,
    }


def test_what_is_left_is_read_clean(corpus: Path) -> None:
    module = ready(corpus, unescape=True)
    sources, targets = {}, {}
    for batch in module.train_dataloader():
        for line, source, target in zip(
            batch.index.tolist(), batch.source.tolist(), batch.target.tolist(), strict=True
        ):
            sources[line - len(CLEAN)] = module.tokenizer.decode(source)
            targets[line - len(CLEAN)] = module.tokenizer.decode(target)
    assert sources[0] == "with a mark"
    assert (sources[1], targets[1]) == ("with a return", "mit Wagenlauf")
    assert (sources[2], targets[2]) == ("two lines", "zwei Zeilen")
    assert (sources[3], targets[3]) == ("two parts", "zwei Teile")
    assert sources[5] == "a nothing"
    assert targets[6] == "noch eine Zeile"
    assert (sources[7], targets[7]) == ("it 's escaped", 'das ist " maskiert "')
    assert Tokenizer(module.tokenizer.model).encode("two lines") == module.tokenizer.encode("two lines")


def test_evaluation_keeps_every_line_in_its_place(corpus: Path) -> None:
    module = ready(corpus)
    account = module.account["test"]
    assert account["lines"] == account["pairs"] == len(TEST) + len(PLANTED)
    assert {met["done"] for met in account["rules"].values()} == {"repaired", "kept"}
    assert {rule: met["pairs"] for rule, met in account["rules"].items() if rule in DROPPED_ALWAYS} == {
        "invalid_utf8": 2,
        "blank": 4,
        "too_long": 1,
    }
    rows = {}
    for batch in module.test_dataloader():
        for row, line in enumerate(batch.index.tolist()):
            rows[line] = (batch.source_text[row], batch.references[row], batch.source[row].tolist())
    assert sorted(rows) == [*range(len(TEST) + len(PLANTED))]
    for line, (source, target, _) in enumerate(PLANTED, start=len(TEST)):
        raw, references, _ = rows[line]
        assert raw == source.decode(errors="replace").removeprefix("\ufeff").removesuffix("\r")
        assert references == (target.decode(errors="replace").removeprefix("\ufeff").removesuffix("\r"),)
    blank = rows[len(TEST) + 10][2]
    assert blank == [END] + [PAD] * (len(blank) - 1)
    assert module.tokenizer.decode(rows[len(TEST) + 2][2]) == "two lines", "the model reads what it was trained on"


def test_a_run_has_the_account_with_hashes(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus)
    paths = [f"--data.{name}={name}.{{lang}}" for name in ("train", "validation", "test")]
    shape = [f"--model.{part}=1" for part in ("encoder_layers", "decoder_layers")]
    shape += ["--model.width=8", "--model.heads=2", "--model.hidden=8"]
    trainer = ["--trainer.accelerator=cpu", "--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
    data = ["--data=ParallelText", *paths, "--data.vocabulary=120", "--data.drop=[duplicate,in_test]"]
    assert main(["fit", "--model.stabilizer.placement=PreNorm", *shape, *data, *trainer]) == 0
    (run,) = (corpus / "runs").iterdir()
    account = json.loads((run / "data.json").read_text())
    assert set(account) == {"tokenizer", "train", "validation", "test"}
    assert account["train"]["rules"]["duplicate"] == {"pairs": 3, "first_line": 216, "done": "dropped"}
    (name, english), _ = account["train"]["hashes"]
    assert name == "train.en"
    assert english == hashlib.sha256((corpus / "train.en").read_bytes()).hexdigest()
    assert len(account["train"]["sha256"]) == len(account["test"]["sha256"]) == 64
    assert account["tokenizer"]["hash"] == Tokenizer.load(run / "tokenizer.model").hash


@given(st.text(st.characters(codec="utf-8")))
def test_clean_text_has_no_control_character_and_is_clean(line: str) -> None:
    text, _ = clean(line, unescape=False)
    assert not [c for c in text if unicodedata.category(c) in ("Cc", "Zl", "Zp") and c != "\t"]
    assert clean(text, unescape=False)[0] == text
    visible = [c for c in line if unicodedata.category(c) not in ("Cc", "Zl", "Zp", "Zs") and c != "\ufeff"]
    assert [c for c in text if unicodedata.category(c) != "Zs" and c not in "\t\ufeff"] == visible


def test_white_space_of_every_script_is_blank() -> None:
    spaces = [character for character in map(chr, range(sys.maxunicode + 1)) if character.isspace()]
    assert len(spaces) > 20
    assert all(map(is_blank, ["", *spaces, "".join(spaces)]))
    assert not any(map(is_blank, ["a", "ß", ".", "你", "ا", "🙂", "ก", "0"]))


def test_entities_are_read_once() -> None:
    assert (
        clean("&amp;apos; &#91;1&#93; &#124; &lt;b&gt; R&D &copy;", unescape=True)[0] == "&apos; [1] | <b> R&D &copy;"
    )


def test_evaluation_text_is_shown_on_one_line() -> None:
    assert as_written("\ufeffa\nb \udcff\r") == "a b \ufffd"
