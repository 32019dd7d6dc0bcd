"""What popular articles say of stable Transformers, held against runs: each claim with a verdict by a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stabilize.findings import number
from stabilize.study.answer import EPSILON, PRECISION, WARMUP, gap_of, told
from stabilize.study.table import Line, Mean, Row, at_best, interval, lines, value

HOLDS, DIRECTION, NOT = "holds here", "direction right but number differs", "does not hold"
UNKNOWN = "not measured"

RULE = (
    "A number holds here where the 95 % interval of what was measured has it, and has not what would be no effect at "
    "all; the direction is right but the number differs where the mean lies on the claim's side of no effect. A "
    "statement without a number holds where all runs bear it out, and is right in direction where most do."
)
"""How a verdict is reached, for readers."""

STACKS = ("encoder", "decoder")


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


def share(failed: int, runs: int) -> str:
    """So many of so many, with the interval of the share."""
    low, high = interval(failed, runs)
    return f"{failed} of {runs} fail ({low:.0%} to {high:.0%})"


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
    """How a claim is measured on the gradient that reaches the first layer when training begins."""

    def look(runs: Runs) -> Found:
        rows = runs.of(study, strategy=strategy, depth=depth)
        found = {stack: logarithms(rows, f"{stack}_gradient_ratio_first") for stack in STACKS}
        verdicts = [by_number(mean, (math.log10(claimed),) * 2, 0.0) for mean in found.values()]
        said = ", ".join(f"{stack} {ratio_told(mean)}" for stack, mean in found.items())
        best = next(verdict for verdict in (HOLDS, DIRECTION, NOT, UNKNOWN) if verdict in verdicts)
        return Found(f"layer 1 over layer {depth}, first record: {said}", best)

    return look


def nothing_trains_without_residuals(runs: Runs) -> Found:
    """Claim a, second half."""
    shallow = runs.of("claims", strategy="no_residual", depth="4")
    deep = [row for row in runs.of("claims", strategy="no_residual") if int(row["depth"]) > 4]
    failed = [sum(row["outcome"] != "trained" for row in rows) for rows in (shallow, deep)]
    said = f"4 layers: {share(failed[0], len(shallow))}; 12 and 16: {share(failed[1], len(deep))}"
    some = min(len(shallow) - failed[0], 1)
    return Found(said, by_counts((some, 1), (failed[1], len(deep))))


def unstable_without_warmup(runs: Runs) -> Found:
    """Claim b, second half."""
    rows = runs.of("warmup", strategy="post_ln")
    shortest = min((row[WARMUP] for row in rows), key=int)
    bare = [row for row in rows if row[WARMUP] == shortest]
    shallow, deep = ([row for row in bare if (int(row["depth"]) > 6) == beyond] for beyond in (False, True))
    trained, failed = (
        sum((row["outcome"] == "trained") == good for row in part) for part, good in ((shallow, True), (deep, False))
    )
    said = (
        f"warm-up of {shortest}: up to 6 layers {share(len(shallow) - trained, len(shallow))}, beyond "
        f"{share(failed, len(deep))}"
    )
    return Found(said, by_counts((trained, len(shallow)), (failed, len(deep))))


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
            has_it = mean is not None and mean.low <= claimed <= mean.high
            verdicts.append(HOLDS if larger and has_it else DIRECTION if larger else NOT)
        return Found("; ".join(said), next(verdict for verdict in (HOLDS, DIRECTION, NOT) if verdict in verdicts))

    return look


def collapse(runs: Runs) -> Found:
    """Claim c, last part: the share of layers that nobody would miss, of both stacks of pre-norm."""
    line = runs.line("depth", strategy="pre_ln", depth="18")
    unused = []
    for row in line.counted:
        depths = [value(row, f"{stack}_effective_depth") for stack in STACKS]
        unused += [1 - sum(depth for depth in depths if depth is not None) / 36] if None not in depths else []
    mean = Mean(tuple(unused)) if unused else None
    return Found(f"of 18+18 layers, {told(mean)} of all cost below 0.01 nats", by_number(mean, (0.3, 0.4), 0.0))


def b2t_where_post_fails(runs: Runs) -> Found:
    """Claim d, first half."""
    b2t, post = (runs.line("claims", strategy=name, depth="16") for name in ("b2t", "post_ln"))
    said = f"B2T: {share(b2t.failed, b2t.runs)}; post-norm: {share(post.failed, post.runs)}"
    return Found(said, by_counts((b2t.runs - b2t.failed, b2t.runs), (post.failed, post.runs)))


def b2t_beats_pre(runs: Runs) -> Found:
    """Claim d, second half: a difference has no number here, so that its interval has to lie on one side."""
    b2t, pre = (runs.line("claims", strategy=name, depth="16") for name in ("b2t", "pre_ln"))
    seeds = [{row["seed"]: value(row, "val_nll") for row in line.rows} for line in (b2t, pre)]
    pairs = [(one, seeds[1].get(seed)) for seed, one in seeds[0].items()]
    known = [one - other for one, other in pairs if one is not None and other is not None]
    difference = Mean(tuple(known or [math.nan]))
    bleus = f"BLEU {told(b2t.over('test_bleu'))} and {told(pre.over('test_bleu'))}"
    verdict = HOLDS if difference.high < 0 else DIRECTION if difference.middle < 0 else NOT
    return Found(f"nll of B2T less that of pre-norm: {told(difference)}; {bleus}", verdict)


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
    said = f"best learning rate over post-norm's at 3 layers: {number(middle)} ({number(low)} to {number(high)})"
    return Found(said, by_number(mean, (math.log(1.2), math.log(1.3)), 0.0))


def pre_norm_needs_no_warmup(runs: Runs) -> Found:
    """Claim e, second half."""
    rows = runs.of("warmup", strategy="pre_ln")
    shortest = min((row[WARMUP] for row in rows), key=int)
    bare = [row for row in rows if row[WARMUP] == shortest]
    trained = sum(row["outcome"] == "trained" for row in bare)
    said = f"warm-up of {shortest}, 3 to 12 layers: {share(len(bare) - trained, len(bare))}"
    return Found(said, by_counts((trained, len(bare))))


def rsqrt2(runs: Runs) -> Found:
    """Claim f: whether fewer runs fail with 1/sqrt(2) on every sum than without."""
    said, better, worse = [], 0, 0
    for plain, scaled in (("pre_ln", "pre_ln_rsqrt2"), ("post_ln", "residual_rsqrt2")):
        for depth in ("12", "16"):
            one, other = (runs.line("claims", strategy=name, depth=depth) for name in (plain, scaled))
            better, worse = better + (other.failed < one.failed), worse + (other.failed > one.failed)
            fates = f"{other.failed} of {other.runs} fail, without {one.failed} of {one.runs}"
            said.append(f"{scaled}, {depth} layers: {fates}, nll {told(other.over('val_nll'))}")
    return Found("; ".join(said), HOLDS if better and not worse else DIRECTION if better > worse else NOT)


def epsilon_by_format(runs: Runs) -> Found:
    """Claim g: whether what is best differs between formats by more than seeds scatter."""
    said, best, matters = [], [], []
    for precision in ("32-true", "bf16-mixed"):
        rows = [row for row in runs.of("epsilon", **{PRECISION: precision}) if float(row[EPSILON]) <= 1e-5]
        for strategy in dict.fromkeys(row["strategy"] for row in rows):
            found = lines([row for row in rows if row["strategy"] == strategy], [EPSILON])
            good, bad = min(found, key=lambda line: line.rank), max(found, key=lambda line: line.rank)
            spread, noise = bad.mean("val_nll") - good.mean("val_nll"), max(_half(good), _half(bad))
            best.append(good.values[EPSILON])
            matters.append(spread > noise or bad.failed > good.failed)
            said.append(f"{strategy}, {precision}: {number(spread)} between best and worst, seeds ± {number(noise)}")
    verdict = NOT if not any(matters) else HOLDS if len(set(best)) > 1 and all(matters) else DIRECTION
    return Found(f"nll from 1e-5 to 1e-12: {'; '.join(said)} (no float16 on a CPU)", verdict)


def _half(line: Line) -> float:
    mean = line.over("val_nll")
    return math.inf if mean is None else mean.half


def fails_at(strategy: str, depths: Sequence[str], wanted: bool) -> Callable[[Runs], Found]:
    """Claim h: whether a strategy, at its best, fails or trains at some depths."""

    def look(runs: Runs) -> Found:
        found = [runs.line("depth", strategy=strategy, depth=depth) for depth in depths]
        said = "; ".join(f"{line.values['depth']} layers: {share(line.failed, line.runs)}" for line in found)
        right = [(line.failed if wanted else line.runs - line.failed, line.runs) for line in found]
        return Found(f"{strategy}, {said}", by_counts(*right))

    return look


def beyond_twelve(runs: Runs) -> Found:
    """Claim h, second half."""
    parts = [fails_at(name, ("12", "18"), wanted=False)(runs) for name in ("pre_ln", "b2t")]
    worst = next(verdict for verdict in (NOT, DIRECTION, HOLDS) if verdict in {part.verdict for part in parts})
    return Found("; ".join(part.measured for part in parts), worst)


def batch_of_one(runs: Runs) -> Found:
    """Claim i, first half: where batch norm fails, layer norm has to train."""
    batch, layer = (_batches(runs, strategy, "1") for strategy in ("masked_batch_norm", "pre_ln"))
    failed = [sum(row["outcome"] != "trained" for row in rows) for rows in (batch, layer)]
    nll = [told(Line({}, tuple(rows)).over("val_nll")) for rows in (batch, layer)]
    shares = [share(bad, len(rows)) for bad, rows in zip(failed, (batch, layer), strict=True)]
    said = f"batch norm: {shares[0]}, nll {nll[0]}; layer norm: {shares[1]}, nll {nll[1]}"
    return Found(said, by_counts((failed[0], len(batch)), (len(layer) - failed[1], len(layer))))


def _batches(runs: Runs, strategy: str, tokens: str) -> list[Row]:
    return runs.of("batchnorm", **{"strategy": strategy, "data.init_args.batch_tokens": tokens})


def training_against_evaluation(runs: Runs) -> Found:
    """Claim i, second half: evaluation nll less training's, over all batches, against layer norm's of the same runs."""
    gaps = {}
    for strategy in ("masked_batch_norm", "pre_ln"):
        gaps[strategy] = gap_of(Line({}, tuple(runs.of("batchnorm", strategy=strategy))))
    batch, layer = gaps["masked_batch_norm"], gaps["pre_ln"]
    if batch is None or layer is None:
        return Found("no number", UNKNOWN)
    verdict = HOLDS if batch.low > max(0.0, layer.high) else DIRECTION if batch.middle > layer.middle else NOT
    return Found(f"evaluation nll less training's: batch norm {told(batch)}, layer norm {told(layer)}", verdict)


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
        fails_at("post_ln", ("3", "6"), wanted=False),
    ),
    Claim(
        "h2",
        "from 12 layers post-norm fails",
        "12 fail in arXiv:2012.11747; Admin and DeepNorm are post-norm and train 100 and 1,000",
        fails_at("post_ln", ("12", "18"), wanted=True),
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
