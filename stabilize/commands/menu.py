"""`stabilize strategies [AXIS] [NAME]`: the menu."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection

from rich.console import Console
from rich.table import Table

from stabilize import plugins
from stabilize.errors import UserError
from stabilize.strategies import AXES, Strategy
from stabilize.strategies.menu import entry, menu

USAGE = """usage: stabilize strategies [AXIS] [NAME]

List the strategies of each axis: one sentence, equation, paper. With an axis, only its own; with an axis and a name,
the whole docstring and the options with their defaults.

axes: {axes}"""


def show(words: list[str]) -> int:
    """Print the menu, an axis, or one strategy."""
    if "-h" in words or "--help" in words:
        print(USAGE.format(axes=", ".join(AXES)))
        return 0
    plugins.load("stabilize.strategies")
    if len(words) > 2:
        raise UserError(f"strategies takes an axis and a name, not {' '.join(words)}")
    chosen = {_known(words[0], AXES, "axis"): AXES[words[0]]} if words else AXES
    if len(words) == 2:
        classes = {strategy.__name__: strategy for strategy in menu(AXES[words[0]])}
        _print_one(classes[_known(words[1], classes, f"{words[0]} strategy")])
        return 0
    for axis, base in chosen.items():
        _print_axis(axis, base)
    return 0


def _known(word: str, names: Collection[str], kind: str) -> str:
    if word in names:
        return word
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    raise UserError(f"no {kind} {word}; {'nearest: ' + ', '.join(near) if near else 'there are ' + ', '.join(names)}")


def _print_axis(axis: str, base: type[Strategy]) -> None:
    table = Table(title=f"model.stabilizer.{axis}", title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for strategy in menu(base):
        about = entry(strategy)
        ours = strategy.__module__.startswith("stabilize.")
        lines = [about.sentence + ("" if ours else f" (third party: {strategy.__module__})")]
        lines += [f"[cyan]{_plain(line)}[/cyan]" for line in (about.equation,) if line]
        lines += [f"[dim]{_plain(about.paper)}[/dim]"] if about.paper else []
        table.add_row(strategy.__name__, "\n".join(lines))
    Console().print(table, "")


def _print_one(strategy: type[Strategy]) -> None:
    print(f"{strategy.__module__}.{strategy.__qualname__}\n")
    print(inspect.getdoc(strategy))
    options = list(inspect.signature(strategy).parameters.values())
    if options:
        print("\nOptions:")
        for option in options:
            default = "" if option.default is option.empty else f" = {option.default!r}"
            print(f"  {option.name}: {option.annotation}{default}")


def _plain(text: str) -> str:
    """Text whose square brackets rich leaves alone."""
    return text.replace("[", r"\[")
