"""All that a study has found, and the tables that it is shown in: on the terminal, in answer.md, on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stabilize.findings import number
from stabilize.study.answer import told
from stabilize.study.claims import Judged
from stabilize.study.outcome import FAILURES
from stabilize.study.plan import short
from stabilize.study.table import SHOWN, Line, Mean, Row, at_best, lines

WITH_INTERVAL = ("val_nll", "test_bleu")

FATES = "; ".join(f"{name}: {said}" for name, said in FAILURES.items()) + "."

DEFINITIONS = (
    "Means over the runs that trained, else over all; ± is half of Student's 95 % interval. ratio: gradient of layer 1 "
    "over the last layer's; similarity: cosine of neighbouring layers, centred; depth used: layers whose loss costs "
    f"more than 0.01 nats. {FATES}"
)

BEST = "Of several learning rates, that with the fewest failures, then the lowest validation nll. "

TESTED = (
    "Each of those that trained with every seed against the one with the highest BLEU, the lines of all seeds "
    "together, as if each seed had a text of its own; a small p says that chance alone would seldom make so great a "
    "difference. ± is sacreBLEU's 95 % interval over bootstrap samples. "
)


class Table(NamedTuple):
    """Rows of words."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str


@dataclass(frozen=True)
class Results:
    """All that a study has found.

    Args:
        question: what it was to answer.
        keys: of the grid, without the seed.
        rows: of results.csv.
        answer: in sentences.
        judged: claims, where it has any.
        significance: rows of significance.csv.
    """

    question: str
    keys: Sequence[str]
    rows: Sequence[Row]
    answer: Sequence[str]
    judged: Sequence[Judged] = ()
    significance: Sequence[Mapping[str, str]] = ()

    @property
    def lines(self) -> list[Line]:
        """One for each point of the grid, at its best learning rate where several were tried: place by place, such as
        depth by depth, and there the best first."""
        found = at_best(lines(self.rows, self.keys))
        others = [key for key in self.keys if key not in ("strategy", "learning_rate")]
        places = [tuple(line.values[key] for key in others) for line in found]
        order = {place: number for number, place in enumerate(dict.fromkeys(places))}
        ranked = sorted(zip(places, found, strict=True), key=lambda at: (order[at[0]], at[1].rank))
        return [line for _, line in ranked]

    @property
    def tables(self) -> list[Table]:
        """Claims or points of the grid, and paired tests."""
        return [table for table in (self._claims, self._points, self._tests) if table.rows]

    @property
    def _claims(self) -> Table:
        rows = [[f"{one.letter}: {one.said}", one.measured, one.literature, one.verdict] for one in self.judged]
        return Table("Claims", ["claim", "measured", "literature", "verdict"], rows, FATES)

    @property
    def _points(self) -> Table:
        found = [] if self.judged else self.lines
        columns = [column for column in SHOWN if any(line.over(column) is not None for line in found)]
        rows = [
            [*line.values.values(), *(_cell(column, line.over(column)) for column in columns), line.told]
            for line in found
        ]
        headings = [*map(short, self.keys), *(SHOWN[column].heading for column in columns), "failures (95 %)"]
        return Table("Results", headings, rows, (BEST if "learning_rate" in self.keys else "") + DEFINITIONS)

    @property
    def _tests(self) -> Table:
        rows, headings, note = [], list[str](), TESTED
        for one in self.significance:
            places = [key for key in self.keys if key in one]
            p_values = [one[f"p_{test}"] for test in ("bootstrap", "randomization")]
            headings = [*map(short, places), "BLEU", "p, bootstrap", "p, randomization"]
            bleu = f"{float(one['bleu']):.1f} ± {float(one['bootstrap_half_width']):.1f}"
            rows.append([*(one[key] for key in places), bleu, *(f"{float(p):.4f}" if p else "" for p in p_values)])
            note = TESTED + one["signature"]
        return Table("Paired significance", headings, rows, note)


def markdown(results: Results) -> str:
    """The answer and the tables as a page in Markdown."""
    parts = [f"# {results.question}", *(f"- {sentence}" for sentence in results.answer)]
    for table in results.tables:
        lines_ = [table.headings, ["---"] * len(table.headings), *table.rows]
        drawn = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines_]
        parts += [f"\n## {table.title}\n", *drawn, f"\n{table.note}" if table.note else ""]
    return "\n".join(parts).rstrip() + "\n"


def _cell(column: str, mean: Mean | None) -> str:
    if mean is None:
        return ""
    return told(mean) if column in WITH_INTERVAL else number(mean.middle)
