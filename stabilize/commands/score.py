"""`stabilize score`: written translations against references, and systems against one another."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stabilize.commands.words import Parser
from stabilize.data.files import read_lines
from stabilize.errors import UserError
from stabilize.metrics import CorpusScore, ScoreName, compare, corpus_scores

ABOUT = """Score files of translations, line k of each the translation of line k of the references, as the sacrebleu
command does. Of several files each is compared with the first: a small p says that chance alone would seldom make so
great a difference."""

NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""How `read_lines` hands on bytes that are not."""

SCORES = get_args(ScoreName)

TESTS = ("bootstrap", "randomization")
"""Fields of a `Comparison`: p of sacreBLEU's paired bootstrap test and of its approximate randomisation."""


def texts_of(paths: Sequence[str]) -> list[list[str]]:
    """The lines of files that belong together; bytes that are not UTF-8, which equal no letter, are told.

    Raises:
        UserError: a file that cannot be read or is empty, or files of different length.
    """
    texts = [list(read_lines(path)) for path in paths]
    for path, lines in zip(paths, texts, strict=True):
        if len(lines) != len(texts[-1]):
            raise UserError(
                f"{path} has {len(lines):,} lines but {paths[-1]} has {len(texts[-1]):,}: "
                "line k of one must belong to line k of the other"
            )
        if not lines:
            raise UserError(f"{path} is empty: give a file with a sentence on each line")
        unread = [number for number, line in enumerate(lines, start=1) if NOT_UTF8.search(line)]
        if unread:
            told = f"{len(unread):,} of {len(lines):,} lines have bytes that are not UTF-8, line {unread[0]:,} first"
            print(f"{path}: {told}", file=sys.stderr)
    return texts


def facts_of(names: Sequence[str], references: Sequence[str], scores: dict[str, CorpusScore]) -> dict[str, Any]:
    """What is to be told of the files of some systems and of the references, by key.

    Raises:
        UserError: see `texts_of`.
    """
    texts = texts_of([*names, *references])
    systems, known = texts[: len(names)], texts[len(names) :]
    facts: dict[str, Any] = {
        "lines": len(known[0]),
        "references": list(references),
        "systems": [{"file": name, "scores": {}} for name in names],
        "signatures": {name: score.signature(len(references)) for name, score in scores.items()},
    }
    if len(systems) == 1:
        for name, score in scores.items():
            score.update(systems[0], list(zip(*known, strict=True)))
            facts["systems"][0]["scores"][name] = float(score.compute())
        return facts
    compared = compare(scores, systems, known)
    for number, system in enumerate(facts["systems"]):
        system["scores"] = {name: found.scores[number] for name, found in compared.items()}
        system["intervals"] = {name: found.intervals[number] for name, found in compared.items()}
        if number:
            for test in TESTS:
                system[test] = {name: getattr(found, test)[number - 1] for name, found in compared.items()}
    for place, test in enumerate(TESTS):
        facts[f"{test}_signatures"] = {name: found.signatures[place] for name, found in compared.items()}
    return facts


def table_of(facts: dict[str, Any]) -> Table:
    """The facts as a table: a column for each score, under each system how it differs from the first."""
    table = Table(box=None, padding=(0, 2), title=f"{facts['lines']:,} lines", title_justify="left")
    table.add_column("", overflow="fold", min_width=18, max_width=40)
    for name in facts["signatures"]:
        table.add_column(name, justify="right", no_wrap=True)
    first, *_ = facts["systems"]
    for system in facts["systems"]:
        shown = [f"{score:.2f}" for score in system["scores"].values()]
        if "intervals" in system:
            shown = [
                f"{score} ± {half:.2f}" for score, (_, half) in zip(shown, system["intervals"].values(), strict=True)
            ]
        table.add_row(system["file"], *shown)
        if system is not first:
            differences = [score - first["scores"][name] for name, score in system["scores"].items()]
            table.add_row("  difference", *(f"{difference:+.2f}" for difference in differences))
            for test in TESTS:
                table.add_row(f"  p, {test}", *(f"{p:.4f}" for p in system[test].values()))
    return table


def score(words: list[str]) -> int:
    """Carry out `stabilize score`."""
    parser = Parser("score", ABOUT)
    parser.add_argument("output", nargs="+", help="a file of translations, plain or gzip")
    parser.add_argument(
        "--reference", action="append", required=True, help="a file of references; once for each that a line has"
    )
    parser.add_argument(
        "--scores",
        nargs="+",
        choices=SCORES,
        default=SCORES,
        help="which (default: all; ter takes longer than all others)",
    )
    parser.add_argument("--bleu_tokenizer", default="13a", help="13a, zh, intl, char, ... (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="write every digit, as JSON")
    chosen = parser.parse_args(words)
    scores = corpus_scores(chosen.scores, chosen.bleu_tokenizer)
    with Console(stderr=True).status("scores are computed"):
        facts = facts_of(chosen.output, chosen.reference, scores)
    if chosen.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return 0
    table, console = table_of(facts), Console()
    needed = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console = Console(width=max(console.width, needed))  # a narrow terminal breaks lines, and loses no digits
    console.print(table)
    for kind in [f"{test}_signatures" for test in TESTS] if len(chosen.output) > 1 else ["signatures"]:
        for name, signature in facts[kind].items():
            console.print(Text(f"{name} {signature}", style="dim"), soft_wrap=True)
    return 0
