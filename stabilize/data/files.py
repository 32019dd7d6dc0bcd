"""Reading parallel text from files, line by line: what is no text is refused, with file and line."""

from __future__ import annotations

import glob
import gzip
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Final

from stabilize.errors import UserError

GZIP_MAGIC: Final = b"\x1f\x8b"

OTHER_ENCODING: Final = 0.1
"""A file of which more lines than this share are not UTF-8, or have a NUL, is in another encoding, not dirty."""


def read_lines(path: str) -> Iterator[str]:
    r"""The lines of a UTF-8 file, plain or gzip (told by content, not by name), as they are.

    A line ends at `\n` and nowhere else: the Unicode separators that `str.splitlines` also cuts at occur inside
    sentences. A missing last newline is accepted. Bytes that are not UTF-8 come as surrogate escapes; what to do with
    them, and with other dirt, is decided in `stabilize.data.cleaning`.

    Raises:
        UserError: the file is missing, damaged, cut short, or in another encoding.
    """
    lines, strange, first = 0, 0, ""
    try:
        with open(path, "rb") as file:
            compressed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        with gzip.open(path) if compressed else open(path, "rb") as file:
            for lines, line in enumerate(file, start=1):
                line = line.removesuffix(b"\n")
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    text = line.decode("utf-8", "surrogateescape")
                    first = first or f"line {lines}: byte 0x{line[error.start]:02x} is not UTF-8"
                    strange += 1
                else:
                    if "\0" in text:
                        first = first or f"line {lines}: a NUL character"
                        strange += 1
                yield text
    except EOFError as error:
        raise UserError(f"{path}: the gzip file is cut short: copy or download it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: the gzip file is damaged ({error}): copy or download it again") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: give a text file, plain or gzip") from error
    if strange > OTHER_ENCODING * lines:
        raise UserError(
            f"{path}, {first}, and so {strange:,} of {lines:,} lines: convert the file to UTF-8, e.g. with iconv"
        )


def read_rows(paths: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Line k of each file of a group beside one another, group after group.

    Raises:
        UserError: files of different length, an empty one, or any fault of `read_lines`.
    """
    for group in paths:
        files = [read_lines(path) for path in group]
        count = 0
        for row in itertools.zip_longest(*files):
            if None in row:
                rest = [(line is not None) + sum(1 for _ in file) for line, file in zip(row, files, strict=True)]
                counts = [f"{path} has {count + more:,} lines" for path, more in zip(group, rest, strict=True)]
                raise UserError(
                    f"{' but '.join(counts)}: line k of one must translate line k of the other; one may have been cut"
                    " short: copy or download it again, or give files that belong together"
                )
            count += 1
            yield row
        if not count:
            raise UserError(f"{group[0]} is empty: give a file with a sentence on each line")


def file_pairs(pattern: str, source: str, target: str) -> list[tuple[str, str]]:
    """The files that a path pattern means, both languages beside one another.

    Args:
        pattern: a path with `{lang}` for the language and perhaps `*` for several files.
        source: what `{lang}` stands for on the source side.
        target: what it stands for on the target side.

    Raises:
        UserError: a pattern without `{lang}`, or a file without partner.
    """
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
