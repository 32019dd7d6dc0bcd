"""What popular articles say of stable Transformers, held against runs: each claim with a verdict by a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stabilize.findings import number
from stabilize.study.answer import EPSILON, PRECISION, WARMUP, gap_of, told
from stabilize.study.plan import BATCH
from stabilize.study.table import Line, Mean, Row, at_best, interval, lines, paired, val_nll, value

HOLDS, DIRECTION, NOT = "holds here", "direction right but number differs", "does not hold"
UNKNOWN = "not measured"

RULE = (
    "A number holds here where the 95 % interval over seeds of what was measured has it, and has not what would be no "
    "effect at all; the direction is right but the number differs where the mean lies on the claim's side of no "
    "effect. A statement without a number holds where all runs bear it out, and is right in direction where most do; "
    "that one is better than the other, where the interval of the difference has not zero. Of two parts, such as "
    "encoder and decoder, the one that bears the claim out less counts."
)
"""How a verdict is reached, for readers."""

STACKS = ("encoder", "decoder")
RATE = "0.001"
"""The learning rate at which gradients are compared: they change with it."""


@dataclass(frozen=True)
class Found:
    """What runs say of a claim."""

    measured: str
    verdict: str


@dataclass(frozen=True)
class Claim:
    """A claim, and how it is held against runs."""

    letter: str
    said: str
    literature: str
    look: Callable[[Runs], Found]


@dataclass(frozen=True)
class Judged:
    """A claim with what was found."""

    letter: str
    said: str
    measured: str
    literature: str
    verdict: str


class MissingError(Exception):
    """Runs that a claim needs are not there."""


class Runs:
    """The rows of a study and of those whose runs it has too.

    Args:
        rows: of results.csv; the column `study` says whose grid a row belongs to.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def of(self, study: str, **values: str) -> list[Row]:
        """The rows of one study that have these values.

        Raises:
            MissingError: there is none.
        """
        found = [
            row
            for row in self.rows
            if row["study"] == study and all(row.get(key) == wanted for key, wanted in values.items())
        ]
        if not found:
            raise MissingError(f"study {study}, {', '.join(values.values())}")
        return found

    def some(self, study: str, wanted: Callable[[Row], bool], **values: str) -> list[Row]:
        """Those of `of` that are wanted.

        Raises:
            MissingError: there is none.
        """
        found = [row for row in self.of(study, **values) if wanted(row)]
        if not found:
            raise MissingError(f"study {study}, {', '.join(values.values())}, at some points")
        return found

    def line(self, study: str, **values: str) -> Line:
        """The rows of a point of the grid, at the best learning rate where there are several."""
        (line,) = at_best(lines(self.of(study, **values), [*values, "learning_rate"]))
        return line


def judge(rows: Sequence[Row]) -> list[Judged]:
    """Every claim with its verdict."""
    runs, judged = Runs(rows), []
    for claim in CLAIMS:
        try:
            found = claim.look(runs)
        except MissingError as missing:
            found = Found(f"no runs: {missing}", UNKNOWN)
        judged.append(Judged(claim.letter, claim.said, found.measured, claim.literature, found.verdict))
    return judged


def by_number(mean: Mean | None, claimed: tuple[float, float], nothing: float) -> str:
    """The verdict on a number.

    Args:
        mean: what was measured.
        claimed: the lowest and highest that the claim allows.
        nothing: what would be no effect.
    """
    if mean is None:
        return UNKNOWN
    low, high = claimed
    if mean.low <= high and low <= mean.high and not mean.low <= nothing <= mean.high:
        return HOLDS
    return DIRECTION if (mean.middle - nothing) * (low - nothing) > 0 else NOT


def by_counts(*parts: tuple[int, int]) -> str:
    """The verdict on statements that runs bear out or not: (how many do, of how many), each by itself."""
    if all(right == all_ for right, all_ in parts):
        return HOLDS
    return DIRECTION if all(2 * right > all_ for right, all_ in parts) else NOT


def by_difference(mean: Mean | None) -> str:
    """The verdict on a difference that is to be above zero and has no number."""
    if mean is None or mean.half == math.inf:
        return UNKNOWN
    return HOLDS if mean.low > 0 else DIRECTION if mean.middle > 0 else NOT


def least(*verdicts: str) -> str:
    """Of several parts the verdict on the one that bears the claim out least."""
    return next(verdict for verdict in (UNKNOWN, NOT, DIRECTION, HOLDS) if verdict in verdicts)


def failures(rows: Sequence[Row]) -> int:
    """How many did not train."""
    return Line({}, tuple(rows)).failed


