"""A small translation task, its data, and a trainer that keeps quiet."""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from stabilize.data import Tokenizer, TranslationData
from stabilize.data.batch import Batch
from stabilize.data.module import Split
from stabilize.data.pairs import Pairs
from stabilize.strategies import NoWarmup, Stabilizer
from stabilize.task import TranslationTask
from stabilize.tokens import BEGIN, END

ENGLISH = (
    "the cat sees a dog",
    "a dog sleeps",
    "the old woman reads a long book in the garden",
    "we eat bread",
    "the dog sees the old cat in the house",
    "a child sleeps in the garden",
)
GERMAN = (
    "die Katze sieht einen Hund",
    "ein Hund schläft",
    "die alte Frau liest im Garten ein langes Buch",
    "wir essen Brot",
    "der Hund sieht die alte Katze im Haus",
    "ein Kind schläft im Garten",
)
SGD = functools.partial(torch.optim.SGD, lr=0.5)
"""No momentum: what a weight moves by is the gradient."""


@functools.cache
def tokenizer() -> Tokenizer:
    """Learnt from the sentences above."""
    return Tokenizer.train([*ENGLISH, *GERMAN], vocabulary=60)


class Sentences(TranslationData):
    """The sentences above in every split, or other lines where given."""

    def __init__(self, other: dict[Split, Pairs] | None = None, **options: Any) -> None:
        super().__init__(**{"vocabulary": 60, "batch_tokens": 40} | options)
        self.given_tokenizer = tokenizer()
        self.other = other or {}

    def read(self, split: Split) -> Pairs:
        return self.other.get(split, Pairs(list(ENGLISH), list(GERMAN)))


def sentence_batch(*numbers: int) -> Batch:
    """The sentences with these numbers as a training batch."""
    encode = tokenizer().encode
    source = [torch.tensor([*encode(ENGLISH[k]), END]) for k in numbers]
    target = [torch.tensor([BEGIN, *encode(GERMAN[k]), END]) for k in numbers]
    return Batch(pad_sequence(source, True), pad_sequence(target, True), torch.tensor(numbers))


def small_task(
    stabilizer: Stabilizer | None = None, kind: type[TranslationTask] = TranslationTask, **options: Any
) -> Any:
    """A task of 1 + 1 layers without dropout, its model built, the same weights each time."""
    shape = {"encoder_layers": 1, "decoder_layers": 1, "width": 16, "heads": 2, "hidden": 32, "dropout": 0.0}
    task = kind(stabilizer or Stabilizer(warmup=NoWarmup()), **{"optimizer": SGD} | shape | options)
    task.tokenizer = tokenizer()
    torch.manual_seed(5)
    task.configure_model()
    return task


def fit(trainer: pl.Trainer, task: TranslationTask, batches: Sequence[Any], **options: Any) -> None:
    """Train on batches as they are, in this order."""
    training, validation = (DataLoader(part, batch_size=None, collate_fn=_unchanged) for part in (batches, []))
    trainer.fit(task, training, validation, **options)


def _unchanged(batch: Any) -> Any:
    return batch


def small_trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A CPU trainer that writes every update to `folder/metrics.csv`, and neither checks nor saves anything."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": folder,
        "logger": CSVLogger(folder, name="", version=""),
        "log_every_n_steps": 1,
        "callbacks": list(callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(**settings | options)


def weights(task: TranslationTask) -> dict[str, Tensor]:
    """A copy of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in task.named_parameters()}


def rows(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv, without what they leave empty."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def curve(folder: Path, key: str) -> dict[int, float]:
    """The values of one metric by step."""
    return {int(row["step"]): row[key] for row in rows(folder) if key in row}
