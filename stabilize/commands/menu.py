"""`stabilize strategies [AXIS] [NAME]`: the menu, the seven axes and clipping beside them, and the bundles."""

from __future__ import annotations

import inspect
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stabilize import plugins
from stabilize.errors import UserError, known
from stabilize.strategies import AXES, Clipping, Strategy
from stabilize.strategies.menu import entry, menu

USAGE = """usage: stabilize strategies [AXIS] [NAME]

List the strategies of each axis: one sentence, equation, paper. With an axis, only its own; with a name, the whole
docstring and the options with their defaults. Last come the published bundles in configs/strategies, each of
them a config to add with -c.

axes: {axes}"""

MENU: dict[str, type[Strategy]] = {**AXES, "clipping": Clipping}
"""What can be chosen from, by axis: the stabiliser's seven, and the task's clipping."""


BUNDLES = "configs/strategies"
"""The folder of the configs of published methods."""


def key(axis: str) -> str:
    """The key in YAML under which a strategy of the axis is chosen."""
    return f"model.stabilizer.{axis}" if axis in AXES else f"model.{axis}"


def show(words: list[str]) -> int:
    """Print the menu, an axis, or one strategy."""
    if "-h" in words or "--help" in words:
        print(USAGE.format(axes=", ".join(MENU)))
        return 0
    plugins.load("stabilize.strategies")
    if len(words) > 2:
        raise UserError(f"strategies takes an axis and a name, not {' '.join(words)}")
    if len(words) == 1 and words[0] not in MENU:
        words = [*_axes_of(words[0])[:1], *words]
    axes = [known(words[0], MENU, "axis")] if words else list(MENU)
    if len(words) == 2:
        classes = {strategy.__name__: strategy for strategy in menu(MENU[words[0]])}
        _print_one(classes[known(words[1], classes, f"{words[0]} strategy")])
        return 0
    for axis in axes:
        _print_axis(axis)
    if not words:
        _print_bundles()
    return 0


def _axes_of(name: str) -> list[str]:
    """The axes that have a strategy called `name`.

    Raises:
        UserError: it is a bundle.
    """
    if name in bundles():
        raise UserError(f"{name} is a bundle; stabilize explain -c {bundles()[name]} shows what it is")
    return [axis for axis, base in MENU.items() if name in {strategy.__name__ for strategy in menu(base)}]


def bundles() -> dict[str, Path]:
    """The configs of published methods by name: the current folder's configs/strategies before the checkout's."""
    folders = (Path(__file__).parents[2] / BUNDLES, Path(BUNDLES))
    found = {path.stem: path for folder in folders for path in folder.glob("*.yaml")}
    return dict(sorted(found.items()))


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table


def _print_bundles() -> None:
    """Each with the first line of its file, which says what it is and whose."""
    table = _table(BUNDLES)
    for name, path in bundles().items():
        with path.open(encoding="utf-8") as lines:
            table.add_row(name, _plain(next(lines, "").removeprefix("#").strip()))
    if table.rows:
        Console().print(table, "")


def _print_axis(axis: str) -> None:
    table = _table(key(axis))
    for strategy in menu(MENU[axis]):
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
            print(f"  {option.name}{_annotated(option.annotation)}{default}")


def _annotated(annotation: object) -> str:
    """An annotation as it was written, whether or not the module keeps annotations as text."""
    if annotation is inspect.Parameter.empty:
        return ""
    return f": {annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)}"


def _plain(text: str) -> str:
    """Text whose square brackets rich leaves alone."""
    return text.replace("[", r"\[")
