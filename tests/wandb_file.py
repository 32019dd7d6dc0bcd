"""What an offline run left for Weights & Biases, read back.

A `.wandb` file is a log in LevelDB's format: a header of 7 bytes, then blocks of 32 KiB. A block holds pieces, each
with a header of 7 bytes: checksum (4), length (2), and kind (1), whether it is a whole record or its first, middle or
last piece. No piece crosses a block's end, where less than a header of room stays empty.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEADER = 32 * 1024, struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def records(run_folder: Path) -> Iterator[Record]:
    """Every record of the one run below `run_folder`/wandb, in the order of writing."""
    (path,) = (run_folder / "wandb").glob("offline-run-*/run-*.wandb")
    log = path.read_bytes()
    assert log.startswith(b":W&B")
    place, record = HEADER.size, b""
    while place < len(log):
        room = BLOCK - place % BLOCK
        if room < HEADER.size:
            place += room
            continue
        _, length, kind = HEADER.unpack_from(log, place)
        place += HEADER.size + length
        record += log[place - length : place]
        if kind in (WHOLE, LAST):
            yield Record.FromString(record)
            record = b""


def history(run_folder: Path) -> list[dict[str, Any]]:
    """What each call of `log` brought, by key."""
    logged = (record.history for record in records(run_folder) if record.WhichOneof("record_type") == "history")
    return [_values(row.item) for row in logged]


def config(run_folder: Path) -> dict[str, Any]:
    """The run's config as it was in the end."""
    found: dict[str, Any] = {}
    for record in records(run_folder):
        kind = record.WhichOneof("record_type")
        if kind in ("run", "config"):
            found |= _values((record.run.config if kind == "run" else record.config).update)
    return found


def summary(run_folder: Path) -> dict[str, Any]:
    """The run's summary as it was in the end, without what history puts there."""
    found: dict[str, Any] = {}
    for record in records(run_folder):
        if record.WhichOneof("record_type") == "summary":
            found |= _values(record.summary.update)
    return found


def axes(run_folder: Path) -> dict[str, str]:
    """What `define_metric` said: metric, or pattern of metrics -> the metric on its axis."""
    defined = (record.metric for record in records(run_folder) if record.WhichOneof("record_type") == "metric")
    return {metric.name or metric.glob_name: metric.step_metric for metric in defined}


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
