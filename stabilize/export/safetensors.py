"""Every model, as safetensors beside its description in JSON; only stabilize itself reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from stabilize import export
from stabilize.data.tokenizer import Tokenizer
from stabilize.errors import UserError
from stabilize.task import TranslationTask

WEIGHTS, DESCRIPTION, TOKENIZER = "model.safetensors", "config.json", "tokenizer.model"


def write(task: TranslationTask, folder: Path) -> list[str]:
    """Write weights, description and tokenizer."""
    from safetensors.torch import save_model

    save_model(task.model, str(folder / WEIGHTS))  # weights in two places are kept once
    described = {"task": task.spec(), "precision": task.precision}
    try:
        text = json.dumps(described, indent=2)
    except TypeError as error:
        raise UserError(f"the settings of a strategy cannot be written as JSON: {error}") from error
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
    task.tokenizer.save(folder / TOKENIZER)
    shutil.copymode(folder / DESCRIPTION, folder / WEIGHTS)  # safetensors lets nobody else read its file
    return []


def read(folder: str | Path) -> TranslationTask:
    """The task that was written, in evaluation, without its data."""
    from safetensors.torch import load_model

    described: dict[str, Any] = json.loads((Path(folder) / DESCRIPTION).read_text(encoding="utf-8"))
    tokenizer = Tokenizer.load(Path(folder) / TOKENIZER)
    task = TranslationTask.from_spec(described["task"], tokenizer, described["precision"])
    load_model(task.model, str(Path(folder) / WEIGHTS))
    return task.eval()


def log_probabilities(folder: Path, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
    """As `stabilize.export.log_probabilities`."""
    return export.log_probabilities(read(folder), sources, targets)
