"""Every pair of strategies from two axes, in as few models as a greedy choice needs: refused by name, or it works."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F

from stabilize.data.batch import Batch
from stabilize.errors import UserError
from stabilize.model import Cache
from stabilize.strategies import (
    AXES,
    B2T,
    DLCL,
    Fixup,
    HybridNorm,
    HyperConnections,
    MaskedBatchNorm,
    MixNorm,
    Part,
    PostNorm,
    PowerNorm,
    QKNorm,
    ResiDual,
    SigmaReparam,
    Stabilizer,
    StochasticDepth,
    Strategy,
)
from stabilize.strategies.menu import menu
from tests.models import PAD, SOURCE, TARGET, VOCABULARY, assert_equal, disturb, model_of

Choice: TypeAlias = tuple[str, type[Strategy]]
"""An axis and a strategy on it."""
Pair: TypeAlias = frozenset[Choice]

ARGUMENTS: dict[str, dict[str, Any]] = {"LayerEpsilon": {"encoder": [1e-5, 1e-6], "decoder": [1e-5, 1e-6]}}
"""Of the classes that cannot be made without."""

MENU: dict[str, list[type[Strategy]]] = {
    axis: [strategy for strategy in menu(base) if strategy.__module__.startswith("stabilize.")]
    for axis, base in AXES.items()
}
PAIRS: list[Pair] = [
    frozenset(pair)
    for one, other in itertools.combinations(MENU, 2)
    for pair in itertools.product(((one, strategy) for strategy in MENU[one]), ((other, s) for s in MENU[other]))
]


def made(choices: dict[str, type[Strategy]] | Pair) -> Stabilizer:
    """With the default on every other axis."""
    return Stabilizer(
        **{axis: strategy(**ARGUMENTS.get(strategy.__name__, {})) for axis, strategy in dict(choices).items()}
    )


def refusals() -> dict[Pair, str]:
    """What is said to each pair that cannot be."""
    found = {}
    for pair in PAIRS:
        try:
            made(pair)
        except UserError as error:
            found[pair] = str(error)
    return found


REFUSED = refusals()
CANNOT_BE = {
    # Several streams have no norm, and these placements norm the stream itself.
    *((HyperConnections, placement) for placement in (PostNorm, B2T, ResiDual, HybridNorm, MixNorm)),
    # One keeps the stream's history, the other a second stream.
    (DLCL, ResiDual),
    # The second stream would sum up branches that are skipped.
    (StochasticDepth, ResiDual),
    # Statistics over real tokens, where nobody says which those are.
    *((part, norm) for part in (DLCL, QKNorm) for norm in (MaskedBatchNorm, PowerNorm)),
    # W / sigma(W) of a W that is zero.
    (SigmaReparam, Fixup),
}
"""All pairs that the equations rule out, and no more."""


def covering() -> list[dict[str, type[Strategy]]]:
    """Whole stabilisers that hold every pair which is not refused: each starts with a pair not yet held, and takes on
    every other axis what holds the most new pairs."""
    left, rows = dict.fromkeys(pair for pair in PAIRS if pair not in REFUSED), []
    while left:
        row = dict(sorted(next(iter(left))))
        for axis in (axis for axis in MENU if axis not in row):
            joined = {s: [frozenset({(axis, s), choice}) for choice in row.items()] for s in MENU[axis]}
            able = [s for s, pairs in joined.items() if REFUSED.keys().isdisjoint(pairs)]
            row[axis] = max(able, key=lambda s: sum(pair in left for pair in joined[s]))
        for pair in itertools.combinations(row.items(), 2):
            left.pop(frozenset(pair), None)
        rows.append(row)
    return rows


ROWS = covering()


def test_the_rows_hold_every_pair_and_no_refused_one() -> None:
    held = {frozenset(pair) for row in ROWS for pair in itertools.combinations(row.items(), 2)}
    assert held == set(PAIRS) - REFUSED.keys()
    assert all(row.keys() == MENU.keys() for row in ROWS)
    assert len(ROWS) < 2 * max(len(MENU[one]) * len(MENU[other]) for one, other in itertools.combinations(MENU, 2))


def test_what_cannot_be_is_refused_and_nothing_else() -> None:
    found = {frozenset(strategy for _, strategy in pair) for pair in REFUSED}
    assert found == {frozenset(pair) for pair in CANNOT_BE}


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: "-".join(sorted(strategy.__name__ for _, strategy in pair)))
def test_a_pair_is_refused_in_one_sentence_that_names_both(pair: Pair) -> None:
    said = REFUSED[pair]
    assert all(strategy.__name__ in said for _, strategy in pair), said
    assert "\n" not in said
    assert ". " not in said


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[axis].__name__ for axis in MENU))
def test_a_pair_that_is_not_refused_trains_and_decodes(row: dict[str, type[Strategy]]) -> None:
    stabilizer = made(row)
    model = model_of(stabilizer, 2, 2, dropout=0.1).train()
    parts = [part for part in model.modules() if isinstance(part, Part)]
    for part in parts:
        part.prepare(model, Batch(SOURCE, TARGET, torch.arange(2)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    schedule = stabilizer.warmup.at(16, 10_000)
    for update in (1, 2):
        logits = model.project(model(SOURCE, TARGET[:, :-1]))
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), TARGET[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-3 * schedule.factor(update)
        optimizer.step()
        for part in parts:
            part.after_update(update)
        assert loss.isfinite()
    assert all(value.isfinite().all() for value in model.state_dict().values())

    disturb(model)  # branches that start at zero would hardly be heard
    real, memory, cache = TARGET != PAD, model.eval().encode(SOURCE), Cache()
    pieces = [model.decode(piece, memory, cache) for piece in TARGET.split([1, 1, 3], dim=1)]
    assert_equal(torch.cat(pieces, 1)[real], model.decode(TARGET, memory)[real], 1e-5)
