"""Parallel text from the Hugging Face hub."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from stabilize.data.cache import key
from stabilize.data.module import Split, TranslationData
from stabilize.data.network import answered
from stabilize.data.pairs import Row
from stabilize.data.progress import progress
from stabilize.errors import UserError, at_least

BUFFER: Final = 10_000
"""Pairs among which the next one is drawn while a subset streams in."""

INSTEAD: Final = (
    "local files would do: --data ParallelText --data.train corpus/train.{lang} --data.validation"
    " corpus/validation.{lang} --data.test corpus/test.{lang}, as in configs/data/files.yaml"
)


OFFLINE: Final = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
"""Environment variables that forbid the hub's client the network."""

COMMIT: Final = re.compile("[0-9a-f]{40}")


class HubCorpus(TranslationData):
    """A translation dataset of the Hugging Face hub, at one commit, or one in a folder; needs
    `pip install 'stabilize-nmt[hub]'`.

    A subset streams in, without what is not used of the files; it is what the hub's streaming calls shuffled: files in
    an order by the seed, pairs drawn from a buffer of 10,000. What came in is kept in the cache, and no run needs the
    network again. A folder is read again where one of its files has changed.

    Args:
        path: of the dataset on the hub, or a folder with one.
        name: of the configuration within the dataset, where it has several.
        revision: commit of the dataset, 40 digits; none for a folder.
        train_pairs: size of the subset of the training text; none: all of it, in order.
        subset_seed: which subset.
        source: language of the source side.
        target: language of the target side.

    Raises:
        UserError: a revision that is no commit: a branch moves, and the same run would not be the same.
    """

    def __init__(
        self,
        *,
        path: str,
        revision: str | None = None,
        name: str | None = None,
        train_pairs: int | None = None,
        subset_seed: int = 1,
        source: str = "en",
        target: str = "de",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        at_least("data", train_pairs=(1 if train_pairs is None else train_pairs, 1), subset_seed=(subset_seed, 0))
        self.folder = Path(path) if Path(path).is_dir() else None
        if self.folder is None and not COMMIT.fullmatch(revision or ""):
            raise UserError(
                f"data.revision is {revision or 'not given'}, but {path} is no folder here, and on the hub a branch"
                f" moves: give one of the commits of https://huggingface.co/datasets/{path}/commits, all 40 digits"
            )
        self.path = path
        self.revision = revision
        self.dataset_name = name
        self.train_pairs = train_pairs
        self.subset_seed = subset_seed
        self.source = source
        self.target = target

    def read(self, split: Split) -> Iterable[Row]:
        """The lines of a split, none where the dataset has no such split.

        Raises:
            UserError: the hub cannot be reached, or its dataset is of another kind.
        """
        with self._lines(split).open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    def hashes(self, split: Split) -> list[tuple[str, str]]:
        """SHA-256 of the lines, as JSON."""
        return [(self.origin(split), self.cache.hash_of(str(self._lines(split))))]

    def origin(self, split: Split) -> str:
        """The dataset, its revision, and what is taken from it."""
        where = f"{self.path} of the Hugging Face hub at {self.revision}" if self.folder is None else self.path
        return f"{where}: {self._taken(split)}"

    def _lines(self, split: Split) -> Path:
        """A file of the cache with what was fetched."""
        content: Any = [self.path, self.revision]
        if self.folder is not None:
            # What is hidden, as .git and what the client keeps there, is no part of a dataset.
            names = sorted(path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
            seen = [name for name in names if not any(part.startswith(".") for part in name.parts)]
            content = [(str(name), self.cache.hash_of(str(self.folder / name))) for name in seen]
        name = f"hub/{key([content, self._taken(split)])}.jsonl"
        return self.cache.made(name, lambda path: self._fetch(split, path))

    def _taken(self, split: Split) -> str:
        taken = f"{self.dataset_name or ''} {split}, {self.source} to {self.target}".lstrip()
        subset = split == "train" and self.train_pairs is not None
        return f"{taken}, {self.train_pairs} pairs, subset_seed {self.subset_seed}" if subset else taken

    def _fetch(self, split: Split, path: Path) -> None:
        try:
            datasets = importlib.import_module("datasets")
        except ImportError as error:
            need = "HubCorpus needs the package datasets, pip install 'stabilize-nmt[hub]'"
            raise UserError(f"{need}; or {INSTEAD}") from error
        try:
            with (
                path.open("w", encoding="utf-8", newline="\n") as file,
                progress(f"fetch {self.path}", None) as advance,
            ):
                if self.folder is None and not any(map(os.environ.get, OFFLINE)):
                    answered([os.environ.get("HF_ENDPOINT", "https://huggingface.co")])
                if split not in datasets.get_dataset_split_names(self.path, self.dataset_name, revision=self.revision):
                    return
                rows = datasets.load_dataset(
                    self.path, self.dataset_name, revision=self.revision, split=split, streaming=True
                )
                if split == "train" and self.train_pairs is not None:
                    rows = rows.shuffle(seed=self.subset_seed, buffer_size=BUFFER).take(self.train_pairs)
                for row in rows:
                    pair = row["translation"]
                    file.write(json.dumps([pair[self.source], pair[self.target]]) + "\n")
                    advance(1)
        except KeyError as error:
            raise UserError(
                f"{self.path} has no {error} in its rows; a dataset whose rows have a translation with"
                f" {self.source} and {self.target} would do"
            ) from error
        except Exception as error:  # the hub's client, its transport and its readers have each their own
            where = "be read" if self.folder else f"be fetched from the Hugging Face hub at {self.revision}"
            raise UserError(
                f"{self.path} could not {where} ({type(error).__name__}: {' '.join(str(error).split())}): {INSTEAD}"
            ) from error
