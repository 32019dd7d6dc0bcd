"""Token batches: the budget, every row once, fair shares, and a place to go on from (FIELD_REPORTS 2.18, 5.7)."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stabilize.data.sampler import TokenBatches
from stabilize.errors import UserError

lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=4, max_size=120)


def sampler(pairs: list[tuple[int, int]], **options: object) -> TokenBatches:
    source, target = np.array(pairs).T
    return TokenBatches(source, target, **options)  # type: ignore[arg-type]


def rows(batches: list[NDArray[np.int64]]) -> list[int]:
    return [int(row) for batch in batches for row in batch]


@given(lengths, st.integers(1, 100), st.booleans(), st.integers(1, 4), st.integers(0, 3))
def test_every_row_once_within_the_budget_in_equal_shares(
    pairs: list[tuple[int, int]], tokens: int, shuffle: bool, world_size: int, epoch: int
) -> None:
    everything = []
    counts = set()
    for rank in range(world_size):
        share = sampler(pairs, tokens=tokens, shuffle=shuffle, rank=rank, world_size=world_size)
        share.set_epoch(epoch)
        batches = list(share)
        counts |= {len(batches), len(share)}
        everything += batches
    assert len(counts) == 1
    assert sorted(rows(everything)) == list(range(len(pairs)))
    assert all(len(batch) for batch in everything)
    over = [batch for batch in everything if len(batch) * max(max(pairs[row]) for row in batch) > tokens]
    shared = [batch for batch in everything if len(batch) > 1]
    # One batch may pass the budget with several rows: where all are single sentences and do not come out even.
    assert all(len(batch) == 1 for batch in over) or (len(shared) == 1 and len(shared[0]) <= world_size)


def test_two_ranks_share_101_sentences() -> None:
    pairs = [(1 + k % 17, 1 + k % 13) for k in range(101)]
    for seed in range(20):
        orders = set()
        for epoch in range(3):
            shares = []
            for rank in range(2):
                share = sampler(pairs, tokens=64, seed=seed, rank=rank, world_size=2)
                share.set_epoch(epoch)
                shares.append(list(share))
            assert len(shares[0]) == len(shares[1])
            assert not set(rows(shares[0])) & set(rows(shares[1]))
            assert sorted(rows(shares[0] + shares[1])) == list(range(101))
            orders.add(tuple(rows(shares[0])))
        assert len(orders) == 3


@given(lengths, st.integers(1, 100), st.integers(2, 5))
def test_evaluation_has_the_same_batches_at_any_number_of_processes(
    pairs: list[tuple[int, int]], tokens: int, processes: int
) -> None:
    """Each once, and some processes one without rows, so that all have as many."""
    alone = [batch.tolist() for batch in sampler(pairs, tokens=tokens, shuffle=False, evaluation=True)]
    options = {"tokens": tokens, "shuffle": False, "evaluation": True, "world_size": processes}
    shares = [sampler(pairs, rank=rank, **options) for rank in range(processes)]
    together = [[batch.tolist() for batch in share] for share in shares]
    assert {len(batches) for batches in together} == {len(share) for share in shares} == {-(-len(alone) // processes)}
    dealt = [batch for turn in zip(*together, strict=True) for batch in turn]
    assert dealt == alone + [[]] * (len(dealt) - len(alone))


def test_seed_and_epoch_decide_the_order() -> None:
    pairs = [(1 + k % 7, 1 + k % 5) for k in range(200)]
    again = [rows(list(sampler(pairs, tokens=50, seed=seed))) for seed in (0, 0, 1)]
    assert again[0] == again[1] != again[2]
    batches = sampler(pairs, tokens=50)
    first = {tuple(sorted(batch)) for batch in batches}
    batches.set_epoch(1)
    second = {tuple(sorted(batch)) for batch in batches}
    assert first != second, "an epoch has its own batches, not only its own order of the same ones"


def test_evaluation_starts_with_the_longest_and_never_changes() -> None:
    pairs = [(5, 1 + k % 30) for k in range(100)]
    batches = sampler(pairs, tokens=60, shuffle=False)
    order = [batch.tolist() for batch in batches]
    assert max(pairs[row][1] for row in order[0]) == 30
    batches.set_epoch(3)
    assert [batch.tolist() for batch in batches] == order


def test_a_sentence_over_the_budget_is_a_batch_of_one() -> None:
    batches = list(sampler([(500, 3), (3, 500), (3, 3), (3, 3)], tokens=16))
    assert sorted(sorted(batch.tolist()) for batch in batches) == [[0], [1], [2, 3]]


def test_single_sentences_that_do_not_come_out_even() -> None:
    shares = [list(sampler([(9, 9), (8, 8), (7, 7)], tokens=1, rank=rank, world_size=2)) for rank in range(2)]
    assert sorted(sorted(batch.tolist()) for share in shares for batch in share) == [[0], [1, 2]]


def test_the_limit_itself_fits() -> None:
    assert [len(list(sampler([(8, 8)] * 4, tokens=tokens))) for tokens in (31, 32)] == [2, 1]


def test_fewer_rows_than_processes() -> None:
    with pytest.raises(UserError, match="3 sentence pairs for 4 processes"):
        sampler([(1, 1)] * 3, tokens=9, world_size=4)
    assert rows(list(sampler([(1, 1)] * 3, tokens=9, world_size=4, rank=3, evaluation=True))) == []


def test_goes_on_where_it_was() -> None:
    pairs = [(1 + k % 7, 1 + k % 5) for k in range(200)]
    whole = sampler(pairs, tokens=50)
    whole.set_epoch(2)
    expected = [batch.tolist() for batch in whole]
    resumed = sampler(pairs, tokens=50)
    resumed.load_state_dict({"epoch": 2, "position": 5, "batches": len(whole)})
    resumed.set_epoch(2)
    assert [batch.tolist() for batch in resumed] == expected[5:]
    resumed.set_epoch(3)
    place = {key: resumed.state_dict()[key] for key in ("epoch", "position", "batches")}
    assert place == {"epoch": 3, "position": 0, "batches": len(whole)}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"tokens": 14}, "batches 7 then and 5 now, tokens 12 then and 14 now"),
        ({"seed": 1}, "seed 0 then and 1 now"),
        ({"text": "b"}, "text a then and b now"),
    ],
)
def test_another_order_starts_the_epoch_again(other: dict[str, Any], told: str) -> None:
    """But not what is at the beginning or the end of one."""
    before = sampler([(3, 3)] * 27, tokens=12, text="a")
    for position in (0, 3, 7):
        before.epoch, before.position = 2, position
        now = sampler([(3, 3)] * (20 if "tokens" in other else 27), **{"tokens": 12, "text": "a"} | other)
        warns = pytest.warns(UserWarning, match=re.escape(f"({told}): the epoch starts again"))
        with warns if position == 3 else contextlib.nullcontext():
            now.load_state_dict(before.state_dict())
        assert (now.epoch, now.position) == (2, len(now) if position == 7 else 0)


def test_processes_that_do_not_share_evenly_say_what_is_read_twice() -> None:
    before, now = (sampler([(3, 3)] * 24, tokens=12, world_size=size) for size in (1, 3))
    before.position = 5
    with pytest.warns(UserWarning, match="5 batches of the epoch were read, which 3 .*: the last 2 are read twice"):
        now.load_state_dict(before.state_dict())
    assert (now.epoch, now.position) == (0, 1)


@given(lengths, st.integers(0, 3))
def test_rows_are_in_the_order_of_a_plain_sort(pairs: list[tuple[int, int]], epoch: int) -> None:
    """By target length, under it by source length, up and down in turn; equal ones by a random number."""
    batches = sampler(pairs, tokens=10**6, seed=5)
    batches.set_epoch(epoch)
    chance = np.random.default_rng((5, epoch)).permutation(len(pairs))
    expected = sorted(
        range(len(pairs)),
        key=lambda row: (pairs[row][1], pairs[row][0] * (1 if pairs[row][1] % 2 else -1), chance[row]),
    )
    assert rows(list(batches)) == expected


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_processes_have_as_many_tokens(world_size: int) -> None:
    random = np.random.default_rng(0)
    target = random.gamma(3, 8, 60_000).astype(int) + 2
    shares = [TokenBatches(target, target, tokens=1024, rank=rank, world_size=world_size) for rank in range(world_size)]
    tokens = np.array([[target[batch].sum() for batch in share] for share in shares])
    assert tokens.sum() == target.sum()
    assert tokens.sum(1).max() < 1.02 * tokens.sum(1).min()
    assert np.median(tokens.max(0) / tokens.min(0)) < 1.1, "at each update nobody waits for the others"


def test_little_padding() -> None:
    random = np.random.default_rng(0)
    target = random.poisson(14, 20_000) + 2
    source = np.maximum(1, target + random.integers(-3, 4, len(target)))
    batches = list(TokenBatches(source, target, tokens=4096))
    padded = sum(len(batch) * target[batch].max() for batch in batches)
    assert 1 - target.sum() / padded < 0.02


def test_other_processes_go_on_at_the_same_place() -> None:
    """Two where one was, and the other way round; nothing is used twice, nothing left out."""
    pairs = [(1 + k % 7, 1 + k % 5) for k in range(200)]
    whole = sampler(pairs, tokens=46)
    assert len(whole) % 2 == 0
    expected = [batch.tolist() for batch in whole]
    whole.position = 6
    two = [sampler(pairs, tokens=46, rank=rank, world_size=2) for rank in range(2)]
    for share in two:
        share.load_state_dict(whole.state_dict())
    dealt = [batch.tolist() for together in zip(*two, strict=True) for batch in together]
    assert dealt == expected[6:]
    two[0].position = 4
    whole.load_state_dict(two[0].state_dict())
    assert [batch.tolist() for batch in whole] == expected[8:]
