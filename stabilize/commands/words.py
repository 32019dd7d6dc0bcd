"""Command lines of the verbs that take no config."""

from __future__ import annotations

import argparse
from typing import NoReturn

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
