"""From raw lines to batches, as a LightningDataModule."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console

from stabilize.data.account import summary, table
from stabilize.data.baselines import TRAINING_PAIRS, nearest_neighbour, word_by_word
from stabilize.data.cache import Cache
from stabilize.data.cleaning import RULES, Droppable, Marks, Met, Policy, as_written, unescaped
from stabilize.data.flat import Sentences
from stabilize.data.loader import BatchLoader
from stabilize.data.noise import Noise
from stabilize.data.pairs import Pairs, Row, TokenizedPairs
from stabilize.data.preparation import Preparation, Recipe
from stabilize.data.sampler import TokenBatches
from stabilize.data.tokenizer import Subwords, Tokenizer
from stabilize.errors import UserError, at_least

Split = Literal["train", "validation", "test"]

HELD_OUT: Final = 1000
"""Training lines that become the validation text of a corpus that brings none, where no number is given."""


class TranslationData(LightningDataModule, ABC):
    """Parallel text, cleaned, tokenised and batched. Subclasses say where the lines come from: `read(split)`.

    Text is cleaned by the rules in `stabilize.data.cleaning`, of which each is counted. Training pairs with a blank
    side, with bytes that are not UTF-8, or of more than `maximum_length` tokens are dropped; evaluation keeps every
    line. The tokenizer is learnt from the training text, unless `given_tokenizer` was set before `setup` (a checkpoint
    brings its own), and is written into the run's folder. Training text is prepared once and kept in the cache.

    After `setup`: `tokenizer`, `account`, what `data.json` in the run's folder says, and for each evaluation
    text `totals` and `references`.

    Args:
        vocabulary: number of subword pieces, one vocabulary for both languages.
        subwords: byte-pair encoding, or the unigram language model.
        byte_fallback: write rare characters as bytes instead of giving each its own piece.
        sampling: cut training text into other pieces in each epoch: the share of BPE's merges that are left out (0.1 is
            usual), or the exponent of unigram's probabilities (0.2 is usual); 0: always the best ones.
        unread: share of source tokens in training in whose place the unknown token stands.
        unescape: read `&apos;` and its like, which Moses writes, as the characters they stand for, in references that
            were held out of the training text too.
        drop: which training pairs are dropped and not only counted: copied (target is source), duplicate, in_test (a
            side is a line of the test text), length_ratio.
        maximum_ratio: of the tokens of the sides, beyond which a pair counts under length_ratio.
        batch_tokens: budget of a training batch: rows x longest sentence of either side, padding and end included.
        evaluation_batch_tokens: the same in evaluation.
        maximum_length: longest training sentence in tokens, end included; longer pairs are dropped.
        evaluation_maximum_length: the same in evaluation, where a longer line is read, and its nll taken, up to there;
            scores are taken with its whole reference.
        validation_pairs: use only the first n validation lines; none uses all. Of a corpus without validation text, the
            last n training lines (none: 1,000) are held out.
        seed: of the order of the training data and its noise; none: the seed of `seed_everything`.
        workers: processes that prepare batches; 0 prepares them in the training process.
        baselines: whether `baseline_translations` are wanted beside the model's.
        cache: folder of prepared text; none: `STABILIZE_CACHE`, or `~/.cache/stabilize`.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 8000,
        subwords: Subwords = "bpe",
        byte_fallback: bool = False,
        sampling: float = 0.0,
        unread: float = 0.0,
        unescape: bool = False,
        drop: Sequence[Droppable] = (),
        maximum_ratio: float = 3.0,
        batch_tokens: int = 4096,
        evaluation_batch_tokens: int = 8192,
        maximum_length: int = 256,
        evaluation_maximum_length: int = 1024,
        validation_pairs: int | None = None,
        seed: int | None = None,
        workers: int = 0,
        baselines: bool = False,
        cache: str | None = None,
    ) -> None:
        super().__init__()
        at_least(
            "data",
            vocabulary=(vocabulary, 1),
            sampling=(sampling, 0),
            unread=(unread, 0),
            maximum_ratio=(maximum_ratio, 1),
            batch_tokens=(batch_tokens, 1),
            evaluation_batch_tokens=(evaluation_batch_tokens, 1),
            maximum_length=(maximum_length, 1),
            evaluation_maximum_length=(evaluation_maximum_length, 2),
            validation_pairs=(1 if validation_pairs is None else validation_pairs, 1),
            seed=(0 if seed is None else seed, 0),
            workers=(workers, 0),
        )
        for name, share in (("sampling", sampling), ("unread", unread)):
            if share >= 1:
                raise UserError(f"data.{name} is {share}; a share below 1 would do")
        self.vocabulary = vocabulary
        self.subwords = subwords
        self.byte_fallback = byte_fallback
        self.sampling = sampling
        self.unread = unread
        self.policy = Policy(unescape, tuple(drop), maximum_length, maximum_ratio)
        self.batch_tokens = batch_tokens
        self.evaluation_batch_tokens = evaluation_batch_tokens
        self.evaluation_maximum_length = evaluation_maximum_length
        self.validation_pairs = validation_pairs
        self.seed = seed
        self.workers = workers
        self.baselines = baselines
        self.cache = Cache(cache)
        self.given_tokenizer: Tokenizer | None = None
        self.tokenizer: Tokenizer
        self.account: dict[str, Any] = {}
        self.word_entropy: float | None = None
        """What knowing the frequency of each target token of the training text costs a token, in nats; for a model
        that learns nothing more this is the loss. None before `setup("fit")`."""
        self.longest_line = 0
        """Tokens of the longest line that a model will read or be scored on, known after `setup`."""
        self.totals: dict[Split, int] = {}
        """Lines of each evaluation text, those that are left out by `validation_pairs` too."""
        self.references: dict[Split, int] = {}
        """References that each evaluation text has for a line."""
        self._splits: dict[Split, TokenizedPairs] = {}
        self._texts: dict[Split, Pairs] = {}
        self._prepared: Preparation | None = None

    @abstractmethod
    def read(self, split: Split) -> Iterable[Row]:
        """The raw lines of a split, one after the other: source, target, and further references if there are; none
        where the user gave no such split. Of training text no more has to be in memory than a line.

        Raises:
            UserError: the lines cannot be had.
        """

    def hashes(self, split: Split) -> list[tuple[str, str]]:
        """What a split is made of, in its order: names, and for each a word that changes with its content."""
        return [(type(self).__name__, hash_of_rows(self.read(split)))]

    def origin(self, split: Split) -> str:
        """Where the lines of a split come from, in words for who wants to find them again."""
        return type(self).__name__

    def locate(self, split: Split, line: int) -> tuple[str | None, int]:
        """Where a line of a split is found again: file, if that says anything, and line; lines count from 1."""
        return None, line

    # ------------------------------------------------------------------ text to ids

    def setup(self, stage: str | None) -> None:
        """Read, clean, tokenise and count the splits of a stage (none: all) that are not there yet.

        Raises:
            UserError: text that cannot be read or has no pairs left.
        """
        evaluation: dict[str | None, tuple[Split, ...]] = {
            "validate": ("validation",),
            "test": ("test",),
            "predict": ("test",),
        }
        wanted: tuple[Split, ...] = evaluation.get(stage, ("train", "validation", "test"))
        new = [split for split in wanted if split not in self._splits]
        if not hasattr(self, "tokenizer"):
            self.tokenizer = self.given_tokenizer or self._preparation().tokenizer()
            self.account["tokenizer"] = {"sha256": hashlib.sha256(self.tokenizer.model).hexdigest()}
            self.account["tokenizer"] |= {"hash": self.tokenizer.hash, "vocabulary": self.tokenizer.vocabulary}
        for split in new:
            if split == "train":
                self._add_training()
            else:
                self._add_evaluation(split)
        if new:
            rank_zero_only(self._tell)()
        if self.trainer is not None and self.trainer.is_global_zero:
            folder = Path(self.trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "data.json").write_text(json.dumps(self.account, indent=2) + "\n", encoding="utf-8")
            if stage == "fit":
                self.tokenizer.save(folder / "tokenizer.model")

    def _brought(self, split: Split) -> Pairs:
        """The raw lines of an evaluation text that the corpus brings."""
        if split not in self._texts:
            self._texts[split] = Pairs.of(self.read(split))
        return self._texts[split]

    @property
    def _held_out(self) -> int:
        """How many of the training lines are the validation text."""
        return 0 if self._brought("validation") else self.validation_pairs or HELD_OUT

    def _preparation(self) -> Preparation:
        """Of the training text, once the evaluation texts could be read."""
        if self._prepared is None:
            recipe = Recipe(self.policy, self._held_out, self.vocabulary, self.subwords, self.byte_fallback)
            test, identity = self._brought("test"), [content for _, content in self.hashes("train")]
            self._prepared = Preparation(self.cache, recipe, identity, lambda: self.read("train"), test)
        return self._prepared

    def _add_training(self) -> None:
        text, ids = self._preparation().text(), self._preparation().ids(self.tokenizer)
        noise = None
        if self.sampling or self.unread:
            limit = self.policy.maximum_length
            noise = Noise(text.source, text.target, self.tokenizer, self.sampling, self.unread, limit, self._seed)
        self._splits["train"] = TokenizedPairs(ids.source, ids.target, ids.lines, noise=noise)
        self._note("train", len(text.source), len(ids.lines), text.met | ids.met, ids.sha256)
        self.longest_line = max(self.longest_line, ids.longest)
        self.word_entropy = ids.entropy

    def _add_evaluation(self, split: Split) -> None:
        text = self._brought(split)
        held_out = split == "validation" and self._held_out
        if held_out:
            text = self._preparation().text().held_out
        if not text:
            return
        self.totals[split], self.references[split] = len(text), 1 + len(text.more)
        if split == "validation":
            text = text.first(self.validation_pairs)
        marks = Marks(self.policy._replace(evaluation=True))
        source, target = (Sentences.of(lines, self.tokenizer) for lines in marks.add([*text]))
        numbers, met = marks.account()
        lengths = np.stack([source.lengths, target.lengths])
        marks.policy.by_length(met, numbers, lengths)
        longest = self.evaluation_maximum_length
        marks.policy.note(met, "cut", numbers[lengths.max(0) > longest])
        learnt = unescaped if held_out and self.policy.unescape else str  # how references were read in training
        written = Pairs.of(
            [as_written(line), *(as_written(learnt(other)) for other in references)] for line, *references in text
        )
        self._splits[split] = TokenizedPairs(source.cut(longest), target.cut(longest), numbers, text=written)
        self._note(split, len(text), len(text), met, hash_of_rows(text), held_out=held_out)
        self.longest_line = max(self.longest_line, min(longest, int(lengths.max())))

    def _note(
        self, split: Split, lines: int, pairs: int, met: dict[str, Met], sha256: str, *, held_out: int = 0
    ) -> None:
        whole: Split = "train" if held_out else split
        before = len(self._preparation().text().source) if held_out else 0
        rules: dict[str, Any] = {}
        for rule in (rule for rule in RULES if rule in met):
            file, line = self.locate(whole, before + met[rule].first_line)
            rules[rule] = met[rule]._replace(first_line=line)._asdict() | ({"first_file": file} if file else {})
        self.account[split] = {
            "origin": f"the last {held_out:,} lines of {self.origin(whole)}" if held_out else self.origin(split),
            "hashes": self.hashes(whole),
            "lines": lines,
            "pairs": pairs,
            "rules": rules,
            "sha256": sha256,
        }

    def _tell(self) -> None:
        print(summary(self.account))
        if "validation" in self.account and self._held_out:
            print(f"there is no validation text: it is {self.account['validation']['origin']}, held out")
        if (shown := table(self.account)) is not None:
            Console().print(shown)

    @property
    def place(self) -> Path:
        """Where the training text is kept as it was prepared."""
        return self.cache.folder / self._preparation().name

    def has(self, split: Split) -> bool:
        """Whether there is text of a split, known after `setup`."""
        return split in self._splits

    def written(self, lines: Sequence[int]) -> list[tuple[str, str]]:
        """Source and target of some lines of the training text, clean as a model reads them."""
        text = self._preparation().text()
        return [(text.source[line], text.target[line]) for line in lines]

    def train_dataloader(self) -> BatchLoader:
        """Batches of the training pairs, in another order each epoch."""
        # Lightning's overfit_batches means the same few batches again and again.
        shuffle = self.trainer is None or not self.trainer.overfit_batches
        return self._loader("train", self.batch_tokens, shuffle=shuffle)

    def val_dataloader(self) -> BatchLoader:
        """Batches of the validation lines, longest first."""
        return self._loader("validation", self.evaluation_batch_tokens, shuffle=False)

    def test_dataloader(self) -> BatchLoader:
        """Batches of the test lines, longest first."""
        return self._loader("test", self.evaluation_batch_tokens, shuffle=False)

    def predict_dataloader(self) -> BatchLoader:
        """The test lines."""
        return self.test_dataloader()

    def baseline_translations(self) -> dict[str, list[str]]:
        """Name -> translations of the test lines that need no model; nothing unless `baselines` is set."""
        if not self.baselines:
            return {}
        text, lines = self._preparation().text(), self._brought("test").source
        count = min(len(text.source), TRAINING_PAIRS)
        train = Pairs(text.source.between(0, count), text.target.between(0, count))
        return {
            "word_by_word": word_by_word(train, lines),
            "nearest_neighbour": nearest_neighbour(train, lines),
        }

    def _loader(self, split: Split, tokens: int, *, shuffle: bool) -> BatchLoader:
        if split not in self._splits:
            raise UserError(f"data gives no {split} text: say where it is, or leave this command")
        pairs = self._splits[split]
        sampler = TokenBatches(
            pairs.source_lengths,
            pairs.target_lengths,
            tokens=tokens,
            shuffle=shuffle,
            evaluation=split != "train",
            seed=self._seed,
            text=self.account[split]["sha256"][:12],
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
        )
        return BatchLoader(pairs, sampler, workers=self.workers)

    @property
    def _seed(self) -> int:
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed


def hash_of_rows(rows: Iterable[Row]) -> str:
    """SHA-256 of raw lines."""
    together = hashlib.sha256()
    for row in rows:
        together.update(json.dumps([*row]).encode())
    return together.hexdigest()
