"""`stabilize compare STUDY`: the runs of a study, the table they make, and the answer to its question."""

from __future__ import annotations

import contextlib
import io
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from jsonargparse import ArgumentParser
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stabilize.commands import mistakes, strict_yaml, training
from stabilize.commands.comparison import Comparison, alone, read_csv, write_csv
from stabilize.commands.overlays import paths_of
from stabilize.commands.words import Parser
from stabilize.errors import UserError
from stabilize.study import FAILURES, Cell, Study, base, cells
from stabilize.study.answer import NEEDED, RULES
from stabilize.study.claims import RULE, judge
from stabilize.study.plan import short
from stabilize.study.results import Results, markdown
from stabilize.study.table import Row

ABOUT = """Carry out a study: one `stabilize fit` for each point of its grid, each in a process and a run folder of its
own. Runs that diverge or crash are results. What is finished is never run again: after Ctrl-C or a kill the same
command goes on where it was. Results are in studies/NAME: results.csv (what came out, and the command of each run),
costs.csv, answer.md (the answer in words, and the table), study.html, figures, significance.csv."""


def study_of(path: Path) -> Study:
    """The study in a file.

    Raises:
        UserError: there is none, or a mistake in it.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Study)
    mistakes.check(parser, ["--config", str(path)])
    try:
        study = Study(**parser.parse_object(strict_yaml.read(path)).as_dict())
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: {mistakes.one_line(error)}") from error
    for key in NEEDED.get(study.answer, ()):
        if key not in study.keys:
            raise UserError(f"answer of {path} is {study.answer}, which needs {short(key)} in the grid")
    return study


def plan(path: Path, study: Study, threads: int) -> list[Cell]:
    """The runs of a study, and those of the studies that it takes in.

    Raises:
        UserError: a mistake in one of the files.
    """
    paths = {strategy: next(iter(paths_of([base(strategy)]).values())) for strategy in study.strategies}
    own = cells(study, paths, threads)
    if not study.studies:
        return own
    grids = {path.stem: own}
    for file in study.studies:
        other = study_of(Path(file))
        if other.studies:
            raise UserError(f"studies of {path} has {file}, which takes in other studies itself; name those")
        grids[Path(file).stem] = plan(Path(file), other, threads)
    return [
        Cell(f"{grid}-{cell.name}", {"study": grid, **cell.values}, cell.words)
        for grid, found in grids.items()
        for cell in found
    ]


def check(cells: Sequence[Cell]) -> None:
    """Read the command line of every run that brings a value of its own, before any of them starts.

    Raises:
        UserError: a mistake in one.
    """
    seen: set[tuple[str, str]] = set()
    for cell in cells:
        new = {item for item in cell.values.items() if item[0] != "seed"} - seen
        if new:
            seen |= new
            with contextlib.redirect_stdout(io.StringIO()):
                training.run(["explain", *cell.words])


class Display(Protocol):
    """Shows how a study goes on."""

    def show(self, ended: Cell | None) -> None:
        """Called now and then, and with each run that has ended."""


class Lines:
    """A line for each run that ends: for output that is no terminal."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def show(self, ended: Cell | None) -> None:
        """Tell of a run that has ended."""
        if ended is None or ended.name not in self.comparison.found:
            return
        found = self.comparison.found[ended.name]
        nll = found["numbers"]["val_nll"]
        said = found["outcome"] + (f", val nll {float(nll):.3f}" if nll else "")
        place = f"{len(self.comparison.found)} of {len(self.comparison.cells)}"
        print(f"{place}: {ended.name}: {said} ({found['seconds']:.0f} s){_ahead(self.comparison)}", flush=True)


class Board:
    """A table that is drawn again and again: what became of the runs by strategy, and what runs now."""

    def __init__(self, comparison: Comparison, live: Live) -> None:
        self.comparison, self.live = comparison, live

    def show(self, ended: Cell | None) -> None:
        """Draw it as things are."""
        self.live.update(self.drawn)

    @property
    def drawn(self) -> Group:
        """The table, the runs under way, and the time that is left."""
        comparison = self.comparison
        outcomes = {name: found["outcome"] for name, found in comparison.found.items()}
        counts: dict[str, Counter[str]] = {}
        for cell in comparison.cells:
            counts.setdefault(cell.values["strategy"], Counter())[outcomes.get(cell.name, "left")] += 1
        columns = ("trained", *FAILURES, "left")
        table = Table(box=box.SIMPLE)
        for heading in ("strategy", *columns):
            table.add_column(heading, justify="left" if heading == "strategy" else "right")
        for strategy, count in counts.items():
            table.add_row(strategy, *(str(count[column] or "") for column in columns))
        running = [
            Text(f"{run.cell.name}: {run.progress}, {time.monotonic() - run.start:.0f} s")
            for run in comparison.under_way
        ]
        done = Text(f"{len(comparison.found)} of {len(comparison.cells)} runs{_ahead(comparison)}")
        return Group(table, *running, done)


