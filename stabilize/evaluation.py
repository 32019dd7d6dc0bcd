"""What a pass over evaluation text gathers: translations by line, and their scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sacrebleu
import torch.distributed
from torch import nn

from stabilize.data.batch import Batch
from stabilize.metrics import CorpusBLEU, CorpusChrF

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


class Evaluation(nn.Module):
    """Translations and sufficient statistics of one pass; both add up over batches and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.bleu, self.chrf = CorpusBLEU(), CorpusChrF()
        self.lines: dict[int, Translation] = {}

    def add(self, batch: Batch, translations: Sequence[str], truncated: Sequence[bool]) -> None:
        """Take in the translations of a batch."""
        self.bleu.update(translations, batch.references)
        self.chrf.update(translations, batch.references)
        rows = zip(batch.source_text, batch.references, translations, truncated, strict=True)
        self.lines.update(zip(batch.index.tolist(), map(Translation._make, rows), strict=True))

    def finish(self) -> tuple[dict[str, float], dict[int, Translation]]:
        """Scores and all lines by number, in order, of all ranks; then empty for the next pass."""
        scores = {"bleu": float(self.bleu.compute()), "chrf": float(self.chrf.compute())}
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            shares: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(shares, self.lines)
            self.lines = {k: line for share in shares for k, line in share.items()}
        lines = dict(sorted(self.lines.items()))
        self.bleu.reset()
        self.chrf.reset()
        self.lines = {}
        return scores, lines

    @property
    def signatures(self) -> dict[str, str]:
        """sacreBLEU's line on how each score is computed."""
        return {"bleu": self.bleu.signature, "chrf": self.chrf.signature}

    def write(
        self, folder: Path, name: str, lines: dict[int, Translation], scores: dict[str, float], **origin: Any
    ) -> None:
        """Write `{name}.txt`, line k the translation of line k, and `{name}.json`: scores, provenance, samples.

        Lines that were not translated, because the pass was limited, are blank up to the last that was.
        """
        folder.mkdir(parents=True, exist_ok=True)
        written = [lines[k].translation if k in lines else "" for k in range(max(lines, default=-1) + 1)]
        text = "".join(f"{translation}\n" for translation in written)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8", newline="\n")
        facts = {
            "scores": scores,
            "signatures": self.signatures,
            "sacrebleu": sacrebleu.__version__,
            "lines": len(lines),
            "empty": sum(not line.translation for line in lines.values()),
            "truncated": sum(line.truncated for line in lines.values()),
            **origin,
            "samples": [line.sample() for line in list(lines.values())[:SAMPLES]],
        }
        (folder / f"{name}.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
