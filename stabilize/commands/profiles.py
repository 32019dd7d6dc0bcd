"""How profiles are shown: a table with spark lines, sentences, figures, JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stabilize.probe import RULE, Profile, Theory, judge, ratio

BARS = "▁▂▃▄▅▆▇█"
STEP = math.log(10) / 2
"""Of a spark line: from one bar to the next, in the natural logarithm; half a decade."""
LEGEND = (
    f"gradient: norm by layer, first to last, █ the largest, each bar less is {math.exp(STEP):.1f} times less; "
    "ratio: the first layer's over the last's; a layer: from one layer to the next, fitted; rms: the last layer's "
    "activation RMS over the first's; similar: mean cosine of neighbouring layers"
)
WIDTH = 16
"""Most bars of a spark line."""
ROWS = 24
"""Most layers of the table of one model."""


@dataclass(frozen=True)
class Probed:
    """One model that was looked at, or why it could not be.

    Args:
        strategy: the name of what was laid over the config.
        depths: layers by stack.
        profiles: by stack; none where the model was refused.
        theories: by stack, what is derived for it.
        refused: the sentence with which it was.
    """

    strategy: str
    depths: Mapping[str, int]
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    theories: Mapping[str, Theory | None] = field(default_factory=dict)
    refused: str = ""

    @property
    def layers(self) -> str:
        """Both depths in short."""
        return "+".join(map(str, self.depths.values()))


# ---------------------------------------------------------------------- in the terminal


def report(found: Sequence[Probed], about: Mapping[str, Any]) -> RenderableType:
    """All that is said in a terminal."""
    heading = f"{about['sentences']} sentences, {about['target_tokens']} target tokens, "
    heading += f"width {about['width']}, seed {about['seed']}"
    parts: list[RenderableType] = [Text(heading, style="dim")]
    if len(found) == 1 and found[0].profiles:
        parts.append(_layers(found[0].profiles))
    parts += [_comparison(stack, found) for stack in found[0].depths]
    parts += [Text(sentence) for sentence in sentences(found)]
    derived = {theory.words: None for probed in found for theory in probed.theories.values() if theory}
    parts += [Text(line, style="dim") for line in (RULE, *(f"derived: {words}" for words in derived), LEGEND)]
    return Group(*parts)


def spark(values: Sequence[float], width: int = WIDTH) -> str:
    """Positive numbers as bars on a logarithmic scale, the largest at the top; neighbours share one of `width` bars."""
    with np.errstate(divide="ignore"):
        logarithms = np.log(np.array(values, dtype=float))
    top = max(logarithms[np.isfinite(logarithms)], default=0.0)
    bars = ""
    for part in np.array_split(logarithms, min(width, len(logarithms))):
        mean = float(part.mean())
        steps = 0 if mean == math.inf else len(BARS) if mean == -math.inf else (top - mean) / STEP
        bars += "?" if math.isnan(mean) else BARS[max(0, len(BARS) - 1 - round(steps))]
    return bars


def _comparison(stack: str, found: Sequence[Probed]) -> Table:
    """A row for each model, those of one depth together."""
    table = Table(title=stack, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for name in ("strategy", "layers", "gradient", "ratio", "a layer", "rms", "similar", "verdict"):
        words = name in ("strategy", "gradient", "verdict")
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    depths = list(dict.fromkeys(probed.depths[stack] for probed in found))
    for depth in depths:
        together = [probed for probed in found if probed.depths[stack] == depth]
        for probed in together:
            table.add_row(probed.strategy, str(depth), *_cells(probed.profiles.get(stack)))
        if len(together) > 1 and depth != depths[-1]:
            table.add_row()
    return table


def _cells(profile: Profile | None) -> list[str | Text]:
    if profile is None:
        return ["", "", "", "", "", Text("refused", style="yellow")]
    verdict = judge(profile).name
    return [
        spark(profile.gradient_norm),
        _shown(profile.first_to_last, ".2g"),
        _shown(math.exp(profile.slope), ".3g", "×"),
        _shown(profile.rms_growth, ".2g", "×"),
        _shown(profile.mean_similarity, ".2f"),
        Text(verdict, style="green" if verdict == "healthy" else "red"),
    ]


def _shown(value: float, form: str, sign: str = "") -> str:
    return "–" if math.isnan(value) else f"{sign}{value:{form}}"


def _layers(profiles: Mapping[str, Profile]) -> Table:
    """The layers of one model one by one, or evenly chosen ones."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("layer", justify="right")
    for stack in profiles:
        for name in (f"{stack} rms", "similar", "gradient", "over last"):
            table.add_column(name, justify="right")
    deepest = max(profile.layers for profile in profiles.values())
    for layer in np.unique(np.linspace(0, deepest - 1, min(deepest, ROWS)).round().astype(int)).tolist():
        cells = [str(layer + 1)]
        for profile in profiles.values():
            columns = (profile.activation_rms, profile.similarity, profile.gradient_norm, _relative(profile))
            cells += [f"{column[layer]:.3g}" if layer < len(column) else "" for column in columns]
        table.add_row(*cells)
    return table


def _relative(profile: Profile) -> list[float]:
    return [ratio(norm, profile.gradient_norm[-1]) for norm in profile.gradient_norm]


