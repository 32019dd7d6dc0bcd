"""Schedules against their closed forms, by the number of the update."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR

from stabilize.errors import UserError
from stabilize.strategies import InverseSqrt, Linear, Noam, NoWarmup, PostNorm, Stabilizer, Warmup
from stabilize.strategies.warmup import Cosine, Exponential, InverseSqrtDecay, Untuned, WarmupStableDecay
from tests.commands.parsing import fit_parser
from tests.tasks import curve, fit, sentence_batch, small_task, small_trainer

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


# ---------------------------------------------------------------- schedules without a number of updates to choose

beta2s = st.sampled_from([0.9, 0.98, 0.99, 0.999])


@given(t=updates, beta2=beta2s)
def test_exponential(t: int, beta2: float) -> None:
    """1 - exp(-(1 - beta2) t), t from 1 (Ma and Yarats 2019, arXiv:1910.04209)."""
    assert Exponential(beta2).factor(t) == pytest.approx(-math.expm1(-(1 - beta2) * t))


@given(t=updates, beta2=beta2s)
def test_untuned(t: int, beta2: float) -> None:
    """min(1, (1 - beta2) t / 2): linear over 2 / (1 - beta2) updates."""
    assert Untuned(beta2).factor(t) == pytest.approx(min(1.0, (1 - beta2) * t / 2))


@pytest.mark.parametrize(("beta2", "last"), [(0.98, 100), (0.999, 2000)])
def test_untuned_needs_as_many_updates_as_published(beta2: float, last: int) -> None:
    factor = Untuned(beta2).factor
    assert factor(last) == pytest.approx(1)
    assert factor(last - 1) == pytest.approx(1 - 1 / last)


@given(t=updates, period=updates)
def test_t_fixups_decay(t: int, period: int) -> None:
    """sqrt(P / (P + t)), t the updates already done: no warm-up, one at the first update."""
    assert InverseSqrtDecay(period).factor(t) == pytest.approx(math.sqrt(period / (period + t - 1)))
    assert InverseSqrtDecay(period).factor(1) == 1


# ---------------------------------------------------------------- schedules with an end

W, T = 1_000, 101_000
"""Last update of the warm-up, and of all; so far apart that it is one whether the last update has 0 or a little."""


def half_cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("given", [True, False])
def test_cosine(floor: float, given: bool) -> None:
    """t / w, then floor + (1 - floor) (1 + cos(pi (t - w) / (T - w))) / 2; T given, or the run's."""
    factor = Cosine(W, T if given else None, floor).at(512, 9 if given else T).factor
    assert [factor(t) for t in (1, 500, W)] == pytest.approx([1 / W, 0.5, 1])
    for done in (0.01, 0.25, 0.5, 0.9, 1.0):
        assert factor(W + round(done * (T - W))) == pytest.approx(floor + (1 - floor) * half_cosine(done), abs=1e-4)
    assert factor(T + 5000) == pytest.approx(floor, abs=1e-4)


