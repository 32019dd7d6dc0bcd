"""Charts as inline SVG: plain functions from numbers to markup. Colours are classes, to suit light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stabilize.findings import number
from stabilize.report.markup import Markup, join, tag

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 8, 10, 26
POINTS = 300
"""Points of a line, at most; of more, each stretch keeps its lowest and highest."""
FEW = 10
"""Points of a line that are circles too."""
HUGE = 1e30
"""Numbers from here on are drawn like infinity."""
COLUMNS = 48
"""Columns of a heat map, at most."""
COLOURS = 8
"""Runs with a colour of their own; then colours begin again, with dashes."""
LEVELS = 10
"""Steps of a heat map's colours on either side of the middle."""


class Line(NamedTuple):
    """One run in a chart."""

    name: str
    run: int
    """Which run, from 0: its colour."""
    points: Sequence[tuple[int, float]]
    dots: bool = False
    """Circles in place of a line."""


class Scale(NamedTuple):
    """From numbers to a place between two ends."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round numbers from low to high."""
        if self.logarithmic:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            ticks = [10.0**power for power in powers[:: max(1, math.ceil(len(powers) / 6))]]
            if len(ticks) > 2:
                return ticks
            fine = [m * 10.0**p for p in range(-12, 13) for m in (1, 2, 5) if self.low <= m * 10.0**p <= self.high]
            return fine or [self.low, self.high]
        rough = (self.high - self.low) / 4
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [float(f"{k * step:.12g}") for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def chart(
    lines: Sequence[Line], title: str, updates: int, logarithmic: bool = False, mark: float | None = None
) -> Markup:
    """Lines over the update; `mark` is a value that a line across stands for.

    What cannot be drawn, NaN and infinity, and zero where `logarithmic` is asked for, is a cross at the upper edge.
    """
    drawable = [[p for p in line.points if abs(p[1]) < HUGE and (p[1] > 1 / HUGE or not logarithmic)] for line in lines]
    values = [value for points in drawable for _, value in points] + ([mark] if mark is not None else [])
    y = Scale(*_ends(values, logarithmic), HEIGHT - BOTTOM, TOP, logarithmic)
    x = Scale(0, max(updates, 1), LEFT, WIDTH - RIGHT)
    parts = [_axes(x, y)]
    if mark is not None:
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(mark), y2=y(mark), class_="mark"))
    for line, points in zip(lines, drawable, strict=True):
        parts.append(_line(line, points, x, y))
        lost = [point for point in line.points if point not in points]
        parts += [_cross(line, x(update), value, update) for update, value in lost[:: max(1, len(lost) // 40)]]
    described = "; ".join(f"{line.name}: {_spoken(line.points)}" for line in lines)
    return svg(join(*parts), HEIGHT, f"{title} by update. {described}")


def _axes(x: Scale, y: Scale) -> Markup:
    parts = []
    for tick in y.ticks:
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick), class_="rule"))
        parts.append(tag("text", number(tick), x=LEFT - 6, y=y(tick) + 4.0, text_anchor="end"))
    return join(*parts, _updates(x, HEIGHT))


def _updates(x: Scale, height: float) -> Markup:
    """The names of some updates below a picture."""
    parts = []
    for tick in x.ticks:
        anchor = "end" if x(tick) > WIDTH - 30 else "middle"
        parts.append(tag("text", f"{tick:,.0f}", x=x(tick), y=height - 9.0, text_anchor=anchor))
    return join(*parts)


def _line(line: Line, points: Sequence[tuple[int, float]], x: Scale, y: Scale) -> Markup:
    if not points:
        return Markup()
    title = tag("title", line.name)
    dots = [tag("circle", cx=x(update), cy=y(value), r=3) for update, value in thinned(points)]
    circles = tag("g", title, *dots, class_=f"{colour(line.run)} dots")
    if line.dots or len(points) == 1:
        return circles
    path = "".join(f"{'L' if k else 'M'}{x(u):.1f} {y(v):.1f}" for k, (u, v) in enumerate(thinned(points)))
    drawn = tag("path", title, d=path, class_=f"{colour(line.run)} line")
    return join(drawn, circles) if len(points) <= FEW else drawn


