"""What every strategy is: a class whose YAML is its signature and whose docstring is its equation."""

from __future__ import annotations

import copy
import importlib
import inspect
from abc import ABC
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from stabilize.errors import UserError

if TYPE_CHECKING:
    from stabilize.strategies.initialization import Role
    from stabilize.strategies.site import Site
    from stabilize.strategies.stabilizer import Stabilizer


class Strategy(ABC):  # noqa: B024  its subclasses, the bases of the axes, have the abstract methods
    """An answer on one axis.

    Each argument of `__init__` is kept under its own name, so that the object can say how it was made (`spec`).
    """

    helps_depth: bool = False
    """True where the method is published as a cure for the vanishing gradient of deep post-norm stacks."""

    def spec(self) -> dict[str, Any]:
        """How to make this object again, in plain values: `{class_path, init_args}`. Checkpoints hold this.

        Raises:
            UserError: the class does not keep an argument under its own name, or keeps one that no checkpoint can hold.
        """
        names = list(inspect.signature(type(self)).parameters)
        lost = [name for name in names if not hasattr(self, name)]
        if lost:
            name = type(self).__name__
            raise UserError(f"{name} does not keep its argument {lost[0]}: __init__ must set self.{lost[0]}")
        arguments = {name: getattr(self, name) for name in names}
        return {
            "class_path": f"{type(self).__module__}.{type(self).__qualname__}",
            "init_args": {name: _plain(value, f"{type(self).__name__}.{name}") for name, value in arguments.items()},
        }

    def form(self, weight: Tensor, site: Site, role: Role) -> nn.Module | None:
        """For a method that reads weights in another form for good: the module that maps `weight`, newly drawn
        `[outputs, inputs]`, to what the model computes with. None leaves it as it is."""
        return None

    def constants(self, site: Site) -> dict[str, float]:
        """The numbers that the method's formula gives at a site, by name; shown on the card."""
        return {}

    def refusals(self, stabilizer: Stabilizer) -> list[str]:
        """Why this part cannot be combined with the others, one sentence each that names both."""
        return []

    def warnings(self, stabilizer: Stabilizer, site: Site, precision: str) -> list[str]:
        """What the literature warns about in this combination at this depth, one sentence each with its source."""
        return []


PLAIN = (type(None), bool, int, float, str, torch.dtype)
"""What `torch.load(weights_only=True)` reads back as it was, in lists, tuples and dicts too."""


def _plain(value: Any, name: str) -> Any:
    """The argument `name` in plain values."""
    if isinstance(value, Strategy):
        return value.spec()
    if type(value) in (list, tuple):
        return type(value)(_plain(item, name) for item in value)
    if type(value) is dict:
        return {key: _plain(item, name) for key, item in value.items()}
    if type(value) not in PLAIN:
        raise UserError(
            f"{name} is a {type(value).__name__}, {value!r}, which a checkpoint cannot hold: "
            "__init__ should take a number or a text, and make of it what it needs"
        )
    return value


def from_spec(spec: dict[str, Any]) -> Any:
    """The object that `spec` describes.

    Raises:
        ImportError, AttributeError: the class is not there (a plug-in that is not installed).
        TypeError: it is not a strategy, or takes other arguments.
    """
    module, _, name = spec["class_path"].rpartition(".")
    chosen = getattr(importlib.import_module(module), name)
    if not (isinstance(chosen, type) and issubclass(chosen, Strategy)):
        raise TypeError(f"{spec['class_path']} is not a strategy")
    return chosen(**{name: _made(value) for name, value in spec["init_args"].items()})


def _made(value: Any) -> Any:
    """What `_plain` was given."""
    if isinstance(value, dict):
        return from_spec(value) if "class_path" in value else {key: _made(item) for key, item in value.items()}
    return type(value)(map(_made, value)) if isinstance(value, list | tuple) else value


class Part(Strategy, nn.Module):
    """A strategy that is placed in the model: a template until `at(site)` makes a copy with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()

    def at(self, site: Site, **needs: Any) -> Self:
        """A copy of this template, built for `site`."""
        placed = copy.deepcopy(self)
        placed.build(site, **needs)
        return placed

    def build(self, site: Site, **needs: Any) -> None:
        """Make the parameters for `site`. `needs` depends on the axis; see its base class.

        A number that is learnt is of shape `[1]`: without a dimension FSDP2 could not share it out.
        """

    def prepare(self, model: nn.Module, batch: Any) -> None:
        """Once, before training: profile the model on a real batch."""

    def after_update(self, update: int) -> None:
        """Once after each update of the optimiser, `update` counted from 1."""

    def drop_update(self) -> None:
        """In place of `after_update` where an update is not made: forget what was gathered for it in the backward."""
