"""Parallel text in files."""

from __future__ import annotations

from typing import Any

from stabilize.data.files import read_pairs
from stabilize.data.module import Split, TranslationData
from stabilize.data.pairs import Pairs


class ParallelText(TranslationData):
    """Text files, plain or gzip, line k of one language beside line k of the other.

    Paths have `{lang}` where the language stands and are relative to the working directory; `*` takes all files that
    match, e.g. `corpus/part-*.{lang}.gz`.

    Args:
        train: path pattern of the training text, or several.
        validation: path pattern of the validation text.
        test: path pattern of the test text; none: there is no test.
        source: what `{lang}` is on the source side.
        target: what `{lang}` is on the target side.
    """

    def __init__(
        self,
        *,
        train: str | list[str],
        validation: str,
        test: str | None = None,
        source: str = "en",
        target: str = "de",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.patterns: dict[Split, list[str]] = {
            "train": [train] if isinstance(train, str) else train,
            "validation": [validation],
            "test": [] if test is None else [test],
        }
        self.source = source
        self.target = target

    def read(self, split: Split) -> Pairs:
        """The pairs of a split's files.

        Raises:
            UserError: see `stabilize.data.files`.
        """
        return read_pairs(self.patterns[split], self.source, self.target)

    def origin(self, split: Split) -> str:
        """The path patterns, and the languages in place of `{lang}`."""
        return f"{' '.join(self.patterns[split])} ({self.source} to {self.target})"
