"""What the numbers of a run say, in plain sentences: what was seen, where, since when, and what the literature offers.

Every threshold stands here. They are drawn where the published theory and this project's own runs leave room: between
12+12 layers that trained (a ratio of 0.07 to 9 at every record) and those that did not (7e-7, falling).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

VANISHING = 1e-2
"""Gradient of a layer over the last layer's. Post-norm theory gives (2/3)^((L-1)/2): 0.1 at 12 layers, 0.03 at 18."""

EXPLODING = 1e2
"""The same the other way round. Pre-norm's first layers get a few times the last one's once it is trained."""

ALIKE = 0.99
"""Mean cosine between the outputs of neighbouring layers, after the mean over tokens is taken off."""

COLLAPSED = 0.02
"""Entropy of a layer's attention over the largest that is possible: all heads look at single tokens."""

DROWNED = 0.1
"""Share of positions whose variance is within ten times epsilon, so that epsilon takes part in the norm's output."""

ABOVE_START = 1.0
"""Training nll this many nats above the first one recorded has diverged. Batches differ by less, also in a run that
goes on from a checkpoint and starts low."""

STUCK_FALL = 0.01
"""Share by which nll falls at least, from the third to the fourth quarter of the run so far, where a run learns."""

STUCK_RECORDS, STUCK_UPDATES = 12, 300
"""Before this many records and updates nothing is called stuck."""

STUCK_LEVEL, STUCK_ENTROPY = 0.5, 0.9
"""A run that no longer falls is stuck only where nll is still above this share of where it began, or of the entropy of
single words where that is known. Below it has converged."""

REMEDIES = {
    "diverged": "a longer warm-up, a lower peak (model.optimizer) or model.clipping: GlobalNorm (arXiv:1211.5063) or "
    "ZClip (arXiv:2504.02507) help; where attention logits grow, QKNorm (arXiv:2302.05442)",
    "stuck": "a stabiliser whose gradient reaches the first layers (PreNorm, arXiv:2002.04745; B2T, arXiv:2206.00330; "
    "DeepNorm, arXiv:2203.00555) or a longer warm-up gets a deep stack moving",
    "vanishing": "B2T (arXiv:2206.00330), PreNorm (arXiv:2002.04745) or DeepNorm (arXiv:2203.00555) keep it near one",
    "exploding": "DS-Init (DepthScaled, arXiv:1908.11365), DeepNorm (arXiv:2203.00555) or NormFormer "
    "(arXiv:2110.09456) even it out, and model.clipping bounds the step",
    "lost update": "under 16-mixed the loss scale comes down and training goes on; in any other precision the weights "
    "are lost, and spike_guard.policy: skip, a lower peak or a longer warm-up help",
    "jumped": "model.clipping: ZClip (arXiv:2504.02507) or AdaptiveClipping (arXiv:2102.06171), a longer warm-up or a "
    "lower peak smooth such jumps",
    "collapsed": "SigmaReparam (arXiv:2303.06296) and QKNorm (arXiv:2302.05442) keep attention from it",
    "drowned": "a smaller epsilon (model.stabilizer.epsilon) or embeddings of a larger scale help",
    "alike": "DeepNorm begins like this by design; where it stays, depth is paid for and not used, and "
    "LayerNorm scaling (arXiv:2502.05795) or a placement that normalises the stream (B2T, arXiv:2206.00330) help",
}
"""What the literature offers, by rule."""

GRAVE = ("diverged", "stuck", "vanishing", "exploding")
"""Rules that make the verdict, gravest first; the others are worth a look."""

