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
        test_references: paths of further references of the test text.
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

    def _files(self, split: Split) -> list[tuple[str, ...]]:
        more = self.test_references if split == "test" else ()
        return [(*files, *more) for pattern in self.patterns[split] for files in self._matching(pattern)]

    def _matching(self, pattern: str) -> Sequence[tuple[str, ...]]:
        if pattern.startswith(PREFIX):
            return [set_files(pattern.removeprefix(PREFIX), self.source, self.target, self.cache)]
        return file_pairs(pattern, self.source, self.target)
