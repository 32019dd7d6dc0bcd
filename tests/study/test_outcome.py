"""What became of a run, and the numbers that are kept of it."""

from __future__ import annotations

import math

from stabilize.findings import findings
from stabilize.report.run_folder import Run
from stabilize.study import NUMBERS
from stabilize.study.outcome import numbers, outcome


def run(nll: list[float], **last: float) -> Run:
    """A run whose training nll was this, ten updates apart, and other metrics at the end."""
    records = [(10 * (i + 1), {"train/nll": value, "train/loss": value}) for i, value in enumerate(nll)]
    records.append((10 * len(nll), {key.replace("__", "/"): value for key, value in last.items()}))
    return Run("", {}, "", records, {"train/word_entropy": 5.0}, {}, [], "", {}, None, [])


def test_outcomes() -> None:
    falls = [8 / (1 + i / 10) for i in range(60)]
    assert outcome(run(falls), 0) == "trained"
    assert outcome(run(falls), 1) == "crashed"
    assert outcome(None, 2) == "crashed"
    assert outcome(run([8.0] * 3 + [7.0] * 57), 0) == "stuck"
    assert outcome(run([8.0 * 0.99**i for i in range(50)]), 0) == "stuck", "it falls, but knows nothing yet"
    slowly = [5.2 - i / 100 for i in range(60)]  # to 4.61, and 4.68 on average of the last quarter: 94 %
    assert outcome(run(slowly), 0) == "trained"
    assert outcome(run([value + 0.1 for value in slowly]), 0) == "stuck", "96 %"
    assert outcome(run([8.0 * 0.98**i for i in range(50)]), 0) == "trained"
    assert outcome(run([*falls[:30], *[20.0] * 30]), 0) == "diverged"
    assert outcome(run([*falls[:30], math.nan]), 1) == "diverged"
    assert findings([(10, {"train/nll": 8.0})]).verdict == "no fault seen"


def test_numbers_keep_every_digit() -> None:
    found = numbers(run([5.0], val__nll=0.1 + 0.2))
    assert found["val_nll"] == "0.30000000000000004"
    assert found["val_bleu"] == ""
    assert set(numbers(None).values()) == {""}


def test_which_value_of_a_metric_counts() -> None:
    """The last, but for the first ratio, the last quarter of training's nll, and the layer where epsilon acts most."""
    records = [(k, {"train/nll": float(k), "gradient_ratio/encoder/first_to_last": k / 10}) for k in range(1, 9)]
    audits = [
        {"epsilon_audit/encoder/layer_001": 0.1, "epsilon_audit/encoder/layer_002": share} for share in (0.9, 0.4)
    ]
    records += [(9, audits[0]), (10, audits[1])]
    found = numbers(Run("", {}, "", records, {}, {}, [], "", {}, None, []))
    assert found["train_nll"] == "7.5"
    assert (found["encoder_gradient_ratio_first"], found["encoder_gradient_ratio"]) == ("0.1", "0.8")
    assert (found["encoder_epsilon_share"], found["decoder_epsilon_share"]) == ("0.4", "")
    assert found.keys() == NUMBERS.keys()
