"""What stood out in a run: a line each in `events.jsonl` of its folder, and a table in Weights & Biases."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger

EVENTS = "events.jsonl"
COLUMNS = ("update", "kind", "action", "loss", "gradient_norm", "sentence", "batches", "sentences", "profile")
"""Of the table; the last three are JSON, the batches and sentences of each rank."""
ROWS = 100
"""That the table has at most: it is sent again with each event, and is in checkpoints."""


def publish(trainer: pl.Trainer, event: dict[str, Any], rows: list[list[str]]) -> None:
    """Write an event into the run folder, where it is when this returns, and the table.

    Numbers that JSON does not have are the texts "nan", "inf" and "-inf", which Python's `float` reads.

    Args:
        trainer: of the run.
        event: its fields are README's.
        rows: of the table, the last one this event's.
    """
    path = Path(trainer.default_root_dir) / EVENTS
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{_json(event)}\n")
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table("events", columns=list(COLUMNS), data=rows, step=event["update"] - 1)


def row(event: dict[str, Any]) -> list[str]:
    """What the table has of an event."""
    of_ranks = {name: [rank[name] for rank in event["ranks"]] for name in ("batches", "sentences")}
    values = [(event | of_ranks)[column] for column in COLUMNS]
    return [_json(value) if isinstance(value, list) else str(value) for value in values]


def _json(value: Any) -> str:
    return json.dumps(_with_texts(value), ensure_ascii=False, allow_nan=False)


def _with_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_texts(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
