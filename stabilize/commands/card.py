"""The card: what a stabiliser is at this depth, before any training."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stabilize.model import EncoderDecoder, Sizes
from stabilize.strategies import Part, Stabilizer
from stabilize.strategies.menu import entry


def card(
    sizes: Sizes, stabilizer: Stabilizer, decoder_stabilizer: Stabilizer | None, precision: str, vocabulary: int
) -> RenderableType:
    """What the stabiliser does in a model of these sizes: equations, constants, parameters, warnings, papers."""
    title = f"{sizes.encoder_layers}+{sizes.decoder_layers} layers, width {sizes.width}, precision {precision}"
    if decoder_stabilizer is None:
        parts: list[RenderableType] = [_axes(stabilizer, sizes, ("encoder", "decoder"))]
    else:
        parts = []
        for stack, chosen in (("encoder", stabilizer), ("decoder", decoder_stabilizer)):
            parts += [Text(stack, style="bold"), _axes(chosen, sizes, (stack,))]
    model = EncoderDecoder(vocabulary, sizes, stabilizer, decoder_stabilizer, precision)
    strategies = {id(p): p for part in model.modules() if isinstance(part, Part) for p in part.parameters()}
    total, own = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in strategies.values())
    parts.append(Text(f"{total:,} parameters, {own:,} of them in norms and residuals"))
    for warning in warnings(sizes, stabilizer, decoder_stabilizer, precision):
        parts.append(Text(f"warning: {warning}", style="yellow"))
    return Panel(Group(*parts), title=title, title_align="left")


def warnings(sizes: Sizes, stabilizer: Stabilizer, decoder_stabilizer: Stabilizer | None, precision: str) -> list[str]:
    """What the literature warns about in these stacks, each warning once."""
    stacks = (("encoder", stabilizer), ("decoder", decoder_stabilizer or stabilizer))
    found = [w for stack, chosen in stacks for w in chosen.warnings(sizes.site(stack, 1, "layer"), precision)]
    return list(dict.fromkeys(found))


def _arguments(spec: dict[str, Any]) -> str:
    """The arguments of a strategy; one that is a strategy itself with its own in brackets."""
    shown = {
        name: f"{value['class_path'].rpartition('.')[2]}({_arguments(value)})" if isinstance(value, dict) else value
        for name, value in spec["init_args"].items()
    }
    return ", ".join(f"{name}: {value}" for name, value in shown.items())


def _axes(stabilizer: Stabilizer, sizes: Sizes, stacks: tuple[str, ...]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for axis, part in stabilizer.axes.items():
        about = entry(type(part))
        options = _arguments(part.spec())
        lines = [Text(about.equation or about.sentence, style="cyan")]
        if options:
            lines.append(Text(options))
        constants = [
            f"{stack} {name} = {value:.4g}"
            for stack in stacks
            for name, value in part.constants(sizes.site(stack, 1, "layer")).items()
        ]
        if constants:
            lines.append(Text(", ".join(constants)))
        if about.also:
            lines.append(Text(f"also: {about.also}", style="dim"))
        if about.paper:
            lines.append(Text(about.paper, style="dim"))
        table.add_row(axis, type(part).__name__, Group(*lines))
    return table
