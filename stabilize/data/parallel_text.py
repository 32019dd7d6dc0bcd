"""Parallel text in files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stabilize.data.files import file_pairs, read_rows
from stabilize.data.module import Split, TranslationData
from stabilize.data.pairs import Row
from stabilize.data.sacrebleu_sets import PREFIX, set_files
from stabilize.errors import UserError


class ParallelText(TranslationData):
    """Text files, plain or gzip, line k of one language beside line k of the other.

    Paths have `{lang}` where the language stands and are relative to the working directory; `*` takes all files that
    match, e.g. `corpus/part-*.{lang}.gz`. In place of a path, `sacrebleu:wmt22` is a test set of sacreBLEU with all its
    references.

    Args:
        train: path pattern of the training text, or several.
        validation: path pattern of the validation text; none: the last training lines are held out.
        test: path pattern of the test text; none: there is no test.
        test_references: paths of further references of the test text, which then is one file.
        source: what `{lang}` is on the source side.
        target: what `{lang}` is on the target side.
    """

    def __init__(
        self,
        *,
        train: str | list[str],
        validation: str | None = None,
        test: str | None = None,
        test_references: Sequence[str] = (),
        source: str = "en",
        target: str = "de",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if test_references and test is None:
            raise UserError("data.test_references are given, but no data.test that they translate")
        self.patterns: dict[Split, list[str]] = {
            "train": [train] if isinstance(train, str) else train,
            "validation": [] if validation is None else [validation],
            "test": [] if test is None else [test],
        }
        self.test_references = tuple(test_references)
        self.source = source
        self.target = target

    def read(self, split: Split) -> Iterable[Row]:
        """The lines of a split's files.

        Raises:
            UserError: see `stabilize.data.files`, `stabilize.data.sacrebleu_sets`.
        """
        return read_rows(self._files(split))

    def hashes(self, split: Split) -> list[tuple[str, str]]:
        """SHA-256 of each file, as often as it is listed."""
        return [(path, self.cache.hash_of(path)) for files in self._files(split) for path in files]

    def origin(self, split: Split) -> str:
        """The path patterns, and the languages in place of `{lang}`."""
        return f"{' '.join(self.patterns[split])} ({self.source} to {self.target})"

    def locate(self, split: Split, line: int) -> tuple[str | None, int]:
        """File and line of a line of a split, counted from 1; no file where there is but one for a side."""
        file, *others = (files[0] for files in self._files(split))
        found = file
        for after in others:
            if line <= (count := self.cache.lines_of(found)):
                break
            found, line = after, line - count
        return (found if others else None), line

    def _files(self, split: Split) -> list[tuple[str, ...]]:
        """The files whose lines stand beside one another, group after group."""
        groups = [files for pattern in self.patterns[split] for files in self._matching(pattern)]
        if split != "test" or not self.test_references:
            return groups
        if len(groups) > 1:
            raise UserError(
                f"data.test_references translate one file, but data.test, {self.patterns[split][0]}, means"
                f" {len(groups)}: join these into one, as with cat"
            )
        return [(*files, *self.test_references) for files in groups]

    def _matching(self, pattern: str) -> Sequence[tuple[str, ...]]:
        if pattern.startswith(PREFIX):
            return [set_files(pattern.removeprefix(PREFIX), self.source, self.target, self.cache)]
        return file_pairs(pattern, self.source, self.target)
