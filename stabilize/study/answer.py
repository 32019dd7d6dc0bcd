"""The answer to a study's question in sentences, by rules: what a reader may conclude, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stabilize.findings import number
from stabilize.study.plan import place_of
from stabilize.study.table import Line, Mean, Row, at_best, largest_stable, lines, paired, val_nll, value

WARMUP = "model.stabilizer.warmup.updates"
EPSILON = "model.stabilizer.epsilon.value"
PRECISION = "trainer.precision"


def told(mean: Mean | None) -> str:
    """A mean with its interval."""
    if mean is None:
        return "no number"
    many = len(mean.values) > 1
    return f"{number(mean.middle)}" + (f" ± {number(mean.half)}" if many else "")


def strategies(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Which strategy trains where, and which is best there; each at its best learning rate."""
    found = at_best(lines(rows, keys))
    said, everywhere = [], []
    for strategy, own in _by(found, "strategy"):
        good, bad = [line for line in own if not line.failed], [line for line in own if line.failed]
        if not bad:
            everywhere.append(strategy)
        else:
            parts = [f"trains at {_places(good)}" if good else "trains nowhere"]
            for seeds, all_failed in (("no seed does", True), ("not every seed does", False)):
                lost = [f"{_place(line)}, {line.told}" for line in bad if (line.failed == line.runs) == all_failed]
                parts += [f"{seeds} at {'; '.join(lost)}"] if lost else []
            said.append(f"{strategy} {'; '.join(parts)}.")
    if everywhere:
        verb = "trains" if len(everywhere) == 1 else "train"
        said.insert(0, f"{_list(everywhere)} {verb} with every seed at every point of the grid.")
    for place, own in _by(found, *(key for key in keys if key not in ("strategy", "learning_rate"))):
        trained = sorted((line for line in own if not line.failed), key=lambda line: line.rank)
        if len(trained) > 1:
            first, second, *_ = trained
            near = [line for line in trained[1:] if not _apart(first, line)]
            beyond = f"; {_names(near)} {'is' if len(near) == 1 else 'are'} not told apart from it" if near else ""
            best, next_ = (f"{line.values['strategy']}, {told(line.over('val_nll'))}" for line in (first, second))
            said.append(f"{place or 'Of all'}: the lowest nll is that of {best} (next {next_}){beyond}.")
    return said


def stable_told(rate: float | None, tried: Iterable[Line]) -> str:
    """The largest stable learning rate of those that were tried."""
    if rate is None:
        return "none"
    return f"{number(rate)}" + (
        " or more" if rate == max(float(line.values["learning_rate"]) for line in tried) else ""
    )


