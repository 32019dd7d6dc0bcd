"""`stabilize report RUN [RUN ...] [--out FILE]`: run folders as one page."""

from __future__ import annotations

from pathlib import Path

from stabilize import plugins
from stabilize.commands.words import Parser
from stabilize.errors import UserError

ABOUT = """Write one self-contained HTML page from run folders alone: a table with the verdict on each run, curves,
heat maps by layer and update, similarity matrices, translations, strategies, and what stands out in words. Several runs
stand side by side. The page asks for nothing from elsewhere, and is readable on a phone."""


def write(words: list[str]) -> int:
    """Write the page, and say where it is."""
    parser = Parser("report", ABOUT)
    parser.add_argument("run", nargs="+", type=Path, help="a run folder, runs/<run id>")
    parser.add_argument("--out", type=Path, help="the file to write (default: report.html in the first run folder)")
    chosen = parser.parse_args(words)
    plugins.load("stabilize.strategies")
    from stabilize.report import page, read

    runs = [read(folder) for folder in chosen.run]
    out: Path = chosen.out or chosen.run[0] / "report.html"
    try:
        out.write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}") from error
    for run in runs:
        print(f"{run.name}: {run.diary.verdict}")
    print(f"report: {out}")
    return 0
