"""What a stabiliser is at some depth, before any training, in plain text: for the terminal and for the report."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from stabilize.model import Sizes
from stabilize.strategies import AXES, Stabilizer
from stabilize.strategies.menu import entry

BOTH = ("encoder", "decoder")


@dataclass(frozen=True)
class Answer:
    """What stands on one axis."""

    axis: str
    name: str
    equation: str
    options: str
    """Its arguments as they are set."""
    constants: str
    """What its formulas give at this depth."""
    also: str
    """What else the method changes."""
    paper: str


@dataclass(frozen=True)
class Card:
    """The strategies of a model by stack, and what the literature warns about."""

    title: str
    stacks: dict[str, list[Answer]]
    """By stack; one entry without a name where both stacks are alike."""
    warnings: list[str]


def card(sizes: Sizes, stabilizer: Stabilizer, decoder_stabilizer: Stabilizer | None, precision: str) -> Card:
    """What the stabiliser is in a model of these sizes."""
    shown = {"": answers(stabilizer, sizes, BOTH)}
    if decoder_stabilizer is not None:
        chosen = zip(BOTH, (stabilizer, decoder_stabilizer), strict=True)
        shown = {stack: answers(one, sizes, (stack,)) for stack, one in chosen}
    return Card(
        f"{sizes.encoder_layers}+{sizes.decoder_layers} layers, width {sizes.width}, precision {precision}",
        shown,
        warnings(sizes, stabilizer, decoder_stabilizer, precision),
    )


def from_config(config: dict[str, Any]) -> Card:
    """The card of a run from its resolved config.

    Raises:
        Exception: any; the config may be of another version, and its plug-ins may be missing.
    """
    model = config["model"]
    sizes = Sizes(**{field.name: model[field.name] for field in dataclasses.fields(Sizes)})
    decoder = model.get("decoder_stabilizer")
    precision = str(config["trainer"].get("precision") or "32-true")
    return card(sizes, _stabilizer(model["stabilizer"]), _stabilizer(decoder) if decoder else None, precision)


def answers(stabilizer: Stabilizer, sizes: Sizes, stacks: tuple[str, ...]) -> list[Answer]:
    """What stands on each axis, with the constants of some stacks."""
    found = []
    for axis, part in stabilizer.axes.items():
        about = entry(type(part))
        constants = [
            f"{stack} {name} = {value:.4g}"
            for stack in stacks
            for name, value in part.constants(sizes.site(stack, 1, "layer")).items()
        ]
        equation = about.equation or about.sentence
        options = arguments(part.spec())
        found.append(
            Answer(axis, type(part).__name__, equation, options, ", ".join(constants), about.also, about.paper)
        )
    return found


def arguments(spec: dict[str, Any]) -> str:
    """The arguments of a strategy; one that is a strategy itself with its own in brackets."""
    shown = {
        name: f"{value['class_path'].rpartition('.')[2]}({arguments(value)})" if isinstance(value, dict) else value
        for name, value in (spec.get("init_args") or {}).items()
    }
    return ", ".join(f"{name}: {value}" for name, value in shown.items())


def warnings(sizes: Sizes, stabilizer: Stabilizer, decoder_stabilizer: Stabilizer | None, precision: str) -> list[str]:
    """What the literature warns about in these stacks, each warning once."""
    stacks = zip(BOTH, (stabilizer, decoder_stabilizer or stabilizer), strict=True)
    found = [w for stack, chosen in stacks for w in chosen.warnings(sizes.site(stack, 1, "layer"), precision)]
    return list(dict.fromkeys(found))


def _stabilizer(chosen: dict[str, Any]) -> Stabilizer:
    return Stabilizer.from_spec({axis: _complete(chosen[axis]) for axis in AXES})


def _complete(spec: Any) -> Any:
    """A spec as `from_spec` wants it: jsonargparse leaves out `init_args` where a class has none."""
    if not (isinstance(spec, dict) and "class_path" in spec):
        return spec
    return {
        "class_path": spec["class_path"],
        "init_args": {name: _complete(value) for name, value in (spec.get("init_args") or {}).items()},
    }
