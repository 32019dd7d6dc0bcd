"""How runs are counted: means with their intervals, shares of failures, the best of several learning rates."""

from __future__ import annotations

import math

import pytest

from stabilize.study.table import STUDENT, Mean, at_best, interval, largest_stable, lines
from tests.study.rows import row


@pytest.mark.parametrize(
    ("failures", "runs", "low", "high"),
    [(0, 3, 0, 0.5615), (1, 3, 0.0615, 0.7923), (3, 3, 0.4385, 1), (2, 10, 0.0567, 0.5098), (50, 100, 0.4038, 0.5962)],
)
def test_the_interval_is_wilsons(failures: int, runs: int, low: float, high: float) -> None:
    """As R's binom package has it."""
    assert interval(failures, runs) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("freedom", range(1, 11))
def test_the_table_of_student_is_right(freedom: int) -> None:
    """The density, integrated up to each point, leaves 2.5 % beyond."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    steps, point = 2_000, STUDENT[freedom - 1]
    middles = ((k + 0.5) * point / steps for k in range(steps))
    below = math.fsum(scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2) for x in middles) * point / steps
    assert 0.5 + below == pytest.approx(0.975, abs=5e-6)


def test_the_interval_of_a_mean_is_students() -> None:
    """Worked examples: t is 4.3027 for three values, 2.0860 for twenty-one (tables of any textbook)."""
    assert Mean((1.0, 2.0, 3.0)).half == pytest.approx(4.3027 / math.sqrt(3), abs=1e-4)
    many = Mean(tuple(float(k) for k in range(21)))
    assert many.half == pytest.approx(2.0860 * math.sqrt(38.5 / 21), abs=2e-3)
    assert (Mean((5.0,)).middle, Mean((5.0,)).half) == (5.0, math.inf)


def test_failures_are_counted_and_means_are_over_survivors() -> None:
    rows = [
        row(outcome="stuck", strategy="a", val_nll=5.0),
        row(strategy="b", val_nll=3.0),
        row(strategy="c", val_nll=2.0),
        row(outcome="diverged", strategy="a"),
        row(strategy="b", val_nll=4.0),
        row(outcome="crashed", strategy="c", val_nll=9.0),
    ]
    a, b, c = lines(rows, ["strategy"])
    assert [line.values["strategy"] for line in (a, b, c)] == ["a", "b", "c"]
    assert (a.means, b.means, c.means) == ({"val_nll": 5.0}, {"val_nll": 3.5}, {"val_nll": 2.0})
    assert a.told.startswith("1 diverged, 1 stuck of 2 (")
    assert b.told.startswith("none of 2 (0% to ")
    assert c.failures == {"crashed": 1}
    assert (b.fate, c.fate) == ("trained", "crashed")


def test_a_strategy_is_shown_at_its_best_learning_rate() -> None:
    """Fewest failures first: a rate at which one seed of two is lost is not the best, however low the other's nll."""
    rows = [
        *(row(seed=seed, learning_rate=0.001, depth=3, val_nll=3.0 + seed / 10) for seed in (1, 2)),
        row(seed=1, learning_rate=0.002, depth=3, val_nll=1.0),
        row(seed=2, outcome="diverged", learning_rate=0.002, depth=3),
        *(row(seed=seed, learning_rate=0.0005, depth=3, val_nll=3.5) for seed in (1, 2)),
        *(row(seed=seed, outcome="stuck", learning_rate=0.001, depth=6, val_nll=5.0) for seed in (1, 2)),
        *(row(seed=seed, outcome="stuck", learning_rate=0.002, depth=6, val_nll=4.9) for seed in (1, 2)),
    ]
    found = lines(rows, ["strategy", "depth", "learning_rate"])
    shallow, deep = at_best(found)
    assert (shallow.values["depth"], shallow.values["learning_rate"]) == ("3", "0.001")
    assert (deep.values["depth"], deep.values["learning_rate"]) == ("6", "0.002")
    assert shallow.mean("val_nll") == pytest.approx(3.15)
    assert largest_stable(line for line in found if line.values["depth"] == "3") == 0.001
    assert largest_stable(line for line in found if line.values["depth"] == "6") is None
