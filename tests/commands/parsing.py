"""The parser of `stabilize fit`, without what the command does after it."""

from __future__ import annotations

import contextlib
import functools

from lightning.pytorch.cli import LightningArgumentParser

from stabilize.commands import training


class ParserBuiltError(Exception):
    """The parser is there; nothing more is wanted."""


class OnlyParser(training.Command):
    """The command up to where it would parse."""

    def parse_arguments(self, parser: LightningArgumentParser, args: object) -> None:
        raise ParserBuiltError


@functools.cache
def fit_parser() -> LightningArgumentParser:
    """Built once: parsing changes nothing in it."""
    command = OnlyParser.__new__(OnlyParser)
    with contextlib.suppress(ParserBuiltError):
        command.__init__(["fit"])
    return command._subcommand_parsers["fit"]