def share(rows: Sequence[Row]) -> str:
    """How many of so many did not train, with the interval of the share."""
    low, high = interval(failures(rows), len(rows))
    return f"{failures(rows)} of {len(rows)} fail ({low:.0%} to {high:.0%})"


def logarithms(rows: Sequence[Row], column: str) -> Mean | None:
    """The mean of a column's logarithm to base ten; a ratio of zero counts as the smallest float."""
    known = [math.log10(max(found, 1e-45)) for row in rows if (found := value(row, column)) is not None]
    return Mean(tuple(known)) if known else None


def ratio_told(mean: Mean | None) -> str:
    """A mean of logarithms as the number with its interval."""
    if mean is None:
        return "no number"
    low, middle, high = (10.0**power for power in (mean.low, mean.middle, mean.high))
    return f"{number(middle)} ({number(low)} to {number(high)})"


def gradient_ratio(strategy: str, study: str, depth: str, claimed: float) -> Callable[[Runs], Found]:
    """How a claim is measured on the gradient that reaches the first layer, at the first record of training."""

    def look(runs: Runs) -> Found:
        rows = runs.of(study, strategy=strategy, depth=depth, learning_rate=RATE)
        found = {stack: logarithms(rows, f"{stack}_gradient_ratio_first") for stack in STACKS}
        verdict = least(*(by_number(mean, (math.log10(claimed),) * 2, 0.0) for mean in found.values()))
        said = ", ".join(f"{stack} {ratio_told(mean)}" for stack, mean in found.items())
        return Found(f"layer 1 over layer {depth}, first record, learning rate {RATE}: {said}", verdict)

    return look


def nothing_trains_without_residuals(runs: Runs) -> Found:
    """Claim a, second half."""
    shallow = runs.of("claims", strategy="no_residual", depth="4")
    deep = runs.some("claims", lambda row: int(row["depth"]) > 4, strategy="no_residual")
    said = f"12 and 16 layers: {share(deep)}; 4: {share(shallow)}"
    return Found(said, by_counts((failures(deep), len(deep))))


def unstable_without_warmup(runs: Runs) -> Found:
    """Claim b, second half: without warm-up it trains up to 6 layers, beyond it does not, and does with the longest."""
    rows = runs.of("warmup", strategy="post_ln")
    lengths = sorted({int(row[WARMUP]) for row in rows})
    shortest, longest = str(lengths[0]), str(lengths[-1])

    def at_best_of(warmup: str, beyond: bool) -> list[Row]:
        some = runs.some(
            "warmup", lambda row: (int(row["depth"]) > 6) == beyond, strategy="post_ln", **{WARMUP: warmup}
        )
        return [row for line in at_best(lines(some, ["depth", "learning_rate"])) for row in line.rows]

    shallow, deep, careful = at_best_of(shortest, False), at_best_of(shortest, True), at_best_of(longest, True)
    said = (
        f"warm-up of {shortest}: up to 6 layers {share(shallow)}, beyond {share(deep)}; of {longest}: beyond "
        f"{share(careful)}"
    )
    verdict = by_counts((len(shallow) - failures(shallow), len(shallow)), (failures(deep), len(deep)))
    return Found(said, DIRECTION if verdict == HOLDS and failures(careful) else verdict)


def similarity(strategy: str, claimed: float) -> Callable[[Runs], Found]:
    """Claim c: the mean cosine of neighbouring layers at 12 layers; right in direction where pre-norm's is larger."""

    def look(runs: Runs) -> Found:
        pre, post = (runs.line("depth", strategy=name, depth="12") for name in ("pre_ln", "post_ln"))
        mine = pre if strategy == "pre_ln" else post
        verdicts, said = [], []
        for stack in STACKS:
            mean, column = mine.over(f"{stack}_similarity"), f"{stack}_similarity"
            said.append(f"{stack} {told(mean)} (centred {told(mine.over(f'{column}_centered'))})")
            larger = pre.mean(column) > post.mean(column)
            has_it = mean is not None and mean.half < math.inf and mean.low <= claimed <= mean.high
            verdicts.append(HOLDS if larger and has_it else DIRECTION if larger else NOT)
        return Found(f"{'; '.join(said)}; {share(mine.rows)}", least(*verdicts))

    return look


