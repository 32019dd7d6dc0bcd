"""Words, not only numbers: what happens in a run is said as soon as it happens."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from stabilize.findings import Diary

SUMMARY = "summary.json"
"""The file in the run folder with what the summary of the Weights & Biases run has too."""


class Narrator(Logger):
    """Hears every number that the other loggers write, and says what it means.

    A logger, because no callback sees all numbers. A finding is printed once, when it is new; the summary of the run
    (worst ratio, best score, verdict) goes to `summary.json` and to Weights & Biases whenever it changes, so that a run
    that is killed has one too.

    Args:
        folder: of the run.
        fits: whether the run trains: its loggers know an update by the number of those before it, and an evaluation of
            a checkpoint by the number of all.
    """

    def __init__(self, folder: Path, fits: bool = True) -> None:
        super().__init__()
        self._fits = fits
        self.diary = Diary()
        self._folder = folder
        self._others: list[WandbLogger] = []
        self._facts: dict[str, Any] = {}
        self._told: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def summary(self) -> dict[str, Any]:
        """The run in a few numbers and facts, by key."""
        return self.diary.summary() | self._facts

    def know(
        self, loggers: list[Logger], signature: str | None, entropy: float | None, taken: str | None = None
    ) -> None:
        """Take in what no number says: sacreBLEU's signature of the validation's BLEU, if that is computed, the entropy
        of single words, the checkpoint that the state was taken from, and who else is told."""
        self._others = [logger for logger in loggers if isinstance(logger, WandbLogger)]
        self.diary.entropy = entropy
        self._facts = {} if signature is None else {"best/bleu_signature": signature}
        if entropy is not None:
            self._facts["train/word_entropy"] = entropy
        if taken is not None:
            self._facts["checkpoint"] = taken

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        update = (step or 0) + self._fits
        for finding in self.diary.add(update, metrics):
            by_guard = finding.rule == "jumped" or (
                finding.rule == "diverged" and "stability/diverged" in self.diary.told
            )
            if not by_guard:  # else it has said so, and to which update
                print(f"update {update:,}: {finding}", flush=True)
        self._tell()

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: settings are no news."""

    def _tell(self) -> None:
        summary = self.summary
        if summary == self._told:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        written = self._folder / f"{SUMMARY}.new"
        written.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        written.replace(self._folder / SUMMARY)
        for logger in self._others:
            logger.experiment.summary.update(summary)
        self._told = summary
