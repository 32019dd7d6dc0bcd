"""Reading files: what breaks lines, what is refused, and in which words (FIELD_REPORTS 5.1, 5.2, 5.5, 5.6, 5.8)."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stabilize.data.files import file_pairs, read_lines, read_rows
from stabilize.errors import UserError

SEPARATORS = "one\u2028still one\ntwo\u0085still two\nthree\x0cstill\x1cthree\x0b\nfour\rstill four\n"


def test_only_newlines_end_lines(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(SEPARATORS.encode())
    lines = [*read_lines(str(path))]
    assert lines == SEPARATORS.split("\n")[:-1]
    assert len(lines) == int(subprocess.check_output(["wc", "-l", path]).split()[0])


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0\ufeff"))), st.booleans())
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, lines: list[str], zipped: bool) -> None:
    path = tmp_path_factory.mktemp("any") / "text"
    raw = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(raw) if zipped else raw)
    assert [*read_lines(str(path))] == lines


def test_a_missing_last_newline_and_no_line(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"one\ntwo\n\nfour")
    assert [*read_lines(str(path))] == ["one", "two", "", "four"]
    path.write_bytes(b"")
    assert [*read_lines(str(path))] == []


def test_gzip_is_told_by_content(tmp_path: Path) -> None:
    for name, raw in {
        "plain.gz": b"a\nb\nc\n",
        "one.gz": gzip.compress(b"a\nb\nc\n"),
        "several.gz": gzip.compress(b"a\nb") + gzip.compress(b"\nc\n"),
        "no_suffix": gzip.compress(b"a\nb\nc\n"),
    }.items():
        (tmp_path / name).write_bytes(raw)
        assert [*read_lines(str(tmp_path / name))] == ["a", "b", "c"], name


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (gzip.compress(b"a line\n" * 999, mtime=0)[:-12], "cut short"),
        (gzip.compress(b"a line\n" * 999, mtime=0)[:-4] + b"\0\0\0\0", "damaged"),
        (gzip.compress(b"a line\n", mtime=0)[:10] + b"\xff" * 20, "damaged"),
        (b"fine\nfine\nbad \xff byte\n", "line 3: byte 0xff is not UTF-8"),
        (b"fine\n" + "a lone surrogate \ud800\n".encode("utf-8", "surrogatepass"), "line 2: byte 0xed is not UTF-8"),
        ("UTF-16\n".encode("utf-16"), "line 1: byte 0xff is not UTF-8"),
        (b"fine\na \0 byte\n", "line 2: a NUL character"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "train.de"
    path.write_bytes(raw)
    with pytest.raises(UserError) as error:
        list(read_lines(str(path)))
    assert str(path) in str(error.value)
    assert words in str(error.value)


def test_a_few_bad_bytes_come_as_escapes(tmp_path: Path) -> None:
    path = tmp_path / "train.de"
    path.write_bytes(b"fine\n" * 9 + b"bad \xff byte\n")
    assert [*read_lines(str(path))] == ["fine"] * 9 + ["bad \udcff byte"]
    path.write_bytes(b"fine\n" * 18 + b"bad \xff byte\na \0 byte\n")
    assert [*read_lines(str(path))][-2:] == ["bad \udcff byte", "a \0 byte"]
    path.write_bytes(b"fine\n" * 17 + b"bad \xff byte\na \0 byte\n")
    with pytest.raises(UserError, match=r"line 18: byte 0xff is not UTF-8, and so 2 of 19 lines: convert the file"):
        list(read_lines(str(path)))


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UserError, match=str(path)):
            list(read_lines(str(path)))


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8", newline="\n")


def read(patterns: list[str]) -> list[tuple[str, ...]]:
    return [*read_rows(files for pattern in patterns for files in file_pairs(pattern, "en", "de"))]


def test_pairs_stay_pairs(tmp_path: Path) -> None:
    write(tmp_path, a__en=SEPARATORS, a__de="eins\nzwei\ndrei\nvier")
    pairs = read([str(tmp_path / "a.{lang}")])
    assert pairs[2][0] == "three\x0cstill\x1cthree\x0b"
    assert [target for _, target in pairs] == ["eins", "zwei", "drei", "vier"]


@pytest.mark.parametrize("german", ["a\nb\nc\nd\n", "a\nb\n", "a\nc"])
def test_files_of_different_length_are_refused_with_both_counts(tmp_path: Path, german: str) -> None:
    write(tmp_path, a__en="a\nb\nc\n", a__de=german)
    count = len(german.split())
    with pytest.raises(UserError, match=rf"a\.en has 3 lines but .*a\.de has {count}"):
        read([str(tmp_path / "a.{lang}")])


def test_several_patterns_and_stars(tmp_path: Path) -> None:
    write(tmp_path, p1__en="1", p1__de="eins", p2__en="2", p2__de="zwei", q__en="3", q__de="drei")
    pairs = read([str(tmp_path / "q.{lang}"), str(tmp_path / "p*.{lang}")])
    assert pairs == [("3", "drei"), ("1", "eins"), ("2", "zwei")]


def test_a_star_never_pairs_files_of_different_names(tmp_path: Path) -> None:
    write(tmp_path, p1__en="1", p2__de="zwei")
    with pytest.raises(UserError, match=r"p[12]\.(en|de): no file in the other language"):
        read([str(tmp_path / "p*.{lang}")])
    with pytest.raises(UserError, match="no such file"):
        read([str(tmp_path / "r*.{lang}")])


def test_a_pattern_needs_the_language(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'train\.gz' names no language: write \{lang\}"):
        read(["train.gz"])
