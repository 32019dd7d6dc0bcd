"""Command lines of the verbs that take no config."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any, NoReturn

import docstring_parser

from stabilize.errors import UserError


class Parser(argparse.ArgumentParser):
    """One whose mistakes are told like all others of the command.

    Args:
        verb: of `stabilize`.
        description: shown by --help.
    """

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(f"stabilize {verb}", description=description, allow_abbrev=False)
        self._verb = verb

    def error(self, message: str) -> NoReturn:
        """Raise what would end the process."""
        raise UserError(f"{self._verb}: {message}; stabilize {self._verb} --help tells what it takes")

    def add_settings(self, owner: type) -> None:
        """Add an option for each field of a dataclass, with its type, default and description."""
        told = {entry.arg_name: entry.description for entry in docstring_parser.parse_from_object(owner).params}
        kinds = typing.get_type_hints(owner)
        for field in dataclasses.fields(owner):
            choices = typing.get_args(kinds[field.name]) or None
            self.add_argument(
                f"--{field.name}",
                type=str if choices else kinds[field.name],
                choices=choices,
                default=field.default,
                help=f"{told[field.name]} (default: %(default)s)".replace("\n", " "),
            )


def settings_of(chosen: argparse.Namespace, owner: type) -> dict[str, Any]:
    """The options that `add_settings` added, as arguments of the dataclass."""
    return {field.name: getattr(chosen, field.name) for field in dataclasses.fields(owner)}