def frontier(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """The largest learning rate at which every seed trains, by strategy and depth."""
    said = []
    for strategy, own in _by(lines(rows, keys), "strategy"):
        parts = []
        for _, at_depth in _by(own, "depth"):
            stable, best = largest_stable(at_depth), min(at_depth, key=lambda line: line.rank)
            depth = best.values["depth"]
            if stable is None:
                fates = _list(dict.fromkeys(line.fate for line in at_depth if line.failed))
                parts.append(f"none at {depth} layers ({fates})")
            else:
                rate = float(best.values["learning_rate"])
                parts.append(f"{stable_told(stable, at_depth)} at {depth} layers (lowest nll at {number(rate)})")
        said.append(f"{strategy}: the largest learning rate at which every seed trains is {_list(parts)}.")
    return said


def warmup(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """How short a warm-up each placement can do with, by depth."""
    said = []
    for strategy, own in _by(at_best(lines(rows, keys)), "strategy"):
        parts = []
        for _, at_depth in _by(own, "depth"):
            depth = at_depth[0].values["depth"]
            good = [int(line.values[WARMUP]) for line in at_depth if not line.failed]
            by_length = {int(line.values[WARMUP]): line for line in at_depth}
            shortest, longest = by_length[min(by_length)], by_length[max(by_length)]
            if not good:
                parts.append(f"at {depth} layers it fails with each that was tried")
            elif min(good) == min(by_length):
                nll = f"nll {told(shortest.over('val_nll'))}, with {max(by_length)} {told(longest.over('val_nll'))}"
                least = "without" if min(by_length) <= 1 else f"with {min(by_length)}"
                parts.append(f"at {depth} layers it does {least} ({nll})")
            else:
                parts.append(f"at {depth} layers it needs {min(good)} updates")
        said.append(f"{strategy}: {'; '.join(parts)}.")
    return said


def epsilon(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Whether epsilon matters, in which precision, and where it acts."""
    said = []
    for place, own in _by(at_best(lines(rows, keys)), "strategy", PRECISION):
        trained = [line for line in own if not line.failed]
        failed = [line.values[EPSILON] for line in own if line.failed]
        parts = [f"fails at epsilon {_list(failed)}"] if failed else []
        if trained:
            best, worst = min(trained, key=lambda line: line.rank), max(trained, key=lambda line: line.rank)
            parts.append(
                f"nll from {told(best.over('val_nll'))} (epsilon {best.values[EPSILON]}) to "
                f"{told(worst.over('val_nll'))} ({worst.values[EPSILON]}), "
                + ("which the seeds do not tell apart" if not _apart(best, worst) else "more than the seeds scatter")
            )
        shares = {
            line.values[EPSILON]: max(line.means.get(f"{stack}_epsilon_share", 0.0) for stack in ("encoder", "decoder"))
            for line in own
        }
        acting = [f"{share:.0%} at {chosen}" for chosen, share in shares.items() if share >= 0.005]
        acts = f"epsilon acts at {_list(acting)} of the positions of a layer" if acting else "epsilon acts nowhere"
        said.append(f"{place}: {'; '.join([*parts, acts])}.")
    return said


def batch_norm(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Which norm trains on which batches, and how far evaluation is from training."""
    said = []
    others = [key for key in keys if key not in ("strategy", "learning_rate")]
    for place, own in _by(at_best(lines(rows, keys)), *others):
        parts = []
        for line in own:
            failed = f"fails ({line.told}), " if line.failed else ""
            nll = f"nll {told(line.over('val_nll'))}, {told(gap_of(line))} above training's"
            parts.append(f"{line.values['strategy']} {failed}{nll}")
        said.append(f"{place}: {'; '.join(parts)}.")
    return said


def gap_of(line: Line) -> Mean | None:
    """Evaluation nll less that of training, over all runs."""
    pairs = [(value(row, "val_nll"), value(row, "train_nll")) for row in line.rows]
    known = [val - train for val, train in pairs if val is not None and train is not None]
    return Mean(tuple(known)) if known else None


NEEDED = {
    "frontier": ("depth", "learning_rate"),
    "warmup": ("depth", WARMUP),
    "epsilon": (EPSILON, PRECISION),
}
"""Columns that a rule looks at beside the strategy."""

RULES: dict[str, Callable[[Sequence[Row], Sequence[str]], list[str]]] = {
    "strategies": strategies,
    "frontier": frontier,
    "warmup": warmup,
    "epsilon": epsilon,
    "batch_norm": batch_norm,
}
"""By `answer` of a study."""


def _by(found: Iterable[Line], *keys: str) -> list[tuple[str, list[Line]]]:
    """Lines by what they have in some columns, in their order, with the name of that place."""
    places: dict[tuple[str, ...], list[Line]] = {}
    for line in found:
        places.setdefault(tuple(line.values[key] for key in keys), []).append(line)
    return [(place_of(dict(zip(keys, at, strict=True))), own) for at, own in places.items()]


def _place(line: Line) -> str:
    """Where a line lies, its strategy and learning rate apart."""
    kept = {key: value for key, value in line.values.items() if key not in ("strategy", "learning_rate")}
    return place_of(kept) or "all"


def _places(found: Sequence[Line]) -> str:
    return _list(map(_place, found))


def _names(found: Sequence[Line]) -> str:
    return _list(line.values["strategy"] for line in found)


def _list(parts: Iterable[str]) -> str:
    """As one writes a list: `a, b and c`."""
    *most, last = list(parts) or ["none"]
    return f"{', '.join(most)} and {last}" if most else last


def _apart(one: Line, other: Line) -> bool:
    """Whether the nll of two lines differ by more than their intervals, paired by seed where both have it."""
    apart = paired(one.counted, other.counted, val_nll)
    return apart is not None and abs(apart.middle) > apart.half