def _ahead(comparison: Comparison) -> str:
    left = comparison.seconds_left
    return f"; about {left / 60:.0f} min left" if left else ""


@contextlib.contextmanager
def display(comparison: Comparison) -> Iterator[Display]:
    """A table on a terminal, else lines."""
    console = Console()
    if not console.is_terminal:
        yield Lines(comparison)
        return
    with Live(console=console, refresh_per_second=2) as live:
        yield Board(comparison, live)


def compare(words: Sequence[str]) -> int:
    """Carry out `stabilize compare`."""
    parser = Parser("compare", ABOUT)
    parser.add_argument("study", type=Path, help="a file as in configs/studies")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the study's folder (default: studies/NAME, after the file)")
    parser.add_argument("--dry-run", action="store_true", help="show what would be run, and run nothing")
    chosen = parser.parse_args(list(words))
    for name in ("jobs", "threads"):
        if getattr(chosen, name) < 1:
            raise UserError(f"--{name} is {getattr(chosen, name)}; 1 is the least that will do")
    study = study_of(chosen.study)
    folder: Path = chosen.out or Path("studies") / chosen.study.stem
    planned = plan(chosen.study, study, chosen.threads)
    check(planned)
    if chosen.dry_run:
        comparison = Comparison(folder, planned, chosen.jobs, study.core_minutes)
        for cell in comparison.left:
            print(comparison.command(cell))
        cost = comparison.seconds_left
        told = "" if cost is None else f", about {cost / 60:.0f} min with --jobs {chosen.jobs}"
        print(f"{len(comparison.left)} of {len(comparison.cells)} runs are left{told}")
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be made: {error.strerror}; --out names another") from error
    with alone(folder):
        comparison = Comparison(folder, planned, chosen.jobs, study.core_minutes)
        try:
            with display(comparison) as shown, contextlib.closing(comparison.carry_out()) as events:
                for ended in events:
                    shown.show(ended)
        except KeyboardInterrupt:
            print(f"ended; the same command goes on with the {len(comparison.left)} runs that are left", flush=True)
            raise
        comparison.write()
        if comparison.found:
            conclude(study, comparison)
    if comparison.without:
        said = "; ".join(f"{name}: {why.removeprefix('error: ')}" for name, why in comparison.without.items())
        raise UserError(f"{len(comparison.without)} runs have no result ({said}); the same command runs them again")
    return 0


def results_of(study: Study, rows: Sequence[Row], significance: Sequence[Mapping[str, str]] = ()) -> Results:
    """All that the rows of results.csv, and of significance.csv, say of a study."""
    keys = [key for key in study.keys if key != "seed"]
    if study.answer == "claims":
        return Results(study.question, keys, rows, [RULE], judge(rows))
    return Results(study.question, keys, rows, RULES[study.answer](rows, keys), significance=significance)


def conclude(study: Study, comparison: Comparison) -> None:
    """Print the tables and the answer of a study, and write them, the page and the figures into its folder."""
    # What takes seconds to be imported, and a dry run does without.
    from stabilize.study import figures, significance
    from stabilize.study.maps import frontiers, maps
    from stabilize.study.page import page

    rows, folder, results = comparison.rows, comparison.folder, results_of(study, comparison.rows)
    if not results.judged:
        with Console(stderr=True).status("") as status:
            found = significance.compared(rows, results.keys, comparison.folders, status.update)
        tests = found or read_csv(folder / "significance.csv")  # of before, where translations are gone
        results = replace(results, significance=tests)
        figures.write(folder / "figures", [*maps(rows, results.keys), *frontiers(rows, results.keys)])
        write_csv(folder / "significance.csv", tests)
    (folder / "answer.md").write_text(markdown(results), encoding="utf-8")
    (folder / "study.html").write_text(page(results), encoding="utf-8")
    console = Console()
    for table in results.tables:
        shown = Table(box=box.SIMPLE, title=table.title, caption=table.note, caption_justify="left")
        for heading in table.headings:
            shown.add_column(heading)
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    console.print(Text("\n".join([study.question, *results.answer])))
    print(f"wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir() if path.name != 'lock'))}")
