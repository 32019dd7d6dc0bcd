"""Run folders made by hand: whole ones, and what is left of others."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from stabilize.strategies import Stabilizer
from stabilize.strategies.placement import PostNorm

SIZES = {
    "encoder_layers": 3,
    "decoder_layers": 3,
    "width": 16,
    "heads": 2,
    "hidden": 32,
    "activation": "relu",
    "positions": "sinusoidal",
    "maximum_length": 64,
    "tied": True,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}

POST_NORM = Stabilizer(placement=PostNorm())


def config(stabilizer: Stabilizer | None = None, seed: int = 1, **trainer: Any) -> dict[str, Any]:
    """A resolved config, without what no report reads."""
    return {
        "seed_everything": seed,
        "trainer": {"precision": None, "max_steps": 200, **trainer},
        "model": {
            "stabilizer": (stabilizer or Stabilizer()).spec(),
            "decoder_stabilizer": None,
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}},
            **SIZES,
        },
        "data": {"class_path": "stabilize.data.SyntheticCorpus", "init_args": {"vocabulary": 100, "batch_tokens": 512}},
    }


def record(update: int, loss: float = 5.0, ratio: float = 0.5, similarity: float = 0.9) -> dict[str, float]:
    """What a run of three layers a stack writes at an update."""
    row = {
        "step": update - 1,
        "epoch": 0,
        "train/loss": loss,
        "train/nll": loss,
        "lr": 1e-3,
        "gradient_norm/total": 1.0,
    }
    for stack in ("encoder", "decoder"):
        for layer, value in ((1, ratio), (2, math.sqrt(abs(ratio)))):
            row[f"gradient_ratio/{stack}/layer_{layer:03d}"] = value
            row[f"layer_similarity_centered/{stack}/layer_{layer:03d}"] = similarity
        row[f"gradient_norm/{stack}/layer_003"] = 1.0
        row[f"gradient_ratio/{stack}/first_to_last"] = ratio
        row[f"layer_similarity_centered/{stack}/mean"] = similarity
    return row


def learnt(ratio: float = 0.5) -> list[dict[str, float]]:
    """The records of a run that learns, and is checked once."""
    rows = [record(update, 8 - update / 50, ratio) for update in range(10, 201, 10)]
    return [*rows, {"step": 199, "val/nll": 3.9, "val/bleu": 12.5}]


def write_run(
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    rows: Iterable[Mapping[str, float]] = (),
    samples: Iterable[tuple[str, str, str]] = (),
) -> Path:
    """A run folder: config, numbers and translations as far as they are given."""
    folder.mkdir(parents=True)
    if settings is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    rows = list(rows)
    if rows:
        keys = sorted({key for row in rows for key in row})
        with (folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, keys)
            writer.writeheader()
            writer.writerows(rows)
    lines = [dict(zip(("source", "reference", "translation"), sample, strict=True)) for sample in samples]
    if lines:
        (folder / "translations").mkdir()
        facts = {"scores": {"bleu": 10.0}, "signatures": {"bleu": "nrefs:1|tok:13a"}, "samples": lines}
        (folder / "translations" / "test.json").write_text(json.dumps(facts))
    return folder
