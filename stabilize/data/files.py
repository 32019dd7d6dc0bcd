"""Reading parallel text from files, strictly: what is wrong is said before training, with file and line."""

from __future__ import annotations

import glob
import gzip
import re
import zlib
from collections.abc import Iterable
from typing import Final

from stabilize.data.pairs import Pairs
from stabilize.errors import UserError

GZIP_MAGIC: Final = b"\x1f\x8b"
BYTE_ORDER_MARK: Final = "\ufeff"


def read_lines(path: str) -> list[str]:
    r"""The lines of a UTF-8 file, plain or gzip (told by content, not by name).

    A line ends at `\n` or `\r\n` and nowhere else: the Unicode separators that `str.splitlines` also cuts at occur
    inside sentences. A missing last newline is accepted; a byte-order mark at the start of a line (files get
    concatenated) is dropped.

    Raises:
        UserError: the file is missing, damaged, cut short, or a line is not UTF-8 text.
    """
    try:
        with open(path, "rb") as file:
            compressed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        with gzip.open(path) if compressed else open(path, "rb") as file:
            return [_text(line, path, number) for number, line in enumerate(file, start=1)]
    except EOFError as error:
        raise UserError(f"{path}: the gzip file is cut short: copy or download it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: the gzip file is damaged ({error}): copy or download it again") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: give a text file, plain or gzip") from error


def _text(line: bytes, path: str, number: int) -> str:
    try:
        text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, line {number}: byte 0x{line[error.start]:02x} is not UTF-8: convert the file, e.g. with iconv"
        ) from error
    if "\0" in text:
        raise UserError(f"{path}, line {number}: a NUL character: give a text file in UTF-8")
    return text.removeprefix(BYTE_ORDER_MARK)


def read_pairs(patterns: Iterable[str], source: str, target: str) -> Pairs:
    """All pairs of some path patterns, one after the other.

    Args:
        patterns: paths with `{lang}` for the language and perhaps `*` for several files.
        source: what `{lang}` stands for on the source side.
        target: what it stands for on the target side.

    Raises:
        UserError: a pattern without `{lang}`, a file without partner, files of different length, or any fault of
            `read_lines`.
    """
    pairs = Pairs([], [])
    for pattern in patterns:
        for source_path, target_path in _paths(pattern, source, target):
            source_lines, target_lines = read_lines(source_path), read_lines(target_path)
            if len(source_lines) != len(target_lines):
                raise UserError(
                    f"{source_path} has {len(source_lines)} lines but {target_path} has {len(target_lines)}:"
                    " line k of one must translate line k of the other"
                )
            if not source_lines:
                raise UserError(f"{source_path} is empty: give a file with a sentence on each line")
            pairs.source.extend(source_lines)
            pairs.target.extend(target_lines)
    return pairs


def _paths(pattern: str, source: str, target: str) -> list[tuple[str, str]]:
    if "{lang}" not in pattern:
        raise UserError(
            f"{pattern!r} names no language: write {{lang}} where file names say {source!r} or {target!r},"
            " for example train.{lang}.gz"
        )
    source_pattern, target_pattern = pattern.replace("{lang}", source), pattern.replace("{lang}", target)
    if "*" not in pattern:
        return [(source_pattern, target_pattern)]
    sources, targets = _matches(source_pattern), _matches(target_pattern)
    if not sources or not targets:
        raise UserError(f"{source_pattern if not sources else target_pattern}: no such file")
    for alone in sources.keys() ^ targets.keys():
        raise UserError(f"{(sources | targets)[alone]}: no file in the other language belongs to it")
    return [(sources[key], targets[key]) for key in sorted(sources)]


def _matches(pattern: str) -> dict[tuple[str, ...], str]:
    """What each `*` stands for -> the file, so that the files of two languages can be matched."""
    expression = re.compile(re.escape(pattern).replace(r"\*", "([^/]*)"))
    found = {path: expression.fullmatch(path) for path in glob.glob(glob.escape(pattern).replace("[*]", "*"))}
    return {match.groups(): path for path, match in found.items() if match}