def sentences(found: Sequence[Probed]) -> list[str]:
    """For each strategy: the verdict on each stack over all depths, and how it stands to what is derived."""
    lines = []
    for strategy in dict.fromkeys(probed.strategy for probed in found):
        models = [probed for probed in found if probed.strategy == strategy]
        seen = [probed for probed in models if probed.profiles]
        said = [_verdicts(stack, seen) for stack in seen[0].profiles] if seen else []
        refusals: dict[str, list[str]] = {}
        for probed in models:
            if probed.refused:
                refusals.setdefault(probed.refused, []).append(probed.layers)
        said += [f"{', '.join(depths)} layers refused: {why}" for why, depths in refusals.items()]
        lines.append(f"{strategy}: {'; '.join(said)}")
    return lines


def _verdicts(stack: str, models: Sequence[Probed]) -> str:
    by_name: dict[str, list[Profile]] = {}
    for probed in models:
        by_name.setdefault(judge(probed.profiles[stack]).name, []).append(probed.profiles[stack])
    parts = []
    for name, profiles in by_name.items():
        deepest = max(profiles, key=lambda profile: profile.layers)
        at = f" at {', '.join(str(profile.layers) for profile in profiles)} layers" if len(models) > 1 else ""
        words = "" if name == "healthy" and len(models) > 1 else f" ({judge(deepest).words})"
        parts.append(f"{name}{at}{words}")
    measured = [math.exp(probed.profiles[stack].slope) for probed in models if probed.theories[stack]]
    if measured:
        pairs = [(probed.theories[stack], probed.profiles[stack]) for probed in models]
        agreeing = sum(theory is not None and theory.agrees(profile) for theory, profile in pairs)
        whole = "" if agreeing == len(measured) else f" at {agreeing} of {len(measured)} depths"
        parts.append(f"×{_range(measured)} a layer, {'as' if agreeing else 'not as'} derived{whole}")
    return f"{stack} {', '.join(parts)}"


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.3g}", f"{max(values):.3g}"
    return least if least == most else f"{least} to {most}"


# ---------------------------------------------------------------------- in files

PICTURES: dict[str, tuple[Callable[[Profile], list[float]], str, str]] = {
    "gradient": (_relative, "gradient norm over the last layer's", "log"),
    "activation_rms": (lambda profile: profile.activation_rms, "activation RMS", "log"),
    "similarity": (lambda profile: profile.similarity, "cosine with the next layer", "linear"),
}
"""By file name: what is drawn of a profile, what it is called, and the scale."""


def write(folder: Path, found: Sequence[Probed], about: Mapping[str, Any]) -> list[str]:
    """Write probe.json and the figures into `folder`; the files' names."""
    text = json.dumps(as_json(found, about), indent=1, allow_nan=False)
    (folder / "probe.json").write_text(text + "\n", encoding="utf-8")
    seen = [probed for probed in found if probed.profiles]
    for name, (values, label, scale) in PICTURES.items() if seen else ():
        lines(seen, values, label, scale).savefig(folder / f"{name}.png", dpi=120)
    return ["probe.json", *(f"{name}.png" for name in PICTURES if seen)]


def as_json(found: Sequence[Probed], about: Mapping[str, Any]) -> dict[str, Any]:
    """All that was found, in plain values; what is no number is null."""
    return {
        **about,
        "rule": RULE,
        "probes": [
            {
                "strategy": probed.strategy,
                "layers": dict(probed.depths),
                "refused": probed.refused or None,
                "stacks": {
                    stack: _stack_as_json(profile, probed.theories[stack]) for stack, profile in probed.profiles.items()
                },
            }
            for probed in found
        ],
    }


def _stack_as_json(profile: Profile, theory: Theory | None) -> dict[str, Any]:
    verdict = judge(profile)
    derived = theory and {"slope": [theory.least, theory.most], "words": theory.words, "agrees": theory.agrees(profile)}
    numbers = {
        "first_to_last": profile.first_to_last,
        "slope": profile.slope,
        "activation_slope": profile.activation_slope,
        "rms_growth": profile.rms_growth,
        "mean_similarity": profile.mean_similarity,
    }
    verdicts = {"verdict": verdict.name, "words": verdict.words, "derived": derived}
    return {**_finite({**numbers, **asdict(profile)}), **verdicts}


def _finite(value: Any) -> Any:
    """`value` with null for what JSON cannot write."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return value if math.isfinite(value) else None


def lines(found: Sequence[Probed], values: Callable[[Profile], list[float]], label: str, scale: str) -> Figure:
    """A panel for each stack and size, a line for each strategy, layer by layer."""
    sizes = list(dict.fromkeys(probed.layers for probed in found))
    strategies = list(dict.fromkeys(probed.strategy for probed in found))
    figure = Figure(figsize=(2.6 * len(sizes) + 2.4, 5.6), layout="constrained")
    axes = figure.subplots(len(found[0].depths), len(sizes), squeeze=False, sharey="row")
    drawn = {}
    for probed in found:
        number = strategies.index(probed.strategy)
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}
        for row, (stack, profile) in enumerate(probed.profiles.items()):
            panel, points = axes[row, sizes.index(probed.layers)], values(profile)
            (line,) = panel.plot(range(1, len(points) + 1), points, marker=".", markersize=3, **style)
            drawn[probed.strategy] = line
            panel.set(yscale=scale, title=f"{stack}, {profile.layers} layers", xlabel="layer")
            panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
            panel.grid(alpha=0.3)
            axes[row, 0].set_ylabel(label)
    figure.legend(list(drawn.values()), list(drawn), loc="outside right upper")
    return figure
