"""What a stabiliser is at some depth, before any training, in plain text: for the terminal and for the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stabilize.model import Sizes
from stabilize.strategies import AXES, Clipping, NoClipping, Stabilizer, Strategy
from stabilize.strategies.menu import entry
from stabilize.strategies.strategy import from_spec

BOTH = ("encoder", "decoder")

OPTIMIZER = {"class_path": "torch.optim.Adam", "init_args": {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-9}}
"""The default of TranslationTask once more: jsonargparse reads a function's arguments only where they are constants."""

SPEED = ("fused", "foreach")
"""Arguments of torch's optimisers that change no number."""


@dataclass(frozen=True)
class Answer:
    """What stands on one axis, or beside the axes."""

    axis: str
    name: str
    equation: str = ""
    options: str = ""
    """Its arguments as they are set."""
    constants: str = ""
    """What its formulas give at this depth."""
    also: str = ""
    """What else the method changes."""
    paper: str = ""


@dataclass(frozen=True)
class Card:
    """The strategies of a model by stack, and what the literature warns about."""

    title: str
    stacks: dict[str, list[Answer]]
    """By stack; one entry without a name where both stacks are alike. What is not the default beside the axes comes
    last in it, or after both stacks."""
    warnings: list[str]


def card(
    sizes: Sizes,
    stabilizer: Stabilizer,
    decoder_stabilizer: Stabilizer | None,
    precision: str,
    beside: Sequence[Answer] = (),
) -> Card:
    """What the stabiliser is in a model of these sizes, and what is not the default `beside` its axes."""
    shown = {"": [*answers(stabilizer, sizes, BOTH), *beside]}
    if decoder_stabilizer is not None:
        chosen = zip(BOTH, (stabilizer, decoder_stabilizer), strict=True)
        shown = {stack: answers(one, sizes, (stack,)) for stack, one in chosen}
        shown |= {"both stacks": [*beside]} if beside else {}
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
    clipping = model.get("clipping")
    others = beside(
        from_spec(_complete(clipping)) if clipping else NoClipping(),
        model.get("z_loss") or 0.0,
        model.get("optimizer") or OPTIMIZER,
    )
    return card(sizes, _stabilizer(model["stabilizer"]), _stabilizer(decoder) if decoder else None, precision, others)


def beside(clipping: Clipping, z_loss: float, optimizer: dict[str, Any]) -> list[Answer]:
    """What a task has beside the axes, where it is not the default.

    Args:
        optimizer: `{class_path, init_args}`.
    """
    found = [] if isinstance(clipping, NoClipping) else [_answer("clipping", clipping)]
    if z_loss:
        equation = "loss + z_loss (log Z)^2, Z the sum of the exponentials of a token's logits"
        found.append(Answer("z_loss", f"{z_loss:g}", equation, paper="Chowdhery et al. 2022, arXiv:2204.02311"))
    if _numbers(optimizer) != _numbers(OPTIMIZER):
        name, arguments = _numbers(optimizer)
        options = ", ".join(f"{key}: {value}" for key, value in arguments.items())
        found.append(Answer("optimizer", name, options=options))
    return found


def _numbers(optimizer: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The class of an optimiser, and those of its arguments that change its numbers."""
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in (optimizer.get("init_args") or {}).items()}
    return optimizer["class_path"].rpartition(".")[2], {k: v for k, v in given.items() if v and k not in SPEED}


def answers(stabilizer: Stabilizer, sizes: Sizes, stacks: tuple[str, ...]) -> list[Answer]:
    """What stands on each axis, with the constants of some stacks."""
    found = []
    for axis, part in stabilizer.axes.items():
        constants = [
            f"{stack} {name} = {value:.4g}"
            for stack in stacks
            for name, value in part.constants(sizes.site(stack, 1, "layer")).items()
        ]
        found.append(_answer(axis, part, ", ".join(constants)))
    return found


def _answer(axis: str, part: Strategy, constants: str = "") -> Answer:
    about = entry(type(part))
    equation = about.equation or about.sentence
    return Answer(axis, type(part).__name__, equation, arguments(part.spec()), constants, about.also, about.paper)


def arguments(spec: dict[str, Any]) -> str:
    """The arguments of a strategy; one that is a strategy itself with its own in brackets."""
    return ", ".join(f"{name}: {_shown(value)}" for name, value in (spec.get("init_args") or {}).items())


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "class_path" in value:
        return f"{value['class_path'].rpartition('.')[2]}({arguments(value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shown(item)}' for key, item in value.items())}}}"
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, list | tuple) else str(value)


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
