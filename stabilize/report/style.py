"""How the page looks: one style sheet, light and dark, narrow and wide."""

from __future__ import annotations

from collections.abc import Iterator

from stabilize.report.svg import LEVELS

LIGHT = ("#1f6feb", "#d1490b", "#0a7f5a", "#8a3fc7", "#a66a00", "#c2185b", "#00798c", "#5b6470")
DARK = ("#6cb0ff", "#ff8f57", "#3ecf9a", "#c79bff", "#e3b341", "#ff7eb0", "#4dc9dd", "#aeb8c4")
"""The runs' colours, told apart by who sees red and green alike too."""

DIVERGING_LIGHT, DIVERGING_DARK = ("#1a4f9c", "#f3f2ee", "#b3191f"), ("#4d8df0", "#2a2f38", "#f0625a")
SEQUENTIAL = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")  # viridis

SHEET = """
:root { color-scheme: light dark; --page: #ffffff; --sheet: #f6f7f9; --ink: #1b1f24; --dim: #57606a; --edge: #d9dee4;
  --bad: #b42318; --worth: #8a5a00; --good: #0a7a4b; --nothing: #e4e7eb; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1318; --sheet: #181d24; --ink: #e6eaef; --dim: #9aa5b1;
  --edge: #2d343d; --bad: #ff8a80; --worth: #e8b64c; --good: #56d69b; --nothing: #20262e; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 1320px; padding: 20px 16px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 40px 0 10px; }
h3 { font-size: 1rem; margin: 22px 0 8px; }
p { margin: 6px 0; max-width: 75ch; }
a { color: inherit; }
code, pre { font: 0.85em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { overflow-x: auto; overflow-wrap: normal; background: var(--sheet); padding: 12px; border-radius: 8px; }
.dim, figcaption small { color: var(--dim); }
.swatch { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 3px; margin-right: 0.45em;
  background: var(--run); vertical-align: -0.05em; }
.swatch.dashed { background: repeating-linear-gradient(90deg, var(--run) 0 3px, transparent 3px 5px); }
.legend { position: sticky; top: 0; z-index: 1; display: flex; gap: 4px 16px; flex-wrap: wrap; margin: 0 -16px;
  padding: 8px 16px; background: var(--page); border-bottom: 1px solid var(--edge); font-size: 0.9rem; }
@media (max-width: 700px) { .legend { flex-wrap: nowrap; overflow-x: auto; white-space: nowrap; } }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); }
.small.grid { grid-template-columns: repeat(auto-fill, minmax(min(100%, 270px), 1fr)); }
figure { margin: 0; background: var(--sheet); border-radius: 10px; padding: 10px 10px 4px; min-width: 0; }
figcaption { font-weight: 600; font-size: 0.92rem; margin: 0 0 4px; }
figcaption small { font-weight: 400; display: block; }
figure img { width: 100%; height: auto; display: block; border-radius: 6px; margin-bottom: 6px; background: #fff; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 12px; fill: var(--dim); font-family: inherit; }
svg .rule { stroke: var(--edge); stroke-width: 1; }
svg .mark { stroke: var(--dim); stroke-width: 1; stroke-dasharray: 2 3; }
svg .line { fill: none; stroke: var(--run); stroke-width: 1.8; stroke-linejoin: round; }
svg .line.dashed { stroke-dasharray: 5 3; }
svg .dots { fill: var(--sheet); stroke: var(--run); stroke-width: 1.8; }
svg .cross { fill: var(--run); font-weight: 700; }
svg .value { fill: var(--ink); stroke: var(--sheet); stroke-width: 3px; stroke-linejoin: round; paint-order: stroke; }
svg .trained { fill: #8fd3b0; } svg .stuck { fill: #f0c36d; } svg .diverged { fill: #ef8a80; }
svg .crashed { fill: #b9bec5; }
svg rect { shape-rendering: crispEdges; }
svg .none { fill: var(--nothing); }
.scale { max-width: 330px; margin: 4px 0 10px; font-size: 0.8rem; color: var(--dim); }
.scale div { display: flex; justify-content: space-between; }
.scale .bar { height: 10px; border-radius: 5px; overflow: hidden; }
.scale i { flex: 1; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 8px 14px 8px 0; border-bottom: 1px solid var(--edge); }
th { font-weight: 600; }
thead th { color: var(--dim); font-size: 0.82rem; font-weight: 500; overflow-wrap: normal; }
td div div { white-space: nowrap; }
td small { display: block; color: var(--dim); font-size: 0.8rem; line-height: 1.35; }
.wide { overflow-x: auto; } .wide th { overflow-wrap: normal; }
.bad { color: var(--bad); } .worth { color: var(--worth); } .good { color: var(--good); } .verdict { font-weight: 600; }
@media (max-width: 820px) {
  .runs thead { position: absolute; clip-path: inset(50%); }
  .runs tr { display: block; background: var(--sheet); border-radius: 10px; padding: 10px 12px; margin-bottom: 12px; }
  .runs th, .runs td { display: block; border: 0; padding: 3px 0; }
  .runs td { display: grid; grid-template-columns: 8.5em 1fr; gap: 8px; }
  .runs td::before { content: attr(data-name); color: var(--dim); font-size: 0.85rem; }
}
.findings { list-style: none; padding: 0; margin: 0 0 16px; }
.findings li { border-left: 3px solid var(--edge); padding: 2px 0 2px 12px; margin: 8px 0; max-width: 85ch; }
.findings li.grave { border-color: var(--bad); } .findings li.note { border-color: var(--worth); }
.findings b { font-weight: 600; }
.findings small { color: var(--dim); display: block; font-size: 0.88rem; }
.sample { background: var(--sheet); border-radius: 10px; padding: 6px 14px 10px; margin: 0; }
.sample dt { color: var(--dim); font-size: 0.82rem; margin-top: 6px; }
.sample dd { margin: 0; }
.card { display: grid; grid-template-columns: minmax(0, 8.5em) minmax(0, 1fr); gap: 8px 14px; margin: 8px 0; }
.card dt { color: var(--dim); } .card dd { margin: 0; min-width: 0; }
.card small { display: block; color: var(--dim); line-height: 1.4; }
@media (max-width: 560px) { .card { grid-template-columns: 1fr; gap: 0; } .card dd { margin-bottom: 10px; } }
details { margin: 10px 0; } summary { cursor: pointer; font-weight: 600; padding: 4px 0; }
footer { margin-top: 48px; color: var(--dim); font-size: 0.85rem; }
@media print { .legend { position: static; } figure, .sample { break-inside: avoid; } }
"""


