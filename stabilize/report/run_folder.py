"""Reads a run folder as it is found: whole, crashed, without diagnostics, or torn by a kill."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from stabilize.card import Card, arguments, from_config
from stabilize.errors import UserError
from stabilize.findings import Diary, findings
from stabilize.strategies import AXES

SAMPLES = 5
"""Translations that are shown."""

SAMPLE = ("source", "reference", "translation")

Point = tuple[int, float]


@dataclass(frozen=True)
class Sample:
    """A translation; source and reference are empty where the run folder does not know them."""

    source: str
    reference: str
    translation: str


@dataclass(frozen=True)
class Run:
    """What a run folder says."""

    name: str
    config: dict[str, Any]
    config_text: str
    records: list[tuple[int, dict[str, float]]]
    """(update, numbers by key), in the order of writing."""
    summary: dict[str, Any]
    tested: dict[str, Any]
    """What stands beside the test translations: scores, signatures, provenance."""
    samples: list[Sample]
    samples_of: str
    """What text the samples are of."""
    figures: dict[str, bytes]
    """Pictures by name, PNG."""
    card: Card | None
    missing: list[str]
    """What is not there, and why that may be, a sentence each."""

    @cached_property
    def curves(self) -> dict[str, list[Point]]:
        """(update, value) by key."""
        found: dict[str, list[Point]] = {}
        for update, metrics in self.records:
            for key, value in metrics.items():
                found.setdefault(key, []).append((update, value))
        return found

    @cached_property
    def diary(self) -> Diary:
        """What the numbers say."""
        entropy = self.summary.get("train/word_entropy")
        return findings(self.records, entropy if isinstance(entropy, float) else None)

    @property
    def updates(self) -> int:
        """Updates made, as far as the numbers go."""
        return self.diary.update

    @property
    def signature(self) -> str:
        """How sacreBLEU scored, where that is known."""
        known = _mapping(self.tested.get("signatures")).get("bleu") or self.summary.get("best/bleu_signature")
        return str(known or "")

    @property
    def tested_part(self) -> str:
        """`, 160 of 1,000 lines` where only a part of the test text was translated."""
        lines, total = self.tested.get("lines"), self.tested.get("of")
        partly = isinstance(lines, int) and isinstance(total, int) and lines < total
        return f", {lines:,} of {total:,} lines" if partly else ""

    @property
    def cut_short(self) -> int | None:
        """Updates that a training was to make, where it ended before its last record of them was due."""
        planned = _mapping(self.config.get("trainer")).get("max_steps")
        logged = [0, *(update for update, _ in self.curves.get("train/loss", ()))]
        due = self.updates + logged[-1] - logged[-2] if len(logged) > 1 else math.inf
        return planned if isinstance(planned, int) and due <= planned else None

    def last(self, key: str) -> float | None:
        """The last value of a metric."""
        return self.curves[key][-1][1] if key in self.curves else None

    @cached_property
    def settings(self) -> dict[str, str]:
        """What runs differ in, most telling first: strategies, their arguments, sizes, learning rate, seed."""
        model = _mapping(self.config.get("model"))
        found: dict[str, str] = {}
        for prefix, group in (("", "stabilizer"), ("decoder ", "decoder_stabilizer")):
            chosen = _mapping(model.get(group))
            for axis in AXES:
                if axis in chosen:
                    found[prefix + axis] = str(_mapping(chosen[axis]).get("class_path", "")).rpartition(".")[2]
            for axis in AXES:
                if axis in chosen and (options := arguments(_mapping(chosen[axis]))):
                    found[f"{prefix}{axis} with"] = options
        found |= {
            name.replace("_", " "): str(model[name])
            for name in ("encoder_layers", "decoder_layers", "width")
            if name in model
        }
        optimizer = _mapping(model.get("optimizer"))
        found["lr"] = str(_mapping(optimizer.get("init_args")).get("lr", ""))
        found["precision"] = str(_mapping(self.config.get("trainer")).get("precision") or "32-true")
        found["seed"] = str(self.config.get("seed_everything", ""))
        return found


def read(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        UserError: it is none.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; a run folder, runs/<run id>, would do")
    if not (folder / "config.yaml").exists() and not (folder / "metrics.csv").exists():
        inside = sorted(str(path.parent) for path in folder.glob("*/config.yaml"))
        hint = f"it holds runs: {' '.join(inside[:3])}" if inside else "a run folder, runs/<run id>, would do"
        raise UserError(f"{folder} has neither config.yaml nor metrics.csv; {hint}")
    missing: list[str] = []
    config_text = _text(folder / "config.yaml")
    config = _config(config_text, missing)
    records = _records(folder / "metrics.csv", missing)
    summary = _json(folder / "summary.json")
    tested = _json(folder / "translations" / "test.json")
    samples, samples_of = _samples(folder, tested)
    if not samples:
        missing.append("No translations: neither tested nor validated with Weights & Biases on.")
    figures = {path.stem: path.read_bytes() for path in sorted((folder / "figures").glob("*.png"))}
    run = Run(
        name=folder.resolve().name,
        config=config,
        config_text=config_text,
        records=records,
        summary=summary,
        tested=tested,
        samples=samples,
        samples_of=samples_of,
        figures=figures,
        card=_card(config, missing),
        missing=missing,
    )
    if run.cut_short is not None:
        missing.append(f"The numbers end at update {run.updates:,}: still running, stopped, or crashed.")
    return run


def _config(text: str, missing: list[str]) -> dict[str, Any]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        config = None
    if not isinstance(config, dict):
        missing.append("No config.yaml that can be read: strategies and sizes are unknown.")
        return {}
    return config


def _card(config: dict[str, Any], missing: list[str]) -> Card | None:
    if not config:
        return None
    try:
        return from_config(config)
    except Exception as error:  # a plug-in may be missing or raise anything; the numbers are there all the same
        said = f"{type(error).__name__}: {error}"
        missing.append(
            f"The card cannot be made again here ({said}): a plug-in that is not installed, or another version."
        )
        return None


def _records(path: Path, missing: list[str]) -> list[tuple[int, dict[str, float]]]:
    records = []
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            for row in csv.DictReader(line.replace("\0", "") for line in file):
                numbers = {key: value for key, cell in row.items() if (value := _number(cell)) is not None}
                step = numbers.pop("step", math.nan)
                numbers.pop("epoch", None)
                if numbers and math.isfinite(step):
                    records.append((int(step), numbers))
    except OSError:
        missing.append("No metrics.csv: nothing was logged, or another logger was set.")
        return []
    # Loggers know an update by the number of those before it, and an evaluation of a checkpoint by the number of all.
    fits = any(not key.startswith(("val/", "test/")) for _, numbers in records for key in numbers)
    records = [
        (step + (fits and not all(key.startswith("test/") for key in numbers)), numbers) for step, numbers in records
    ]
    if not records:
        missing.append("metrics.csv holds no numbers: the run ended before its first log.")
    elif not any(key.startswith("gradient_ratio/") for _, numbers in records for key in numbers):
        missing.append("No gradient ratios: gradient_ratio.every was 0, or the run ended before its first record.")
    return records


def _samples(folder: Path, tested: dict[str, Any]) -> tuple[list[Sample], str]:
    """Translations of the test, else of the last validation, else of the test without source; and which they are."""
    known = tested.get("samples")
    if isinstance(known, list) and known:
        found = [_mapping(line) for line in known[:SAMPLES]]
        return [Sample(*(str(line.get(name, "")) for name in SAMPLE)) for line in found], "test"
    tables = [*(folder / "wandb").glob("*run-*/files/media/table/samples_*.table.json")]
    for table in sorted(tables, key=lambda path: path.stat().st_mtime, reverse=True):
        rows = _json(table).get("data")
        if isinstance(rows, list) and rows:
            return [Sample(*map(str, row[:3])) for row in rows[:SAMPLES] if len(row) >= 3], "last validation"
    lines = [line for line in _text(folder / "translations" / "test.txt").split("\n") if line]
    return [Sample("", "", line) for line in lines[:SAMPLES]], "test; the folder has no source text"


def _number(cell: Any) -> float | None:
    try:
        return float(cell)
    except (TypeError, ValueError):  # empty, or the end of a line that a kill has torn
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
