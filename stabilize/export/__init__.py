"""Trained models for other toolkits: one file a target, each with `write` and `log_probabilities`.

`write(task, folder)` writes the model and its tokenizer, and says in words where it is not exact.
`log_probabilities(folder, sources, targets)` computes with what was written, in the target's own code.
"""

from __future__ import annotations

import importlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from stabilize.errors import UserError
from stabilize.task import TranslationTask
from stabilize.tokens import BEGIN, END, PAD

TARGETS = ("huggingface", "ctranslate2", "safetensors")

CLOSE = 1e-3
"""The most that log p of a token may differ, in nats."""

SENTENCES, LONGEST = 8, 24
"""Random sentence pairs on which it is compared, and the most tokens of one."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        difference: largest difference between log p of a token by the model and by what was written.
        remarks: where the two are not the same function.
    """

    difference: float
    remarks: list[str]


def export(task: TranslationTask, target: str, folder: Path) -> Exported:
    """Write a model and its tokenizer for `target` into a new folder; it is there whole, and computes the same, or not
    at all.

    Args:
        task: its model built; it ends in evaluation and float32.
        target: one of `TARGETS`.
        folder: where to; must not be there yet.

    Raises:
        UserError: the target cannot express the model, the target's package is missing, or the folder cannot be made.
    """
    if folder.exists():
        raise UserError(f"--output {folder} is there already; give the name of a new folder")
    module = importlib.import_module(f"stabilize.export.{target}")
    task.eval().float()
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        remarks = module.write(task, partial)
        exported = Exported(_difference(task, module, partial), remarks)
        if not exported.difference <= CLOSE:
            why = f"; {'; '.join(remarks)}" if remarks else ""
            raise UserError(
                f"the model cannot be exported to {target}: log p of a token there differs by up to "
                f"{exported.difference:.2g}, more than {CLOSE:g}{why}; --to safetensors takes every model"
            )
        partial.rename(folder)
    except ImportError as error:
        raise UserError(
            f"--to {target} needs {error.name}, which is not installed; pip install 'stabilize-nmt[export]'"
        ) from error
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return exported


def _difference(task: TranslationTask, module: object, folder: Path) -> float:
    """The largest between log p of a token by the task's model and by what was written."""
    random = torch.Generator().manual_seed(1)
    longest = min(LONGEST, task.model.longest or LONGEST) - 1
    sources, targets = (
        [
            torch.randint(END + 1, task.tokenizer.vocabulary, (int(length),), generator=random).tolist()
            for length in torch.randint(1, longest + 1, (SENTENCES,), generator=random)
        ]
        for _ in range(2)
    )
    ours = log_probabilities(task, sources, targets)
    theirs = module.log_probabilities(folder, sources, targets)  # type: ignore[attr-defined]
    pairs = [pair for row in zip(ours, theirs, strict=True) for pair in zip(*row, strict=True)]
    return max(abs(a - b) if a == a and b == b else float("inf") for a, b in pairs)


@torch.no_grad()
def log_probabilities(task: TranslationTask, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
    """Log p of each token of each target, the end mark last; all without begin and end mark."""
    source = pad_sequence([torch.tensor([*ids, END]) for ids in sources], True, PAD)
    target = pad_sequence([torch.tensor([BEGIN, *ids, END]) for ids in targets], True, PAD)
    log_p = task.model.project(task.model(source, target[:, :-1])).log_softmax(-1)
    chosen = log_p.gather(-1, target[:, 1:, None]).squeeze(-1)
    return [row[: len(ids) + 1].tolist() for row, ids in zip(chosen, targets, strict=True)]
