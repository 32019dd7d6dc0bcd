"""What a pass over evaluation text gathers: translations by line, and their scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch.distributed
from torch import nn

from stabilize.data.batch import Batch
from stabilize.errors import UserError
from stabilize.metrics import CorpusScore

MADE_WITH = ("stabilize-nmt", "torch", "lightning", "sentencepiece", "sacrebleu")
"""Packages whose version may change a translation or a score."""

SAMPLES = 10
"""Lines that are written with source and reference beside the scores."""


class Translation(NamedTuple):
    """One line of an evaluation text."""

    source: str
    references: tuple[str, ...]
    translation: str
    truncated: bool
    """The search was cut at the length limit."""

    def sample(self) -> dict[str, Any]:
        """The line as a reader is shown it, with its first reference."""
        return {
            "source": self.source,
            "reference": self.references[0],
            "translation": self.translation,
            "truncated": self.truncated,
        }


class Evaluated(NamedTuple):
    """What a pass has found, over all ranks."""

    scores: dict[str, float]
    signatures: dict[str, str]
    """sacreBLEU's line on how each score was computed."""
    lines: dict[int, Translation]
    """By number, in order."""
    total: int | None
    """Lines that the text has; none: that is not known."""

    @property
    def part(self) -> str:
        """`160 of 1,000 lines` where the pass was of a part of the text; else nothing."""
        whole = self.total is None or self.total == len(self.lines)
        return "" if whole else f"{len(self.lines):,} of {self.total:,} lines"

    @property
    def empty(self) -> int:
        """Translations that are blank lines."""
        return sum(not line.translation for line in self.lines.values())

    @property
    def truncated(self) -> int:
        """Translations that were cut at the length limit."""
        return sum(line.truncated for line in self.lines.values())

    @property
    def faults(self) -> str:
        """`3 empty, 1 truncated at the length limit` where there are any."""
        empty = [f"{self.empty:,} empty"] if self.empty else []
        truncated = [f"{self.truncated:,} truncated at the length limit"] if self.truncated else []
        return ", ".join(empty + truncated)

    @property
    def remarks(self) -> str:
        """What is to be known beside the scores, on one line."""
        return ", ".join(filter(None, (self.part, self.faults)))

    def write(self, folder: Path, name: str, **origin: Any) -> None:
        """Write `{name}.txt`, line k the translation of line k, and `{name}.json`: scores, provenance, samples.

        Where there are scores, the first references are in `{name}.reference.txt`. Lines that were not translated,
        because the pass was limited, are blank up to the last that was.
        """
        folder.mkdir(parents=True, exist_ok=True)
        lines = self.lines
        texts = {f"{name}.txt": {k: line.translation for k, line in lines.items()}}
        if self.scores:
            texts[f"{name}.reference.txt"] = {k: line.references[0] for k, line in lines.items()}
        for file, said in texts.items():
            text = "".join(f"{said.get(k, '')}\n" for k in range(max(lines, default=-1) + 1))
            (folder / file).write_text(text, encoding="utf-8", newline="\n")
        facts = {
            "scores": self.scores,
            "signatures": self.signatures,
            "versions": {name: version(name) for name in MADE_WITH},
            "lines": len(lines),
            "of": self.total,
            "empty": self.empty,
            "truncated": self.truncated,
            **origin,
            "samples": [line.sample() for line in list(lines.values())[:SAMPLES]],
        }
        (folder / f"{name}.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class Evaluation(nn.Module):
    """Translations and sufficient statistics of one pass; both add up over batches and ranks.

    Args:
        scores: see `metrics.corpus_scores`.
    """

    def __init__(self, scores: dict[str, CorpusScore]) -> None:
        super().__init__()
        self.scores = cast("dict[str, CorpusScore]", nn.ModuleDict(scores))  # modules, to go where the model goes
        self.lines: dict[int, Translation] = {}

    def add(self, batch: Batch, translations: Sequence[str], truncated: Sequence[bool]) -> None:
        """Take in the translations of a batch."""
        for score in self.scores.values():
            score.update(translations, batch.references)
        rows = zip(batch.source_text, batch.references, translations, truncated, strict=True)
        self.lines.update(zip(batch.index.tolist(), map(Translation._make, rows), strict=True))

    def finish(self, total: int | None = None) -> Evaluated:
        """What was found, over all ranks; then empty for the next pass.

        Args:
            total: how many lines the text has, where that is known.

        Raises:
            UserError: two ranks have the same line.
        """
        scores = {name: float(score.compute()) for name, score in self.scores.items()}
        signatures = self.signatures()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            shares: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(shares, self.lines)
            self.lines = _together(shares)
        lines = dict(sorted(self.lines.items()))
        for score in self.scores.values():
            score.reset()
        self.lines = {}
        return Evaluated(scores, signatures, lines, total)

    def signatures(self, references: int | None = None) -> dict[str, str]:
        """sacreBLEU's line on how each score is computed, see `CorpusScore.signature`."""
        return {name: score.signature(references) for name, score in self.scores.items()}


def _together(shares: Sequence[dict[int, Translation]]) -> dict[int, Translation]:
    """The lines of all ranks, each of which has counted its own."""
    lines: dict[int, Translation] = {}
    for share in shares:
        for twice in lines.keys() & share.keys():
            raise UserError(
                f"line {twice + 1:,} of the evaluation text came to two processes and would count twice: all have to"
                " read the same files, and no sampler may repeat a line"
            )
        lines |= share
    return lines