def _cross(line: Line, x: float, value: float, update: int) -> Markup:
    title = tag("title", f"{line.name}: {number(value)} at update {update:,}")
    return tag("text", title, "✕", x=x, y=TOP + 8, text_anchor="middle", class_=f"{colour(line.run)} cross")


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `POINTS` points that keep every peak: the lowest and highest of each stretch, and the last."""
    if len(points) <= POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / (POINTS - 2))
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


class Colouring(NamedTuple):
    """How the numbers of a heat map become colours; the same for all runs."""

    low: float
    high: float
    logarithmic: bool = False
    diverging: bool = False
    """One is the middle, and a colour of its own stands on either side."""

    def level(self, value: float) -> str:
        """The class of a cell."""
        value = max(self.low, min(self.high, value))
        share = Scale(self.low, self.high, 0, 2 * LEVELS, self.logarithmic)(value)
        return f"{self.kind}{round(share)}"

    @property
    def kind(self) -> str:
        """The first letter of its classes."""
        return "d" if self.diverging else "s"

    @property
    def legend(self) -> Markup:
        """The bar of colours with its ends."""
        bar = tag("div", *(tag("i", class_=f"{self.kind}{k}") for k in range(2 * LEVELS + 1)), class_="bar")
        names = [number(self.low), *(["1"] if self.diverging else []), number(self.high)]
        return tag("div", bar, tag("div", *(tag("span", name) for name in names)), class_="scale")


def around_one(values: Iterable[float]) -> Colouring:
    """Colours for ratios: as far below one as above, from a tenth and ten to 1e-8 and 1e8."""
    powers = [abs(math.log10(value)) for value in values if 0 < value < math.inf]
    extent = 10.0 ** max(1, min(8, math.ceil(max(powers, default=1.0) - 0.2)))
    return Colouring(1 / extent, extent, logarithmic=True, diverging=True)


def from_lowest(values: Iterable[float], high: float | None = None) -> Colouring:
    """Colours from the lowest number to `high`, none: the highest; by magnitude where they are magnitudes apart."""
    finite = [value for value in values if abs(value) < HUGE]
    low, top = min(finite, default=0.0), max(finite, default=1.0) if high is None else high
    return Colouring(low, top if top > low else low + 1, logarithmic=low > 1 / HUGE and top > 100 * low)


def heat_map(rows: Mapping[int, Sequence[tuple[int, float]]], title: str, updates: int, colours: Colouring) -> Markup:
    """Layer by update, layer 1 at the bottom; `rows` are the points of each layer. A gap is a number that was not."""
    layers = sorted(rows)
    cells = {(layer, update): value for layer in layers for update, value in rows[layer]}
    ends = sorted({update for _, update in cells})
    # A cell reaches from the record before to its own; of many records some are left out.
    shown = (
        sorted({ends[round(k * (len(ends) - 1) / (COLUMNS - 1))] for k in range(COLUMNS)})
        if len(ends) > COLUMNS
        else ends
    )
    height = max(110, min(230, 16 * len(layers))) + TOP + BOTTOM
    x = Scale(0, max(updates, 1), LEFT, WIDTH - RIGHT)
    y = Scale(0, len(layers), height - BOTTOM, TOP)
    parts = [tag("rect", x=LEFT, y=TOP, width=WIDTH - RIGHT - LEFT, height=height - TOP - BOTTOM, class_="none")]
    spacing = max(1, math.ceil(len(layers) / 8))
    for place, layer in enumerate(layers):
        if place % spacing == 0:
            parts.append(tag("text", str(layer), x=LEFT - 6, y=(y(place) + y(place + 1)) / 2 + 4, text_anchor="end"))
        for before, update in zip([0, *shown], shown, strict=False):
            value = cells.get((layer, update), math.nan)
            if math.isfinite(value):
                parts.append(
                    tag(
                        "rect",
                        tag("title", f"layer {layer}, update {update:,}: {number(value)}"),
                        x=x(before),
                        y=y(place + 1),
                        width=x(update) - x(before) + 0.3,
                        height=y(place) - y(place + 1) + 0.3,
                        class_=colours.level(value),
                    )
                )
    parts.append(_updates(x, height))
    finite = {place: value for place, value in cells.items() if math.isfinite(value)}
    spoken = "no numbers"
    if finite:
        low, high = min(finite, key=lambda at: finite[at]), max(finite, key=lambda at: finite[at])
        spoken = f"lowest {_place(low, finite)}, highest {_place(high, finite)}"
    return svg(join(*parts), height, f"{title}, layers {layers[0]} to {layers[-1]} by update: {spoken}")


def place_map(
    rows: Sequence[str],
    columns: Sequence[str],
    classes: Mapping[tuple[str, str], str],
    words: Mapping[tuple[str, str], str],
    across: str,
    title: str,
) -> Markup:
    """A cell for each row and column, the first row at the top: its class of colour, and its words on it.

    Args:
        across: what the columns are.
        title: what is said to who cannot see it, before the words of each cell.
    """
    left = min(170.0, 16 + 6.4 * max(map(len, rows), default=0))
    height = 24 * len(rows) + TOP + BOTTOM + 12
    x, y = Scale(0, len(columns), left, WIDTH - RIGHT), Scale(0, len(rows), TOP, height - BOTTOM - 12)
    parts = []
    for down, row in enumerate(rows):
        name = row if 6.4 * len(row) <= left else f"{row[: int(left / 6.4) - 1]}…"
        middle = (y(down) + y(down + 1)) / 2 + 4
        parts.append(tag("text", tag("title", row), name, x=left - 6, y=middle, text_anchor="end"))
        for right, column in enumerate(columns):
            at = (row, column)
            size = {"width": x(right + 1) - x(right) - 1, "height": y(down + 1) - y(down) - 1}
            said = tag("title", f"{row}, {across} {column}: {words.get(at, 'no number')}")
            parts.append(tag("rect", said, x=x(right), y=y(down), class_=classes.get(at, "none"), **size))
            centre = (x(right) + x(right + 1)) / 2
            parts.append(tag("text", words.get(at, ""), x=centre, y=middle, text_anchor="middle", class_="value"))
    for right, column in enumerate(columns):
        centre = (x(right) + x(right + 1)) / 2
        parts.append(tag("text", column, x=centre, y=height - BOTTOM + 4, text_anchor="middle"))
    parts.append(tag("text", across, x=(left + WIDTH) / 2, y=height - 6, text_anchor="middle"))
    spoken = "; ".join(f"{row}, {across} {column}: {word}" for (row, column), word in words.items())
    return svg(join(*parts), height, f"{title}. {spoken}")


def svg(content: Markup, height: float, label: str) -> Markup:
    """A picture as wide as its place, with words for who cannot see it."""
    return tag("svg", content, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=label)


def colour(run: int) -> str:
    """The classes of a run's colour."""
    return f"c{run % COLOURS}" + (" dashed" if run >= COLOURS else "")


def _place(at: tuple[int, int], values: dict[tuple[int, int], float]) -> str:
    return f"{number(values[at])} (layer {at[0]}, update {at[1]:,})"


def _spoken(points: Sequence[tuple[int, float]]) -> str:
    if not points:
        return "no numbers"
    (first, start), (last, end) = points[0], points[-1]
    if first == last:
        return f"{number(end)} at update {last:,}"
    return f"{number(start)} at update {first:,} to {number(end)} at {last:,}"


def _ends(values: Sequence[float], logarithmic: bool) -> tuple[float, float]:
    """Where an axis begins and ends; some room where all values are one."""
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    if logarithmic:
        return (low / 1.3, high * 1.3) if high < 10 * low else (low / 1.5, high * 1.5)
    room = 0.06 * (high - low) or abs(high) / 2 or 1.0
    return (low - room if low < 0 or low - room > 0 else 0.0), high + room
