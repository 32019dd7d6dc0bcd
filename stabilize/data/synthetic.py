"""The embedded corpus: no files, made in seconds, the same for everybody."""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random
from typing import Any

from stabilize.data import grammar, lexicon
from stabilize.data.module import Split, TranslationData
from stabilize.data.pairs import Pairs
from stabilize.errors import UserError, at_least

MOST = 10_000_000
"""Training pairs, which already take minutes to be drawn."""


class SyntheticCorpus(TranslationData):
    """English sentences and their German translations from the grammar in `stabilize.data.grammar`.

    All sentences are distinct, so no test sentence is in the training text. Test and validation come first out of
    the generator: they stay the same however much training text is asked for.

    Args:
        train_pairs: number of training pairs.
        validation_pairs: number of validation pairs.
        test_pairs: number of test pairs; 0: there is no test.
        corpus_seed: which corpus; `seed` is the order of training.
    """

    def __init__(
        self,
        *,
        train_pairs: int = 30_000,
        validation_pairs: int = 500,
        test_pairs: int = 500,
        corpus_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(validation_pairs=validation_pairs, **options)
        at_least("data", train_pairs=(train_pairs, 1), test_pairs=(test_pairs, 0), corpus_seed=(corpus_seed, 0))
        if train_pairs > MOST:
            raise UserError(f"data.train_pairs is {train_pairs}; the embedded corpus has no more than {MOST:,}")
        self.counts: dict[Split, int] = {"test": test_pairs, "validation": validation_pairs, "train": train_pairs}
        self.corpus_seed = corpus_seed

    def read(self, split: Split) -> Pairs:
        """Draw the sentences up to the end of the split."""
        before = sum(list(self.counts.values())[: list(self.counts).index(split)])
        random = Random(self.corpus_seed)
        pairs: dict[str, str] = {}
        while len(pairs) < before + self.counts[split]:
            pairs.setdefault(*grammar.sentence(random))
        return Pairs(list(pairs)[before:], list(pairs.values())[before:])

    def hashes(self, split: Split) -> list[tuple[str, str]]:
        """The settings that the split depends on, and the generator's source."""
        generator = [
            hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest() for module in (grammar, lexicon)
        ]
        return [("stabilize.data.grammar", f"{self.origin(split)}, {' '.join(generator)}")]

    def origin(self, split: Split) -> str:
        """The seed of the generator, and the counts of lines that the split depends on."""
        counts = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        return f"{split} of SyntheticCorpus, corpus_seed {self.corpus_seed}, pairs: {counts}"
