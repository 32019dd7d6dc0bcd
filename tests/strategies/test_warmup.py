"""Schedules against their closed forms, by the number of the update."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stabilize.errors import UserError
from stabilize.strategies import InverseSqrt, Linear, Noam, NoWarmup, Warmup

updates = st.integers(1, 20_000)
RISING: list[Callable[[int], Warmup]] = [InverseSqrt, lambda w: Noam(w).at(512), Linear, lambda w: Linear(w, 3 * w)]
rising = pytest.mark.parametrize("schedule", RISING, ids=["inverse_sqrt", "noam", "linear", "linear_with_total"])


@rising
@given(w=updates, t=updates)
def test_the_peak_is_at_the_configured_update_and_nothing_is_below_zero(
    schedule: Callable[[int], Warmup], w: int, t: int
) -> None:
    factor = schedule(w).factor
    assert factor(1) > 0
    assert 0 <= factor(t) <= factor(w) * (1 + 1e-12)
    assert factor(w) == pytest.approx(w * factor(1))


@given(w=updates, t=updates)
def test_inverse_sqrt(w: int, t: int) -> None:
    assert InverseSqrt(w).factor(t) == pytest.approx(t / w if t < w else math.sqrt(w / t))


@given(w=updates, t=updates, width=st.integers(1, 4096), scale=st.floats(0.1, 10))
def test_noam(w: int, t: int, width: int, scale: float) -> None:
    expected = scale * width**-0.5 * min(t**-0.5, t * w**-1.5)
    assert Noam(w, scale).at(width).factor(t) == pytest.approx(expected)


def test_noam_peaks_at_the_root_of_width_and_updates() -> None:
    assert Noam(4000).at(512).factor(4000) == pytest.approx(6.99e-4, abs=5e-7)


def test_noam_of_one_width_leaves_the_template_alone() -> None:
    template = Noam(100)
    narrow, wide = template.at(64), template.at(256)
    assert narrow.factor(7) == pytest.approx(2 * wide.factor(7))


@given(w=updates, t=updates)
def test_linear_stays_at_its_peak(w: int, t: int) -> None:
    assert Linear(w).factor(t) == pytest.approx(min(1, t / w))


@given(w=updates, more=updates, t=updates)
def test_linear_falls_to_its_last_update(w: int, more: int, t: int) -> None:
    """(T + 1 - t) / (T + 1 - w): T is the last update that moves anything."""
    total = w + more
    factor = Linear(w, total).factor
    assert factor(w) == 1
    assert factor(total) == pytest.approx(1 / (more + 1))
    assert factor(total + t) == 0
    assert factor(w + min(t, more)) == pytest.approx(1 - min(t, more) / (more + 1))


@given(t=updates)
def test_no_warmup(t: int) -> None:
    assert NoWarmup().factor(t) == 1


@pytest.mark.parametrize("schedule", [InverseSqrt, Noam, Linear])
@pytest.mark.parametrize("count", [0, -3])
def test_less_than_one_update_is_refused_by_key_and_value(schedule: type[Warmup], count: int) -> None:
    with pytest.raises(UserError, match=rf"warmup\.updates is {count}"):
        schedule(count)


def test_a_total_before_the_peak_is_refused() -> None:
    with pytest.raises(UserError, match=r"warmup\.total is 5.*10"):
        Linear(10, 5)
