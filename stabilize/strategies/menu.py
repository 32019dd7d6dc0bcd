"""What a strategy's docstring says, for the menu and the card."""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

from stabilize.strategies.strategy import Strategy


class Entry(NamedTuple):
    """The parts of a strategy's docstring."""

    sentence: str
    """What it does, in one sentence."""
    equation: str
    """The indented lines after the first sentence."""
    also: str
    """`Also:` what else the method changes."""
    paper: str
    """`Paper:` where it comes from."""


def entry(strategy: type[Strategy]) -> Entry:
    """The parts of a strategy's own docstring; empty where it lacks them."""
    text = inspect.cleandoc(strategy.__dict__.get("__doc__") or "")
    text = re.split(r"^\w+:$", text, maxsplit=1, flags=re.MULTILINE)[0]
    sentence, _, rest = text.partition("\n\n")
    equation = re.findall(r"^    (.+)$", rest, flags=re.MULTILINE)
    parts = dict(re.findall(r"^(Also|Paper): ((?:.+\n?)+?)(?=^Paper:|\n|\Z)", rest, flags=re.MULTILINE))
    also, paper = (" ".join(parts.get(name, "").split()) for name in ("Also", "Paper"))
    return Entry(" ".join(sentence.split()), " ".join(equation), also, paper)


def menu(base: type[Strategy]) -> list[type[Strategy]]:
    """All strategies of an axis that are imported, in the order of their definition."""
    found: list[type[Strategy]] = []
    for child in base.__subclasses__():
        found += [] if inspect.isabstract(child) else [child]
        found += [deeper for deeper in menu(child) if deeper not in found]
    return found
