"""What stood out in a run: a line each in `events.jsonl` of its folder, and a table in Weights & Biases."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger

EVENTS = "events.jsonl"
COLUMNS = ("update", "kind", "action", "loss", "gradient_norm", "sentence")
"""Of the table."""


def publish(trainer: pl.Trainer, event: dict[str, Any], before: list[dict[str, Any]]) -> None:
    """Write an event into the run folder, where it is when this returns, and all of them into the table.

    Numbers that JSON does not have are the texts "nan", "inf" and "-inf", which Python's `float` reads.

    Args:
        trainer: of the run.
        event: its fields are README's, in which those of `COLUMNS` are.
        before: the events of this process before it.
    """
    path = Path(trainer.default_root_dir) / EVENTS
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(_with_texts(event), ensure_ascii=False, allow_nan=False)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    rows = [[str(one[column]) for column in COLUMNS] for one in (*before, event)]
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table("events", columns=list(COLUMNS), data=rows, step=event["update"] - 1)


def _with_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_texts(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