LAYER = re.compile(r"(\w+)/(\w+)/layer_(\d+)")
PROFILES = {
    "gradient_ratio": "{stack} layer {layer} receives {value} of the gradient of {last}",
    "activation_gradient_ratio": "the output of {stack} layer {layer} receives {value} of the gradient of {last}",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was seen, in words."""

    rule: str
    where: str
    """The stack, or nothing where it is about the whole run."""
    sentence: str
    """What was seen, with the number of the worst record."""
    size: float
    """How bad the worst record was; comparable within a rule."""
    first: int
    """The update at which it was first seen."""
    last: int
    """The update at which it was last seen."""
    passed: bool = False
    """A later record no longer showed it."""

    @property
    def remedy(self) -> str:
        """What the literature offers."""
        return REMEDIES[self.rule]

    @property
    def grave(self) -> bool:
        """Whether a run that shows this is not healthy."""
        return self.rule in GRAVE

    @property
    def when(self) -> str:
        """From which update to which."""
        if not self.passed:
            return f"since update {self.first:,}"
        return f"update {self.first:,}" + (f" to {self.last:,}" if self.last > self.first else "") + ", then passed"

    def __str__(self) -> str:
        return f"{self.sentence}; {self.remedy}"


class Sign(NamedTuple):
    """What one record says on one rule in one place."""

    rule: str
    where: str
    bad: bool
    size: float
    sentence: str


@dataclass
class Diary:
    """Takes in the records of a run one after the other, and keeps what they say.

    Args:
        entropy: of single target words in the training text, nats a token: what a model that knows word frequencies
            and nothing of the source pays. None: unknown.
    """

    entropy: float | None = None
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    losses: list[tuple[int, float]] = field(default_factory=list)
    best: dict[str, tuple[float, int]] = field(default_factory=dict)
    worst: tuple[float, str] | None = None
    """The gradient ratio farthest from one, and which it was."""
    told: dict[str, float] = field(default_factory=dict)
    """The last of what the spike guard counts, by key."""
    measured: bool = False
    """Whether any record had a gradient ratio."""
    update: int = 0

    def add(self, update: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Take in the numbers of an update, by key; what they show for the first time."""
        self.update = max(self.update, update)
        self._remember(update, metrics)
        new = []
        for sign in signs(self, metrics):
            before = self.findings.get((sign.rule, sign.where))
            if sign.bad:
                since = update if sign.rule != "diverged" else int(metrics.get("stability/diverged_at", update))
                found = Finding(sign.rule, sign.where, sign.sentence, sign.size, since, update)
                if before is None:
                    new.append(found)
                else:
                    worse = found if sign.size >= before.size else before
                    found = dataclasses.replace(worse, first=before.first, last=update, passed=False)
                self.findings[sign.rule, sign.where] = found
            elif before is not None:
                self.findings[sign.rule, sign.where] = dataclasses.replace(before, passed=True)
        return new

    def state_dict(self) -> dict[str, Any]:
        """All that was taken in, in plain values; the entropy is the text's."""
        state = {name: copy.copy(value) for name, value in vars(self).items() if name != "entropy"}
        return state | {"findings": [dataclasses.asdict(finding) for finding in self.findings.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        vars(self).update({name: copy.copy(value) for name, value in state.items()})
        found = [Finding(**finding) for finding in state["findings"]]
        self.findings = {(finding.rule, finding.where): finding for finding in found}

    @property
    def all(self) -> list[Finding]:
        """What was found, the gravest first, what has passed last."""
        order = list(REMEDIES)
        return sorted(self.findings.values(), key=lambda found: (found.passed, order.index(found.rule), found.where))

    @property
    def verdict(self) -> str:
        """The run in a few words."""
        if not self.update:
            return "no numbers"
        open_: dict[str, list[str]] = {}
        for finding in self.all:
            if finding.grave and not finding.passed:
                open_.setdefault(finding.rule, []).append(finding.where)
        if "diverged" in open_:
            return f"diverged at update {self.findings['diverged', ''].first:,}"
        if not open_:
            return "healthy" if self.measured else "no fault seen"
        return ", ".join(rule + (f" ({', '.join(stacks)})" if any(stacks) else "") for rule, stacks in open_.items())

    def summary(self) -> dict[str, float | str]:
        """The run in a few numbers, by key, so that a table of runs can be sorted."""
        told: dict[str, float | str] = {"stability/verdict": self.verdict, **self.told}
        if self.worst is not None:
            told["stability/worst_ratio"], told["stability/worst_ratio_of"] = self.worst
        diverged = self.findings.get(("diverged", ""))
        if diverged is not None and not diverged.passed:
            told["stability/diverged"], told["stability/diverged_at"] = 1.0, diverged.first
        for key, (value, update) in self.best.items():
            told[f"best/{key.replace('/', '_')}"] = value
            told[f"best/{key.replace('/', '_')}_update"] = update
        return told

    def _remember(self, update: int, metrics: Mapping[str, float]) -> None:
        nll = metrics.get("train/nll", math.nan)
        if math.isfinite(nll):
            self.losses.append((update, nll))
        for key, sign in (("val/bleu", 1), ("val/nll", -1)):
            value = metrics.get(key, math.nan)
            if math.isfinite(value) and (key not in self.best or sign * value > sign * self.best[key][0]):
                self.best[key] = value, update
        if metrics.get("stability/diverged") == 0:
            self.told.pop("stability/diverged_at", None)  # it has come back
        for key, value in metrics.items():
            if key.startswith("stability/"):
                self.told[key] = value
            if key.startswith("gradient_ratio/"):
                self.measured = True
                known = LAYER.fullmatch(key) and not math.isnan(value)
                if known and (self.worst is None or _distance(value) > _distance(self.worst[0])):
                    _, stack, layer = key.split("/")
                    self.worst = value, f"{stack} layer {int(layer[-3:])}, update {update:,}"


def findings(records: Iterable[tuple[int, Mapping[str, float]]], entropy: float | None = None) -> Diary:
    """The diary of a run whose records, (update, numbers by key), are all there."""
    diary = Diary(entropy)
    for update, metrics in records:
        diary.add(update, metrics)
    return diary


def number(value: float) -> str:
    """A number as a reader wants it: three digits, no exponent where none is needed."""
    if not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
    if 0 < abs(value) < 1e-3 or abs(value) >= 1e7:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.3g}"


def _distance(ratio: float) -> float:
    """How far from one, in powers of ten."""
    return abs(math.log10(ratio)) if ratio > 0 else math.inf


def signs(diary: Diary, metrics: Mapping[str, float]) -> Iterator[Sign]:
    """What each rule says of a record; nothing of what the record has no numbers for."""
    yield from _loss(diary, metrics)
    yield from _gradient(metrics)
    yield from _jumps(diary, metrics)
    yield from _profiles(metrics)
    yield from _similarity(metrics)
    yield from _inside(metrics)


def _loss(diary: Diary, metrics: Mapping[str, float]) -> Iterator[Sign]:
    for key in ("train/nll", "train/loss", "val/nll"):
        if key in metrics and not math.isfinite(metrics[key]):
            yield Sign("diverged", "", True, math.inf, f"{key} is {number(metrics[key])}: the run has diverged")
            return
    if diary.told.get("stability/diverged"):
        sentence = "the spike guard found a loss that is not finite, or far above where it began: diverged"
        yield Sign("diverged", "", True, 0.0, sentence)
        return
    nll = metrics.get("train/nll")
    if nll is None:
        return
    start = diary.losses[0][1]
    sentence = f"training nll is {number(nll)}, above the {number(start)} it began with: the run has diverged"
    yield Sign("diverged", "", nll > start + ABOVE_START, nll, sentence)
    values = [value for _, value in diary.losses]
    quarter = len(values) // 4
    if len(values) < STUCK_RECORDS or diary.losses[-1][0] < STUCK_UPDATES:
        return
    before, now = math.fsum(values[-2 * quarter : -quarter]) / quarter, math.fsum(values[-quarter:]) / quarter
    level = STUCK_LEVEL * start if diary.entropy is None else STUCK_ENTROPY * diary.entropy
    sentence = f"training nll no longer falls and stands at {number(now)}: stuck"
    if diary.entropy is not None:
        sentence = (
            f"training nll stands at {number(now)}, and {number(diary.entropy)} is the entropy of single words: stuck, "
            "it knows how frequent words are and nothing of the source"
        )
    yield Sign("stuck", "", now > level and now > (1 - STUCK_FALL) * before, 0.0, sentence)


def _gradient(metrics: Mapping[str, float]) -> Iterator[Sign]:
    norm = metrics.get("gradient_norm/total")
    if norm is not None:
        sentence = f"the gradient of the whole model is {number(norm)}"
        yield Sign("lost update", "", not math.isfinite(norm), 0.0, sentence)


def _jumps(diary: Diary, metrics: Mapping[str, float]) -> Iterator[Sign]:
    count = metrics.get("stability/spikes")
    if count is not None:
        before = diary.findings.get(("jumped", ""))
        often = f"at {number(count)} updates" if count > 1 else "at one update"
        sentence = f"the loss or the gradient norm jumped {often}"
        yield Sign("jumped", "", count > (before.size if before else 0), count, sentence)


def _by_layer(metrics: Mapping[str, float]) -> dict[tuple[str, str], dict[int, float]]:
    """The numbers of a record by (kind, stack), then layer."""
    layers: dict[tuple[str, str], dict[int, float]] = {}
    for key, value in metrics.items():
        found = LAYER.fullmatch(key)
        if found is not None:
            layers.setdefault((found[1], found[2]), {})[int(found[3])] = value
    return layers


def _profiles(metrics: Mapping[str, float]) -> Iterator[Sign]:
    layers = _by_layer(metrics)
    for kind, words in PROFILES.items():
        for (name, stack), ratios in layers.items():
            if name == kind:
                yield from _profile(words, stack, ratios, max(layers.get(("gradient_norm", stack), {0: 0.0})))


def _profile(words: str, stack: str, ratios: Mapping[int, float], depth: int) -> Iterator[Sign]:
    last = f"layer {depth}" if depth else "the last layer"
    lowest, highest = min(ratios, key=lambda layer: ratios[layer]), max(ratios, key=lambda layer: ratios[layer])
    for rule, layer, bad in (
        ("vanishing", lowest, ratios[lowest] < VANISHING),
        ("exploding", highest, ratios[highest] > EXPLODING),
    ):
        value = number(ratios[layer]) + (" times" if rule == "exploding" else "")
        sentence = words.format(stack=stack, layer=layer, value=value, last=last).replace("times of the", "times the")
        yield Sign(rule, stack, bad, _distance(ratios[layer]), f"{sentence}: {rule}")


def _similarity(metrics: Mapping[str, float]) -> Iterator[Sign]:
    for key, value in metrics.items():
        name, _, rest = key.partition("/")
        if name == "layer_similarity_centered" and rest.endswith("/mean"):
            stack = rest.removesuffix("/mean")
            sentence = (
                f"neighbouring {stack} layers are alike (centred cosine {value:.3f}): each changes next to nothing"
            )
            yield Sign("alike", stack, value > ALIKE, value, sentence)


def _inside(metrics: Mapping[str, float]) -> Iterator[Sign]:
    for (kind, stack), values in _by_layer(metrics).items():
        if kind in ("attention_entropy", "cross_attention_entropy"):
            layer = min(values, key=lambda at: values[at])
            part = f"{'self' if kind == 'attention_entropy' else 'cross'}-attention"
            sentence = f"{part} of {stack} layer {layer} has {number(values[layer])} of the entropy it could: collapsed"
            yield Sign("collapsed", f"{stack} {part}", values[layer] < COLLAPSED, -values[layer], sentence)
        if kind == "epsilon_audit":
            layer = max(values, key=lambda at: values[at])
            sentence = (
                f"{values[layer]:.0%} of the positions in {stack} layer {layer} have a variance within ten times "
                "epsilon, which the norm then sees in their place"
            )
            yield Sign("drowned", stack, values[layer] > DROWNED, values[layer], sentence)
