"""The rules by which claims are judged, on runs made by hand."""

from __future__ import annotations

import math

import pytest

from stabilize.study.answer import EPSILON, PRECISION, WARMUP
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
                found.append(row(outcome=outcome, strategy="post_ln+warmup", **common))
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


def study(name: str, strategy: str, outcomes: str, nll: float = 2.0, **values: object) -> list[dict[str, str]]:
    """Runs of seeds 1, 2, ..., of which `outcomes` has the first letters."""
    fates = {"t": "trained", "s": "stuck", "d": "diverged"}
    common: dict[str, object] = {"study": name, "learning_rate": 0.001} | values
    return [
        row(outcome=fates[letter], strategy=strategy, seed=seed, val_nll=nll + seed / 100, **common)
        for seed, letter in enumerate(outcomes, start=1)
    ]


@pytest.mark.parametrize(
    ("shallow", "bare", "careful", "verdict"),
    [
        ("ttt", "sss", "ttt", HOLDS),
        ("ttt", "sss", "sst", DIRECTION),  # but warm-up does not help
        ("ttt", "sst", "ttt", DIRECTION),
        ("tss", "sss", "ttt", NOT),
        ("ttt", "tts", "ttt", NOT),
    ],
)
def test_post_norm_without_warmup(shallow: str, bare: str, careful: str, verdict: str) -> None:
    rows = []
    for updates, deep in ((1, bare), (250, careful)):
        warmup = {WARMUP: updates}
        rows += study("warmup", "post_ln", shallow, depth=6, **warmup)
        rows += study("warmup", "post_ln", deep, depth=12, **warmup)
        rows += study("warmup", "post_ln", "sss", depth=12, **warmup | {"learning_rate": 0.002})  # not at its best
        rows += study("warmup", "pre_ln", "tts", depth=12, **warmup)
    assert judged(rows)["b2"] == verdict
    assert judged(rows)["e2"] == DIRECTION


def test_b2t_at_sixteen_layers() -> None:
    def runs(post: str, careful: str, b2t: float) -> list[dict[str, str]]:
        rows = study("claims", "post_ln", post, depth=16) + study("claims", "post_ln+warmup", careful, depth=16)
        return rows + study("claims", "b2t", "ttt", b2t, depth=16) + study("claims", "pre_ln", "ttt", 2.5, depth=16)

    verdicts = [judged(runs(*given)) for given in (("sss", "sss", 2.0), ("sss", "tts", 3.0))]
    assert [(found["d1"], found["d2"]) for found in verdicts] == [(HOLDS, HOLDS), (NOT, NOT)]
    assert judged([one for one in runs("sss", "sss", 2.0) if one["seed"] == "1"])["d2"] == UNKNOWN


@pytest.mark.parametrize(
    ("pre", "scaled_pre", "post", "scaled_post", "verdict"),
    [
        ("tttttt", "tttttt", "tttttt", "tttttt", UNKNOWN),  # there is nothing to keep from
        ("ddssss", "tttttt", "tttttt", "tttttt", HOLDS),
        ("tttttt", "tttttt", "ssssss", "ssssss", NOT),
        ("tttttt", "tttttt", "ssssss", "ssssst", NOT),  # a seed is chance
        ("tttttt", "tttttt", "ssssss", "sttttt", DIRECTION),
        ("tttttt", "ttttts", "ssssss", "tttttt", NOT),  # here it does harm
    ],
)
def test_scaled_sums(pre: str, scaled_pre: str, post: str, scaled_post: str, verdict: str) -> None:
    given = {"pre_ln": pre, "pre_ln_rsqrt2": scaled_pre, "post_ln": post, "residual_rsqrt2": scaled_post}
    rows = [
        one for depth in (12, 16) for name, fates in given.items() for one in study("claims", name, fates, depth=depth)
    ]
    assert judged(rows)["f"] == verdict


@pytest.mark.parametrize(
    ("best", "spread", "verdict"),
    [
        ({"32-true": "1e-05", "bf16-mixed": "1e-08"}, 0.5, HOLDS),
        ({"32-true": "1e-05", "bf16-mixed": "1e-05"}, 0.5, DIRECTION),
        ({"32-true": "1e-05", "bf16-mixed": "1e-08"}, 0.0, NOT),
    ],
)
def test_epsilon_and_format(best: dict[str, str], spread: float, verdict: str) -> None:
    rows = []
    for strategy in ("pre_ln", "post_ln"):
        for precision, chosen in best.items():
            for epsilon in ("1e-05", "1e-08"):
                nll = 2.0 if epsilon == chosen else 2.0 + spread
                rows += study("epsilon", strategy, "ttt", nll, **{PRECISION: precision, EPSILON: epsilon})
    assert judged(rows)["g"] == verdict


def test_post_norm_below_twelve_layers() -> None:
    def runs(post: str, nll: float) -> list[dict[str, str]]:
        rows = [one for depth in (3, 6) for one in study("depth", "post_ln", post, nll, depth=depth)]
        return rows + [one for depth in (3, 6) for one in study("depth", "pre_ln", "ttt", 2.5, depth=depth)]

    assert [judged(runs(*given))["h1"] for given in (("ttt", 2.5), ("ttt", 4.0), ("sss", 2.5))] == [
        HOLDS,
        DIRECTION,
        NOT,
    ]


def test_batch_norm() -> None:
    def runs(batch: str, layer: str, gap: float) -> list[dict[str, str]]:
        found = []
        for tokens in ("1", "64"):
            for name, fates, more in (("masked_batch_norm", batch, gap), ("pre_ln", layer, 0.1)):
                some = study("batchnorm", name, fates, data__init_args__batch_tokens=tokens)
                found += [one | {"train_nll": str(float(one["val_nll"]) - more)} for one in some]
        return found

    found = [judged(runs(*given)) for given in (("sss", "ttt", 0.5), ("ttt", "ttt", 0.1), ("sss", "sss", 0.05))]
    assert [one["i1"] for one in found] == [HOLDS, NOT, UNKNOWN]
    assert [one["i2"] for one in found] == [HOLDS, NOT, NOT]
