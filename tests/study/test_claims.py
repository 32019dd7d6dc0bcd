"""The rules by which claims are judged, on runs made by hand."""

from __future__ import annotations

import math

import pytest

from stabilize.study.claims import (
    CLAIMS,
    DIRECTION,
    HOLDS,
    NOT,
    STACKS,
    UNKNOWN,
    by_counts,
    by_number,
    judge,
    optimum,
)
from stabilize.study.table import Mean
from tests.study.rows import row


@pytest.mark.parametrize(
    ("values", "claimed", "nothing", "verdict"),
    [
        ((0.86, 0.87, 0.88), 0.87, 0.5, HOLDS),
        ((0.70, 0.71, 0.72), 0.87, 0.5, DIRECTION),
        ((0.40, 0.41, 0.42), 0.87, 0.5, NOT),
        ((0.1, 0.9, 1.6), 0.87, 0.5, DIRECTION),  # the interval has the claim, and no effect as well
        ((0.87,), 0.87, 0.5, DIRECTION),  # one run has no interval
    ],
)
def test_a_number(values: tuple[float, ...], claimed: float, nothing: float, verdict: str) -> None:
    assert by_number(Mean(values), (claimed, claimed), nothing) == verdict
    mirrored = Mean(tuple(-value for value in values))
    assert by_number(mirrored, (-claimed, -claimed), -nothing) == verdict
    assert by_number(None, (claimed, claimed), nothing) == UNKNOWN


def test_counts() -> None:
    assert by_counts((3, 3), (9, 9)) == HOLDS
    assert by_counts((2, 3), (9, 9)) == DIRECTION
    assert by_counts((1, 3), (9, 9)) == NOT


def test_the_best_learning_rate_is_the_bottom_of_a_parabola() -> None:
    """Exact where nll is one, over the logarithm of the rate; unknown at the edge."""
    rates = (5e-4, 1e-3, 2e-3, 4e-3)
    bottom = math.log(1.3e-3)
    rows = [row(learning_rate=rate, val_nll=2 + (math.log(rate) - bottom) ** 2) for rate in rates]
    assert optimum(rows) == pytest.approx(bottom)
    assert optimum([row(learning_rate=rate, val_nll=rate) for rate in rates]) is None
    assert optimum([]) is None


def test_without_runs_nothing_is_judged() -> None:
    judged = judge([])
    assert [one.letter for one in judged] == [claim.letter for claim in CLAIMS]
    assert {one.verdict for one in judged} == {UNKNOWN}
    assert len({one.letter for one in judged}) == len(judged)
    assert {one.letter[0] for one in judged} == set("abcdefghi")


def judged(rows: list[dict[str, str]]) -> dict[str, str]:
    return {one.letter: one.verdict for one in judge(rows)}


def test_claims_about_depth() -> None:
    """Runs as the claims have them, then as they have them not."""

    def runs(fate: str, ratio: float) -> list[dict[str, str]]:
        found = []
        for seed in (1, 2, 3):
            jitter = 1 + seed / 50
            ratios = {f"{stack}_gradient_ratio_first": ratio * jitter for stack in STACKS}
            for depth in (4, 12, 16):
                deep = "stuck" if depth > 4 else "trained"
                common = {"seed": seed, "depth": depth, "learning_rate": 0.001, "study": "claims"}
                found.append(row(outcome=deep, strategy="no_residual", **common, **ratios))
            for depth in (3, 6, 12, 18):
                outcome = fate if depth > 6 else "trained"
                common = {"seed": seed, "depth": depth, "learning_rate": 0.001, "study": "depth"}
                post = {f"{stack}_gradient_ratio_first": 0.01 * jitter for stack in STACKS}
                found.append(row(outcome=outcome, strategy="post_ln", **common, **post))
                for strategy in ("pre_ln", "b2t"):
                    found.append(row(strategy=strategy, **common))
        return found

    first = judged(runs("stuck", 0.05))
    assert {first[key] for key in ("a1", "a2", "b1", "h1", "h2", "h3")} == {HOLDS}
    assert judged(runs("stuck", 0.5))["a1"] == DIRECTION
    assert judged(runs("stuck", 5.0))["a1"] == NOT
    assert judged(runs("trained", 0.05))["h2"] == NOT


def test_claims_about_similarity_and_used_depth() -> None:
    def runs(pre: float, post: float, used: int) -> list[dict[str, str]]:
        found = []
        for seed in (1, 2, 3):
            for strategy, cosine in (("pre_ln", pre), ("post_ln", post)):
                for depth in (12, 18):
                    common = {"seed": seed, "depth": depth, "learning_rate": 0.001, "study": "depth"}
                    similar = {f"{stack}_similarity": cosine + seed / 1000 for stack in STACKS}
                    missed = {f"{stack}_effective_depth": used + seed for stack in STACKS}
                    found.append(row(strategy=strategy, **common, **similar, **missed))
        return found

    first = judged(runs(0.868, 0.628, 9))
    assert (first["c1"], first["c2"], first["c3"]) == (HOLDS, HOLDS, HOLDS)
    second = judged(runs(0.95, 0.90, 14))
    assert (second["c1"], second["c2"], second["c3"]) == (DIRECTION, DIRECTION, DIRECTION)
    third = judged(runs(0.5, 0.9, 19))
    assert (third["c1"], third["c2"], third["c3"]) == (NOT, NOT, NOT)
