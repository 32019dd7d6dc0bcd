"""A study as one HTML page, with the parts of the diagnostics' report."""

from __future__ import annotations

from collections.abc import Sequence

from stabilize.report.markup import Markup, tag
from stabilize.report.page import document
from stabilize.report.svg import around_one, from_lowest, place_map
from stabilize.study.claims import DIRECTION, HOLDS, NOT, UNKNOWN
from stabilize.study.maps import Map, frontiers, maps
from stabilize.study.plan import short
from stabilize.study.results import Results, Table

VERDICTS = {HOLDS: "good", DIRECTION: "worth", NOT: "bad", UNKNOWN: "dim"}
"""Classes of a claim's verdict."""

SHORT = 28
"""Letters of a cell that is not broken into lines."""


def page(results: Results) -> str:
    """The whole page, one string without any reference to elsewhere."""
    runs = f"{len(results.rows):,} runs; a row of results.csv has the command that repeats one."
    tables = {table.title: _table(table) for table in results.tables}
    tests = tables.pop("Paired significance", Markup())
    parts = [_answer(results), *tables.values(), *([] if results.judged else _drawn(results)), tests]
    footer = "Written by stabilize compare from results.csv and the translations of the runs."
    return document(results.question, tag("p", runs, class_="dim"), tag("main", *parts), footer)


def _answer(results: Results) -> Markup:
    said = [tag("li", sentence) for sentence in results.answer]
    return tag("section", tag("h2", "Answer"), tag("ul", *said, class_="findings")) if said else Markup()


def _table(table: Table) -> Markup:
    """A table that becomes cards on a phone."""
    others = table.headings[1:]
    head = tag("tr", *(tag("th", heading, scope="col") for heading in table.headings))
    body = []
    for name, *cells in table.rows:
        data = [tag("td", tag("div", _shown(cell)), data_name=of) for cell, of in zip(cells, others, strict=True)]
        body.append(tag("tr", tag("th", name, scope="row"), *data))
    note = tag("p", table.note, class_="dim") if table.note else ""
    drawn = tag("table", tag("thead", head), tag("tbody", *body), class_="runs")
    return tag("section", tag("h2", table.title), tag("div", drawn, class_="wide"), note)


def _shown(cell: str) -> Markup:
    """A verdict in its colour; what is short stays in one line."""
    if cell in VERDICTS:
        return tag("span", cell, class_=f"verdict {VERDICTS[cell]}")
    return tag("div" if len(cell) < SHORT else "span", cell)


def _drawn(results: Results) -> list[Markup]:
    fates = "What became of each learning rate at each depth; where seeds differ, of most that did not train."
    return [
        _pictures("Maps", "A star: at least one seed did not train.", maps(results.rows, results.keys)),
        _pictures("Stability frontier", fates, frontiers(results.rows, results.keys)),
    ]


def _pictures(title: str, words: str, drawn: Sequence[Map]) -> Markup:
    if not drawn:
        return Markup()
    figures = [tag("figure", tag("figcaption", one.title), _picture(one)) for one in drawn]
    return tag("section", tag("h2", title), tag("p", words, class_="dim"), tag("div", *figures, class_="grid"))


def _picture(drawn: Map) -> Markup:
    classes = drawn.words  # what became of a point is the class of its colour
    if drawn.kind != "fate":
        colours = (around_one if drawn.kind == "ratio" else from_lowest)(drawn.numbers.values())
        classes = {place: colours.level(value) for place, value in drawn.numbers.items()}
    return place_map(drawn.rows, drawn.columns, classes, drawn.words, short(drawn.across), drawn.title)
