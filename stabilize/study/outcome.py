"""What became of one run."""

from __future__ import annotations

import math
from typing import Literal

from stabilize.findings import ABOVE_START, STUCK_ENTROPY, STUCK_FALL, STUCK_UPDATES
from stabilize.report import Run

NUMBERS: dict[str, tuple[str, Literal["last", "first", "largest", "mean of the last quarter"]]] = {
    "val_nll": ("val/nll", "last"),
    "val_bleu": ("val/bleu", "last"),
    "test_nll": ("test/nll", "last"),
    "test_bleu": ("test/bleu", "last"),
    "train_nll": ("train/nll", "mean of the last quarter"),
    "encoder_gradient_ratio": ("gradient_ratio/encoder/first_to_last", "last"),
    "decoder_gradient_ratio": ("gradient_ratio/decoder/first_to_last", "last"),
    "encoder_gradient_ratio_first": ("gradient_ratio/encoder/first_to_last", "first"),
    "decoder_gradient_ratio_first": ("gradient_ratio/decoder/first_to_last", "first"),
    "encoder_similarity": ("layer_similarity/encoder/mean", "last"),
    "decoder_similarity": ("layer_similarity/decoder/mean", "last"),
    "encoder_similarity_centered": ("layer_similarity_centered/encoder/mean", "last"),
    "decoder_similarity_centered": ("layer_similarity_centered/decoder/mean", "last"),
    "encoder_effective_depth": ("effective_depth/encoder", "last"),
    "decoder_effective_depth": ("effective_depth/decoder", "last"),
    "encoder_epsilon_share": ("epsilon_audit/encoder", "largest"),
    "decoder_epsilon_share": ("epsilon_audit/decoder", "largest"),
}
"""Columns of results.csv: the metric, and which of its values; `largest` is that of any layer at the last record."""

STUCK_AT_END = 0.95
"""Share of the entropy of single words."""

FAILURES = {
    "diverged": "loss or gradient norm not finite, or training nll to the end more than "
    f"{ABOVE_START:g} nat above its beginning",
    "stuck": f"training nll fell by less than {STUCK_FALL:.0%} from the third to the last quarter and stands above "
    f"{STUCK_ENTROPY:.0%} of the entropy of single words, or stands above {STUCK_AT_END:.0%} of it in the last quarter "
    f"(not before {STUCK_UPDATES} updates)",
    "crashed": "ended with an error",
}
"""Outcomes of a run that did not train, and how they are told; `stabilize/findings.py` finds them, but for what may be
called so at the end alone: a run that knows little more than how frequent words are, though its nll still falls."""


def outcome(run: Run | None, code: int) -> str:
    """`trained`, or one of FAILURES, of a run that ended with an exit code."""
    if run is not None:
        for finding in run.diary.all:
            if not finding.passed and finding.rule in FAILURES:
                return finding.rule
    if run is None or code:
        return "crashed"
    if run.updates < STUCK_UPDATES:
        return "trained"
    nll, entropy = number(run, *NUMBERS["train_nll"]), run.diary.entropy
    return "stuck" if nll is not None and entropy is not None and nll > STUCK_AT_END * entropy else "trained"


def numbers(run: Run | None) -> dict[str, str]:
    """The columns of NUMBERS with every digit; empty where there is no number."""
    found = {column: number(run, *NUMBERS[column]) if run is not None else None for column in NUMBERS}
    return {column: "" if value is None else repr(value) for column, value in found.items()}


def number(run: Run, key: str, which: str) -> float | None:
    """One number of a run, see NUMBERS; none where it was not measured."""
    if which == "largest":
        layers = [points[-1][1] for name, points in run.curves.items() if name.startswith(f"{key}/layer_")]
        return max(layers, default=None)
    values = [value for _, value in run.curves.get(key, ())]
    if not values:
        return None
    if which == "mean of the last quarter":
        quarter = values[-max(1, len(values) // 4) :]
        return math.fsum(quarter) / len(quarter)
    return values[0] if which == "first" else values[-1]
