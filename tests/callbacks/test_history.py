"""A history stays small and evenly spaced."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stabilize.callbacks.history import LIMIT, History


@given(st.integers(0, 5000))
def test_rows_are_few_evenly_spaced_and_come_back(count: int):
    history = History()
    for update in range(50, 50 * count + 1, 50):
        history.append(update, [update / 2])
    assert len(history.rows) == len(history.updates) < LIMIT
    assert len(history.rows) >= min(count, LIMIT // 2)
    assert len({later - earlier for earlier, later in zip(history.updates, history.updates[1:], strict=False)}) <= 1
    assert history.rows == [[update / 2] for update in history.updates]
    assert history.latest == 50 * count
    resumed = History.from_state_dict(history.state_dict())
    for later in (history, resumed):
        later.append(50 * count + 50, [0.0])
    assert vars(resumed) == vars(history)
