"""YAML without what a reader of it would misunderstand: a key that stands twice or is nothing, aliases without bound.

YAML forbids the first, and its libraries let the last one win. jsonargparse reads through `load` as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jsonargparse._loaders_dumpers import get_yaml_default_loader, yaml_load

from stabilize.errors import UserError

DEEPEST = 24
"""Levels of nesting that are read; a strategy within a strategy takes two. The parser's time doubles every few."""
LARGEST = 10_000
"""Values that are read, each use of an alias counted."""


class Unwanted(yaml.MarkedYAMLError):
    """It is YAML, but will not do."""


def load(text: str) -> Any:
    """The value that `text` is, as jsonargparse takes it: 1e-3 is a number, a date is a text.

    Raises:
        yaml.YAMLError: it is none, or will not do.
    """
    depth = 0
    for event in yaml.parse(text, get_yaml_default_loader()):  # composing comes later, which goes as deep as the text
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        _bounded(depth, 0, event.start_mark)
    root = yaml.compose(text, get_yaml_default_loader())
    found, waiting = 0, [] if root is None else [(root, 1)]
    while waiting:
        node, depth = waiting.pop()
        found += 1
        _bounded(depth, found, node.start_mark)
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            waiting += [(part, depth + 1) for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(part, depth + 1) for part in node.value]
    return yaml_load(text)


def _bounded(depth: int, found: int, mark: Any) -> None:
    if depth > DEEPEST:
        raise Unwanted(problem=f"it is nested deeper than {DEEPEST} levels", problem_mark=mark)
    if found > LARGEST:
        raise Unwanted(problem=f"it has more than {LARGEST} values", problem_mark=mark)


def _check_keys(mapping: yaml.MappingNode) -> None:
    seen: dict[str, Any] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:null":
            raise Unwanted(problem="a word is to stand before the colon", problem_mark=key.start_mark)
        if key.value in seen:
            first = seen[key.value].line + 1
            problem = f"{key.value} stands here for the second time, after line {first}; one of them would do"
            raise Unwanted(problem=problem, problem_mark=key.start_mark)
        seen[key.value] = key.start_mark


def read(path: str | Path, kind: str = "", like: str = "") -> Any:
    """The content of a YAML file.

    Args:
        path: of the file.
        kind: what it is to be, said before its name.
        like: said where there is no such file, such as what else there is.

    Raises:
        UserError: it cannot be read, is no YAML, or will not do.
    """
    try:
        return load(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise UserError(f"{kind}{path} is no text in UTF-8: {error.reason} at byte {error.start}") from error
        raise UserError(f"{kind}{path} cannot be read: {getattr(error, 'strerror', None) or error}{like}") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), str(getattr(error, "problem", None) or error)
        place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        tab = "; YAML indents with spaces, never with a tab" if r"'\t'" in problem else ""
        quotes = "; a text with { or [ in it needs quotes" if "expected ',' or" in problem else ""
        verdict = "will not do" if isinstance(error, Unwanted) else "is no YAML"
        raise UserError(f"{place} {verdict}: {' '.join(problem.split())}{tab}{quotes}") from error