SHAPES: dict[str, Callable[[float], float]] = {
    "sqrt": lambda done: 1 - math.sqrt(done),
    "linear": lambda done: 1 - done,
    "cosine": half_cosine,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("given", [True, False])
def test_warmup_stable_decay(shape: str, share: float, given: bool) -> None:
    """t / w, then one, then over the last share of all updates down to zero (arXiv:2404.06395, arXiv:2405.18392)."""
    factor = WarmupStableDecay(W, T if given else None, share, shape).at(512, 9 if given else T).factor
    length = round(share * T)
    assert [factor(t) for t in (1, 500, W, W + 1, T // 2, T - length)] == pytest.approx([1 / W, 0.5, 1, 1, 1, 1])
    for done in (0.1, 0.25, 0.5, 0.9):
        assert factor(T - length + round(done * length)) == pytest.approx(SHAPES[shape](done), abs=1e-3)
    assert factor(T) < 0.011
    assert factor(T + 1) == pytest.approx(0, abs=1e-9)


def test_warmup_stable_decay_may_decay_exponentially() -> None:
    """Falls by equal ratios over equal times."""
    factor = WarmupStableDecay(W, T, 0.1, "exponential").factor
    start, length = T - round(0.1 * T), round(0.1 * T)
    at = [factor(start + k * length // 4) for k in range(4)]
    assert at[0] == pytest.approx(1, abs=1e-3)
    assert at[1] < 0.99
    assert at[1] / at[0] == pytest.approx(at[2] / at[1], rel=1e-2) == pytest.approx(at[3] / at[2], rel=1e-2)


ENDING: list[Callable[[int, int | None], Warmup]] = [
    Cosine,
    *(lambda w, total, shape=shape: WarmupStableDecay(w, total, shape=shape) for shape in [*SHAPES, "exponential"]),
]
ending = pytest.mark.parametrize("schedule", ENDING, ids=["cosine", *SHAPES, "exponential"])


@ending
@given(w=st.integers(1, 300), more=st.integers(0, 3000), t=st.integers(1, 5000))
def test_a_schedule_with_an_end_never_rises_after_the_peak(
    schedule: Callable[[int, int | None], Warmup], w: int, more: int, t: int
) -> None:
    factor = schedule(w, 2 * w + more).at(512).factor
    assert factor(1) > 0
    assert 0 <= factor(t) <= 1 + 1e-12
    assert factor(t + 1) <= factor(t) + 1e-12 if t >= w else factor(t + 1) >= factor(t) - 1e-12


@ending
def test_without_an_end_the_trainer_has_to_say_one(schedule: Callable[[int, int | None], Warmup]) -> None:
    with pytest.raises(UserError, match=r"trainer\.max_steps"):
        schedule(10, None).at(512, None)
    template = schedule(10, None)
    assert template.at(512, 100).factor(99) != pytest.approx(template.at(512, 100_000).factor(99))


@ending
def test_an_end_before_the_peak_is_refused(schedule: Callable[[int, int | None], Warmup]) -> None:
    with pytest.raises(UserError, match=r"warmup\.total is 5"):
        schedule(10, 5)


def test_cosine_falls_as_torchs() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    torchs = CosineAnnealingLR(optimizer, T_max=30, eta_min=0.1)
    mine = Cosine(10, 40, floor=0.1).factor
    for update in range(10, 41):
        assert mine(update) == pytest.approx(torchs.get_last_lr()[0])
        optimizer.step()
        torchs.step()
    assert mine(40) == mine(50) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", [Cosine, WarmupStableDecay])
def test_the_last_update_of_a_plan_is_where_it_ends(schedule: type[Warmup]) -> None:
    assert schedule(10, 100).factor(100) == pytest.approx(0)
    assert schedule(10, 100).factor(99) > 0
    assert schedule(10).at(512, 100).factor(100) == pytest.approx(0)
    assert schedule(10, 100).at(512, 1000).factor(100) == pytest.approx(0)


@pytest.mark.parametrize("schedule", [Cosine, WarmupStableDecay])
def test_a_template_stays_open(schedule: type[Warmup]) -> None:
    template = schedule(10)
    assert template.at(512, 100).factor(95) < template.at(512, 200).factor(95)
    assert template.spec()["init_args"]["total"] is None
    assert template.factor(5) == 0.5


def test_the_exponential_fall_halves_five_times() -> None:
    """Each fifth of the fall halves; in Hu et al. 2024 each 5000 updates."""
    factor = WarmupStableDecay(1, 50_000, 0.5, "exponential").factor
    assert [factor(25_000 + 5000 * k) for k in range(6)] == pytest.approx([0.5**k for k in range(6)])
    assert factor(60_000) == factor(50_000)


def test_a_fall_that_begins_before_the_peak_is_refused() -> None:
    assert WarmupStableDecay(900).at(512, 1000).factor(900) == 1
    with pytest.raises(UserError, match=r"updates is 901.*0\.1 of 1000.*decay_share"):
        WarmupStableDecay(901).at(512, 1000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Untuned(1.0), r"warmup\.beta2 is 1\.0"),
        (lambda: Exponential(-0.1), r"warmup\.beta2 is -0\.1"),
        (lambda: Cosine(floor=1.5), r"warmup\.floor is 1\.5"),
        (lambda: Cosine(0), r"warmup\.updates is 0"),
        (lambda: WarmupStableDecay(decay_share=0.0), r"warmup\.decay_share is 0\.0"),
        (lambda: WarmupStableDecay(-1), r"warmup\.updates is -1"),
        (lambda: InverseSqrtDecay(0), r"warmup\.period is 0"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(make: Callable[[], Warmup], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_no_warm_up_under_post_norm_is_said_aloud_whatever_follows() -> None:
    stabilizer = Stabilizer(PostNorm(), warmup=InverseSqrtDecay())
    site = small_task().sizes.site("encoder", 1, "layer")
    assert [w for w in stabilizer.warnings(site, "32-true") if w.startswith("InverseSqrtDecay under PostNorm")]


def test_a_run_ends_where_its_schedule_does(tmp_path: Path) -> None:
    task = small_task(Stabilizer(warmup=WarmupStableDecay(2, decay_share=0.5, shape="linear")))
    fit(small_trainer(tmp_path, max_steps=8), task, [sentence_batch(0, 1)] * 8)
    found = list(curve(tmp_path, "lr").values())
    assert found == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.375, 0.25, 0.125, 0.0])


def test_optimisers_that_stand_in_for_a_warm_up_are_torchs() -> None:
    words = ["--model.optimizer=torch.optim.RAdam", "--model.optimizer.lr=2e-3", "--model.stabilizer.warmup=NoWarmup"]
    optimizer = fit_parser().parse_args(words).as_dict()["model"]["optimizer"]
    assert optimizer["class_path"] == "torch.optim.RAdam"
    assert optimizer["init_args"]["lr"] == 2e-3
