"""The table at the end of a run: what came out, and where to look."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as lightning
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

from stabilize.callbacks.monitor import Monitor
from stabilize.commands.narrator import Narrator
from stabilize.evaluation import Evaluated
from stabilize.findings import Diary

SHOWN = ("train/", "val/", "test/")


def results(trainer: lightning.Trainer, metrics: Mapping[str, Tensor]) -> RenderableType:
    """Scores and diagnostics of a run, in numbers and in words, and the files it left."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column()
    evaluated: dict[str, Evaluated] = getattr(trainer.lightning_module, "evaluated", {})
    for key, metric in sorted(metrics.items()):
        name, _, score = key.partition("/")
        if name in evaluated and score in evaluated[name].scores:  # every digit is that of sacrebleu -w 2
            table.add_row(key, f"{evaluated[name].scores[score]:.2f}", evaluated[name].part)
        elif key.startswith(SHOWN):
            table.add_row(key, f"{float(metric):,.4g}")
    for callback in trainer.callbacks:
        if isinstance(callback, Monitor):
            for key, value in sorted(callback.summary().items()):
                table.add_row(key, f"{value:.3g}")
    parts: list[RenderableType] = [table]
    parts += [
        Text(f"{name}: {found.faults}, of {len(found.lines):,} translations", style="yellow")
        for name, found in evaluated.items()
        if found.faults
    ]
    signatures = [line for found in evaluated.values() for line in found.signatures.items()]
    parts += [Text(f"{name} {signature}", style="dim") for name, signature in dict.fromkeys(signatures)]
    for logger in trainer.loggers:
        if isinstance(logger, Narrator) and (logger.diary.measured or logger.diary.findings):
            parts += [Text(""), *words(logger.diary)]
    folder = Path(trainer.default_root_dir)
    what = {
        "config.yaml": "the resolved config",
        "data.json": "what was found in the text, what became of it, hashes",
        "metrics.csv": "every metric by update",
        "summary.json": "the verdict, the worst ratio, the best score",
        "figures": "heat maps by layer and update, similarity matrices",
        "translations": "test translations, line for line, and their provenance",
        "checkpoints": "weights",
        "wandb": "Weights & Biases; offline: wandb sync, or wandb beta leet in the terminal",
    }
    files = Table(show_header=False, box=None, padding=(0, 2))
    for name, about in what.items():
        if (folder / name).exists():
            files.add_row(name, about)
    panel = Panel(Group(*parts, Text(""), files), title="results", title_align="left")
    return Group(panel, Text(f"run folder: {folder}"))


def words(diary: Diary) -> list[RenderableType]:
    """The verdict, and each finding with what the literature offers."""
    colour = "green" if diary.verdict == "healthy" else "bold red"
    told: list[RenderableType] = [Text.assemble("verdict: ", (diary.verdict, colour))]
    for finding in diary.all:
        style = "red" if finding.grave and not finding.passed else "dim" if finding.passed else "yellow"
        told.append(Text.assemble((f"{finding.when}: {finding.sentence}", style), (f"; {finding.remedy}", "dim")))
    return told