def style() -> str:
    """The style sheet."""
    return "\n".join(
        [
            SHEET,
            *_colours(LIGHT, DIVERGING_LIGHT),
            "@media (prefers-color-scheme: dark) {",
            *_colours(DARK, DIVERGING_DARK),
            "}",
            *_levels("s", SEQUENTIAL),
        ]
    )


def _colours(runs: tuple[str, ...], diverging: tuple[str, ...]) -> Iterator[str]:
    for place, colour in enumerate(runs):
        yield f".c{place} {{ --run: {colour}; }}"
    yield from _levels("d", diverging)


def _levels(kind: str, stops: tuple[str, ...]) -> Iterator[str]:
    """The classes of a heat map's levels, for cells and for the bar below them."""
    for level in range(2 * LEVELS + 1):
        colour = between(stops, level / (2 * LEVELS))
        yield f".{kind}{level} {{ fill: {colour}; background: {colour}; }}"


def between(stops: tuple[str, ...], share: float) -> str:
    """The colour at a share of the way from the first stop to the last."""
    place = share * (len(stops) - 1)
    before = min(int(place), len(stops) - 2)
    low, high = (bytes.fromhex(stops[k][1:]) for k in (before, before + 1))
    return "#" + bytes(round(a + (b - a) * (place - before)) for a, b in zip(low, high, strict=True)).hex()