def collapse(runs: Runs) -> Found:
    """Claim c, last part: the share of layers that nobody would miss, of both stacks of pre-norm."""
    line = runs.line("depth", strategy="pre_ln", depth="18")

    def unused(*stacks: str) -> Mean | None:
        columns = [f"{stack}_effective_depth" for stack in stacks]
        depths = [[value(row, column) for column in columns] for row in line.counted]
        known = [[depth for depth in some if depth is not None] for some in depths if None not in some]
        return Mean(tuple(1 - sum(some) / (18 * len(stacks)) for some in known)) if known else None

    mean = unused(*STACKS)
    each = ", ".join(f"{stack} {told(unused(stack))}" for stack in STACKS)
    said = f"of 18+18 layers, a share of {told(mean)} costs below 0.01 nats each ({each})"
    return Found(said, by_number(mean, (0.01, 0.4), 0.0))


def b2t_where_post_fails(runs: Runs) -> Found:
    """Claim d, first half: post-norm with the warm-up that is best for it."""
    b2t, *post = (runs.line("claims", strategy=name, depth="16") for name in ("b2t", "post_ln", "post_ln+warmup"))
    best = min(post, key=lambda line: line.rank)
    said = f"B2T: {share(b2t.rows)}; post-norm ({best.values['strategy']}): {share(best.rows)}"
    return Found(said, by_counts((b2t.runs - b2t.failed, b2t.runs), (best.failed, best.runs)))


def b2t_beats_pre(runs: Runs) -> Found:
    """Claim d, second half."""
    b2t, pre = (runs.line("claims", strategy=name, depth="16") for name in ("b2t", "pre_ln"))
    lower = paired(pre.rows, b2t.rows, val_nll)
    bleus = f"BLEU {told(b2t.over('test_bleu'))} and {told(pre.over('test_bleu'))}"
    return Found(f"nll of pre-norm less that of B2T: {told(lower)}; {bleus}", by_difference(lower))


def optimum(rows: Sequence[Row]) -> float | None:
    """The logarithm of the learning rate at which a parabola through the lowest nll and its neighbours is lowest; none
    where the lowest is at the edge of those that were tried."""
    known = sorted((math.log(float(row["learning_rate"])), value(row, "val_nll")) for row in rows)
    points = [(rate, nll) for rate, nll in known if nll is not None]
    lowest = min(range(len(points)), key=lambda k: points[k][1], default=0)
    if not 0 < lowest < len(points) - 1:
        return None
    (x0, y0), (x1, y1), (x2, y2) = points[lowest - 1 : lowest + 2]
    slopes = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    return (x0 + x1) / 2 - slopes[0] * (x2 - x0) / 2 / (slopes[1] - slopes[0])


def larger_learning_rate(runs: Runs) -> Found:
    """Claim e, first half: at 3 layers, where both train."""
    best: dict[str, dict[str, float]] = {}
    for strategy in ("pre_ln", "post_ln"):
        by_seed: dict[str, list[Row]] = {}
        for row in runs.of("frontier", strategy=strategy, depth="3"):
            by_seed.setdefault(row["seed"], []).append(row)
        found = {seed: optimum(own) for seed, own in by_seed.items()}
        best[strategy] = {seed: rate for seed, rate in found.items() if rate is not None}
    both = [best["pre_ln"][seed] - best["post_ln"][seed] for seed in best["pre_ln"] if seed in best["post_ln"]]
    if not both:
        return Found("the best learning rate is at the edge of those that were tried", UNKNOWN)
    mean = Mean(tuple(both))
    low, middle, high = (math.exp(power) for power in (mean.low, mean.middle, mean.high))
    said = (
        f"best learning rate over post-norm's at 3 layers, {len(both)} seeds: {number(middle)} ({number(low)} to "
        f"{number(high)})"
    )
    return Found(said, by_number(mean, (math.log(1.2), math.log(1.3)), 0.0))


def pre_norm_needs_no_warmup(runs: Runs) -> Found:
    """Claim e, second half."""
    rows = runs.of("warmup", strategy="pre_ln")
    shortest = str(min(int(row[WARMUP]) for row in rows))
    best = at_best(lines([row for row in rows if row[WARMUP] == shortest], ["depth", "learning_rate"]))
    bare = [row for line in best for row in line.rows]
    return Found(
        f"warm-up of {shortest}, 3 to 12 layers: {share(bare)}", by_counts((len(bare) - failures(bare), len(bare)))
    )


