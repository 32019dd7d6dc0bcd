"""From raw lines to batches, as a LightningDataModule."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only

from stabilize.data.baselines import nearest_neighbour, word_by_word
from stabilize.data.loader import BatchLoader
from stabilize.data.pairs import Pairs, TokenizedPairs
from stabilize.data.sampler import TokenBatches
from stabilize.data.sentences import Sentences
from stabilize.data.tokenizer import Tokenizer
from stabilize.errors import UserError, at_least

Split = Literal["train", "validation", "test"]


class TranslationData(LightningDataModule, ABC):
    """Parallel text, tokenised and batched. Subclasses say where the lines come from: `read(split)`.

    Training pairs with a blank side or with more than `maximum_length` tokens are dropped and counted; evaluation
    keeps every line. The tokenizer is learnt from the training text, unless `given_tokenizer` was set before `setup`
    (a checkpoint brings its own), and is written into the run's folder.

    After `setup`: `tokenizer`, `report`, the counts by name, and for each evaluation text `totals` and `references`.

    Args:
        vocabulary: number of subword pieces, one vocabulary for both languages.
        byte_fallback: write rare characters as bytes instead of giving each its own piece.
        batch_tokens: budget of a training batch: rows x longest sentence of either side, padding and end included.
        evaluation_batch_tokens: the same in evaluation.
        maximum_length: longest training sentence in tokens, end included; longer pairs are dropped.
        validation_pairs: use only the first n validation lines; none uses all.
        seed: of the order of the training data; none: the seed of `seed_everything`.
        workers: processes that prepare batches; 0 prepares them in the training process.
        baselines: whether `baseline_translations` are wanted beside the model's.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 8000,
        byte_fallback: bool = False,
        batch_tokens: int = 4096,
        evaluation_batch_tokens: int = 8192,
        maximum_length: int = 256,
        validation_pairs: int | None = None,
        seed: int | None = None,
        workers: int = 0,
        baselines: bool = False,
    ) -> None:
        super().__init__()
        at_least(
            "data",
            vocabulary=(vocabulary, 1),
            batch_tokens=(batch_tokens, 1),
            evaluation_batch_tokens=(evaluation_batch_tokens, 1),
            maximum_length=(maximum_length, 1),
            validation_pairs=(1 if validation_pairs is None else validation_pairs, 1),
            seed=(0 if seed is None else seed, 0),
            workers=(workers, 0),
        )
        self.vocabulary = vocabulary
        self.byte_fallback = byte_fallback
        self.batch_tokens = batch_tokens
        self.evaluation_batch_tokens = evaluation_batch_tokens
        self.maximum_length = maximum_length
        self.validation_pairs = validation_pairs
        self.seed = seed
        self.workers = workers
        self.baselines = baselines
        self.given_tokenizer: Tokenizer | None = None
        self.tokenizer: Tokenizer
        self.report: dict[str, int] = {}
        self.totals: dict[Split, int] = {}
        """Lines of each evaluation text, those that are left out by `validation_pairs` too."""
        self.references: dict[Split, int] = {}
        """References that each evaluation text has for a line."""
        self._splits: dict[Split, TokenizedPairs] = {}

    @abstractmethod
    def read(self, split: Split) -> Pairs:
        """The raw lines of a split; no pairs where the user gave no such split.

        Raises:
            UserError: the lines cannot be had.
        """

    def origin(self, split: Split) -> str:
        """Where the lines of a split come from, in words for who wants to find them again."""
        return type(self).__name__

    def setup(self, stage: str | None) -> None:
        """Read, tokenise and count the splits of a stage (none: all) that are not there yet.

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
        texts = {split: self.read(split) for split in new}
        if not hasattr(self, "tokenizer"):
            self.tokenizer = self.given_tokenizer or self._learn(texts.get("train") or self.read("train"))
            self.report["vocabulary"] = self.tokenizer.vocabulary
        for split in new:
            if split == "train":
                self._splits[split] = self._training(texts[split])
            elif texts[split]:
                self._splits[split] = self._evaluation(split, texts[split])
        if new:
            rank_zero_only(print)(self._summary())
        if stage == "fit" and self.trainer is not None and self.trainer.is_global_zero:
            folder = Path(self.trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.tokenizer.save(folder / "tokenizer.model")

    def has(self, split: Split) -> bool:
        """Whether there is text of a split, known after `setup`."""
        return split in self._splits

    def written(self, lines: Sequence[int]) -> list[tuple[str, str]]:
        """Source and target of some lines of the training text, as a model reads them."""
        sides = self._splits["train"].tokens(np.array(lines))
        source, target = ([self.tokenizer.decode(ids.tolist()) for ids in side] for side in sides)
        return list(zip(source, target, strict=True))

    @property
    def longest_line(self) -> int:
        """Tokens of the longest line that a model will read or be scored on, known after `setup`."""
        lengths = [
            side.max() for pairs in self._splits.values() for side in (pairs.source_lengths, pairs.target_lengths)
        ]
        return int(max(lengths, default=0))

    @property
    def word_entropy(self) -> float | None:
        """What knowing the frequency of each target token of the training text costs a token, in nats; for a model
        that learns nothing more this is the loss. None before `setup("fit")`."""
        return self._splits["train"].target_entropy if "train" in self._splits else None

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
        train, lines = self.read("train"), self.read("test").source
        return {
            "word_by_word": word_by_word(train, lines),
            "nearest_neighbour": nearest_neighbour(train, lines),
        }

    def _learn(self, pairs: Pairs) -> Tokenizer:
        lines = [line for pair in zip(pairs.source, pairs.target, strict=True) for line in pair]
        if not any(line.strip() for line in lines):
            raise UserError(f"the training text has {len(pairs)} pairs, but nothing is written in any of them")
        return Tokenizer.train(lines, vocabulary=self.vocabulary, byte_fallback=self.byte_fallback)

    def _training(self, text: Pairs) -> TokenizedPairs:
        source, target = Sentences(text.source, self.tokenizer), Sentences(text.target, self.tokenizer)
        written = np.array([bool(a.strip() and b.strip()) for a, b in zip(text.source, text.target, strict=True)], bool)
        fitting = np.maximum(source.lengths, target.lengths) <= self.maximum_length
        kept = np.flatnonzero(written & fitting)
        self.report |= {
            "train": len(kept),
            "dropped_blank": int((~written).sum()),
            "dropped_long": int((written & ~fitting).sum()),
        }
        if not len(kept):
            raise UserError(
                f"no training pair is left of {len(text)}: {self.report['dropped_blank']} have a blank side,"
                f" {self.report['dropped_long']} more than maximum_length: {self.maximum_length} tokens"
            )
        return TokenizedPairs(source, target, kept, text=None)

    def _evaluation(self, split: Split, text: Pairs) -> TokenizedPairs:
        self.totals[split], self.references[split] = len(text), 1 + len(text.more)
        text = text.first(self.validation_pairs) if split == "validation" else text
        source, target = Sentences(text.source, self.tokenizer), Sentences(text.target, self.tokenizer)
        self.report[split] = len(text)
        return TokenizedPairs(source, target, np.arange(len(text)), text)

    def _summary(self) -> str:
        counts = dict(self.report)
        blank, long = counts.pop("dropped_blank", 0), counts.pop("dropped_long", 0)
        parts = [f"{name} {counts[name]:,}" for name in ("train", "validation", "test") if name in counts]
        if blank or long:
            parts[0] += f" (dropped: {blank:,} with a blank side, {long:,} over {self.maximum_length} tokens)"
        return f"pairs: {', '.join(parts)}; vocabulary {counts['vocabulary']:,} ({self.tokenizer.hash})"

    def _loader(self, split: Split, tokens: int, *, shuffle: bool) -> BatchLoader:
        if split not in self._splits:
            raise UserError(f"data.init_args gives no {split} text: say where it is, or leave this command")
        pairs = self._splits[split]
        sampler = TokenBatches(
            pairs.source_lengths,
            pairs.target_lengths,
            tokens=tokens,
            shuffle=shuffle,
            evaluation=split != "train",
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed,
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
        )
        return BatchLoader(pairs, sampler, workers=self.workers)
