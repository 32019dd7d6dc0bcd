"""The heat maps of a study as PNG."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.colors import CenteredNorm, Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure

from stabilize.study.maps import Map
from stabilize.study.outcome import FAILURES
from stabilize.study.plan import short

FATES = {"trained": "#8fd3b0", "stuck": "#f0c36d", "diverged": "#ef8a80", "crashed": "#b9bec5"}
"""Colours of what became of a point; those of the page."""


def draw(drawn: Map) -> Figure:
    """A heat map with a number, or a word, in each place."""
    colours: Colormap | str = "viridis"
    scale: Normalize | None = None
    if drawn.kind == "fate":
        order = ["trained", *FAILURES]
        given = {place: float(order.index(word)) for place, word in drawn.words.items()}
        colours, scale = ListedColormap([FATES[name] for name in order]), Normalize(-0.5, len(order) - 0.5)
    elif drawn.kind == "ratio":
        given = {place: float(np.log10(max(value, 1e-45))) for place, value in drawn.numbers.items()}
        colours, scale = "RdBu_r", CenteredNorm(0.0, max(1.0, max(map(abs, given.values()))))
    else:
        given = dict(drawn.numbers)
    values = np.array([[given.get((row, column), np.nan) for column in drawn.columns] for row in drawn.rows])
    figure = Figure(figsize=(2.2 + 0.9 * len(drawn.columns), 1.4 + 0.32 * len(drawn.rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor("0.9")
    axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colours, norm=scale)
    axes.set_title(drawn.title, fontsize=9, wrap=True)
    axes.set_xlabel(short(drawn.across))
    axes.set_xticks(range(len(drawn.columns)), drawn.columns)
    axes.set_yticks(range(len(drawn.rows)), drawn.rows)
    for (row, column), word in drawn.words.items():
        place = drawn.columns.index(column), drawn.rows.index(row)
        box = {"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 1.0}
        axes.text(*place, word, ha="center", va="center", fontsize=8, bbox=box)
    return figure


def write(folder: Path, drawn: list[Map]) -> None:
    """Write each to `folder`/NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in drawn:
        # Nothing of the version or the time, so that the same results give the same file.
        draw(one).savefig(folder / f"{one.name}.png", dpi=120, metadata={"Software": None})