def rsqrt2(runs: Runs) -> Found:
    """Claim f: whether runs that fail without 1/sqrt(2) on every sum train with it."""
    said, verdicts = [], []
    for plain, scaled in (("pre_ln", "pre_ln_rsqrt2"), ("post_ln", "residual_rsqrt2")):
        without, with_it = (
            runs.some("claims", lambda row: row["depth"] in ("12", "16"), strategy=name) for name in (plain, scaled)
        )
        diverged = [sum(row["outcome"] == "diverged" for row in rows) for rows in (with_it, without)]
        nll = " and ".join(told(Line({}, tuple(rows)).over("val_nll")) for rows in (with_it, without))
        said.append(
            f"{scaled}: {share(with_it)}, {diverged[0]} diverged; {plain}: {share(without)}, {diverged[1]} diverged; "
            f"nll {nll}"
        )
        bounds = [interval(failures(rows), len(rows)) for rows in (with_it, without)]
        if failures(with_it) > failures(without):
            verdicts.append(NOT)
        elif failures(without):
            fewer = bounds[0][1] < bounds[1][0]
            verdicts.append(HOLDS if fewer and not failures(with_it) else DIRECTION if fewer else NOT)
    verdict = least(*verdicts) if verdicts else UNKNOWN
    return Found(f"12 and 16 layers, all rates: {'; '.join(said)}" + ("" if verdicts else " (nothing fails)"), verdict)


def epsilon_by_format(runs: Runs) -> Found:
    """Claim g: whether another epsilon is best in another format, by more than seeds scatter."""
    said, matters, best = [], [], dict[str, list[str]]()
    for precision in ("32-true", "bf16-mixed"):
        rows = runs.some("epsilon", lambda row: float(row[EPSILON]) <= 1e-5, **{PRECISION: precision})
        for strategy in dict.fromkeys(row["strategy"] for row in rows):
            found = lines([row for row in rows if row["strategy"] == strategy], [EPSILON])
            good, bad = min(found, key=lambda line: line.rank), max(found, key=lambda line: line.rank)
            spread = paired(bad.rows, good.rows, val_nll)
            best.setdefault(strategy, []).append(good.values[EPSILON])
            matters.append(by_difference(spread) == HOLDS or bad.failed > good.failed)
            said.append(
                f"{strategy}, {precision}: {told(spread)} between worst ({bad.values[EPSILON]}) and best "
                f"({good.values[EPSILON]})"
            )
    differs = [len(set(chosen)) > 1 for chosen in best.values()]
    verdict = NOT if not any(matters) else HOLDS if all(matters) and all(differs) else DIRECTION
    return Found(f"nll from 1e-5 to 1e-12: {'; '.join(said)} (no float16 on a CPU)", verdict)


def at_depths(runs: Runs, depths: Sequence[str], *strategies: str) -> list[Line]:
    """A strategy at its best at each depth; of several, the one that is best there."""
    each = [[runs.line("depth", strategy=name, depth=depth) for name in strategies] for depth in depths]
    return [min(found, key=lambda line: line.rank) for found in each]


def fates(found: Sequence[Line]) -> str:
    """What became of lines at several depths, in words."""
    places = [f"{line.values['strategy']}, {line.values['depth']} layers" for line in found]
    nll = [told(line.over("val_nll")) for line in found]
    return "; ".join(f"{at}: {share(line.rows)}, nll {its}" for at, line, its in zip(places, found, nll, strict=True))


def fine_below_twelve(runs: Runs) -> Found:
    """Claim h, first part: it trains, and is no worse than pre-norm."""
    post, pre = (at_depths(runs, ("3", "6"), name) for name in ("post_ln", "pre_ln"))
    worse = [paired(mine.rows, its.rows, val_nll) for mine, its in zip(post, pre, strict=True)]
    verdict = by_counts(*((line.runs - line.failed, line.runs) for line in post))
    if verdict == HOLDS and any(by_difference(mean) == HOLDS for mean in worse):
        verdict = DIRECTION
    more = ", ".join(told(mean) for mean in worse)
    return Found(f"{fates(post)}; nll above that of pre-norm: {more}", verdict)


def fails_from_twelve(runs: Runs) -> Found:
    """Claim h: post-norm with the warm-up that is best for it."""
    found = at_depths(runs, ("12", "18"), "post_ln", "post_ln+warmup")
    return Found(fates(found), by_counts(*((line.failed, line.runs) for line in found)))


def beyond_twelve(runs: Runs) -> Found:
    """Claim h, last part."""
    found = [line for name in ("pre_ln", "b2t") for line in at_depths(runs, ("12", "18"), name)]
    return Found(fates(found), by_counts(*((line.runs - line.failed, line.runs) for line in found)))


def batch_of_one(runs: Runs) -> Found:
    """Claim i, first half: where batch norm fails, layer norm has to train, or else the runs are too short to tell."""
    batch, layer = (runs.of("batchnorm", **{"strategy": name, BATCH: "1"}) for name in ("masked_batch_norm", "pre_ln"))
    each = [
        f"{name}: {share(rows)}, nll {told(Line({}, tuple(rows)).over('val_nll'))}"
        for name, rows in (("batch norm", batch), ("layer norm", layer))
    ]
    verdict = by_counts((failures(batch), len(batch)), (len(layer) - failures(layer), len(layer)))
    return Found("; ".join(each), UNKNOWN if 2 * failures(layer) > len(layer) else verdict)


