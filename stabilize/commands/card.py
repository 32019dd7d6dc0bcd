"""The card in the terminal: what a stabiliser is at this depth, before any training."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stabilize.card import Answer
from stabilize.card import card as facts
from stabilize.model import EncoderDecoder, Sizes
from stabilize.strategies import Part, Stabilizer


def card(
    sizes: Sizes,
    stabilizer: Stabilizer,
    decoder_stabilizer: Stabilizer | None,
    precision: str,
    vocabulary: int,
    beside: Sequence[Answer] = (),
) -> RenderableType:
    """What the stabiliser does in a model of these sizes: equations, constants, parameters, warnings, papers."""
    about = facts(sizes, stabilizer, decoder_stabilizer, precision, beside)
    parts: list[RenderableType] = []
    for stack, answers in about.stacks.items():
        parts += [Text(stack, style="bold")] if stack else []
        parts.append(_axes(answers))
    model = EncoderDecoder(vocabulary, sizes, stabilizer, decoder_stabilizer, precision)
    strategies = {id(p): p for part in model.modules() if isinstance(part, Part) for p in part.parameters()}
    total, own = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in strategies.values())
    parts.append(Text(f"{total:,} parameters, {own:,} of them the stabiliser's own"))
    parts += [Text(f"warning: {warning}", style="yellow") for warning in about.warnings]
    return Panel(Group(*parts), title=about.title, title_align="left")


def _axes(answers: list[Answer]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for answer in answers:
        lines = [
            (answer.equation, "cyan"),
            (answer.options, ""),
            (answer.constants, ""),
            (f"also: {answer.also}" if answer.also else "", "dim"),
            (answer.paper, "dim"),
        ]
        table.add_row(answer.axis, answer.name, Group(*(Text(line, style) for line, style in lines if line)))
    return table