def training_against_evaluation(runs: Runs) -> Found:
    """Claim i, second half: evaluation nll less training's, which are of other text, so that layer norm's on the same
    batches is taken off."""

    def gap(row: Row) -> float | None:
        one = gap_of(Line({}, (row,)))
        return None if one is None else one.middle

    batch, layer = (runs.of("batchnorm", strategy=name) for name in ("masked_batch_norm", "pre_ln"))
    gaps = [gap_of(Line({}, tuple(rows))) for rows in (batch, layer)]
    more = paired(batch, layer, gap, ["seed", *(key for key in batch[0] if key.startswith("data."))])
    said = (
        f"evaluation nll less training's: batch norm {told(gaps[0])}, layer norm {told(gaps[1])}, paired {told(more)}"
    )
    return Found(said, by_difference(more))


CLAIMS = (
    Claim(
        "a1",
        "without residuals the gradient falls to 5 % after 12 layers",
        "no source for 5 %; attention alone loses rank doubly exponentially (arXiv:2103.03404)",
        gradient_ratio("no_residual", "claims", "12", 0.05),
    ),
    Claim(
        "a2",
        "without residuals nothing beyond 4 layers trains",
        "no source; plausible",
        nothing_trains_without_residuals,
    ),
    Claim(
        "b1",
        "post-norm beyond 12 layers gives 0.0002 in the first layer against 0.02 in the twelfth",
        "theory: a ninth, not a hundredth, over 11 layers (arXiv:2002.04745)",
        gradient_ratio("post_ln", "depth", "12", 0.01),
    ),
    Claim(
        "b2",
        "post-norm is unstable beyond six or seven layers without careful warm-up",
        "6 layers train, 12 and 18 fail (arXiv:2012.11747, arXiv:2206.00330)",
        unstable_without_warmup,
    ),
    Claim(
        "c1",
        "similarity between layers is 0.87 under pre-norm",
        "no such pair found; angular distances below 0.2 in deep language models (arXiv:2502.05795)",
        similarity("pre_ln", 0.87),
    ),
    Claim(
        "c2",
        "similarity between layers is 0.63 under post-norm",
        "no such pair found",
        similarity("post_ln", 0.63),
    ),
    Claim(
        "c3",
        "the collapse costs up to 40 % of the depth",
        "nearly half of the layers of language models (arXiv:2502.05795)",
        collapse,
    ),
    Claim(
        "d1",
        "with 16 layers B2T trains where post-norm does not converge",
        "so with 18 layers (arXiv:2206.00330)",
        b2t_where_post_fails,
    ),
    Claim(
        "d2",
        "with 16 layers B2T beats pre-norm",
        "with 18 layers 28.48 BLEU against 27.36 (arXiv:2206.00330)",
        b2t_beats_pre,
    ),
    Claim(
        "e1",
        "pre-norm wants a learning rate 20 to 30 % higher than post-norm",
        "the papers take the same for both; pre-norm bears larger ones (arXiv:2002.04745)",
        larger_learning_rate,
    ),
    Claim("e2", "pre-norm needs no warm-up", "so in arXiv:2002.04745", pre_norm_needs_no_warmup),
    Claim(
        "f",
        "1/√2 on every residual sum keeps deep networks from exploding",
        "so in convolutional models (arXiv:1705.03122); nothing before a norm, and a skip of 2e-4 after 12 layers",
        rsqrt2,
    ),
    Claim(
        "g",
        "epsilon between 1e-5 and 1e-12 depends on FP16 or BF16",
        "where statistics are computed in float32 the format matters little",
        epsilon_by_format,
    ),
    Claim(
        "h1",
        "post-norm is fine below 12 layers",
        "6 layers train; 10 and more are unstable (arXiv:2206.00330)",
        fine_below_twelve,
    ),
    Claim(
        "h2",
        "from 12 layers post-norm fails",
        "12 fail in arXiv:2012.11747; Admin and DeepNorm are post-norm and train 100 and 1,000",
        fails_from_twelve,
    ),
    Claim("h3", "from 12 layers pre-norm or B2T train", "so, and others beside them", beyond_twelve),
    Claim("i1", "batch normalisation fails on a batch of one, layer normalisation does not", "textbooks", batch_of_one),
    Claim(
        "i2",
        "batch normalisation differs between training and evaluation, layer normalisation does not",
        "so for translation in arXiv:2003.07845",
        training_against_evaluation,
    ),
)
