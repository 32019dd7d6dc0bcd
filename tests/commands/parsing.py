"""The parser of `stabilize fit`, without what the command does after it."""

from __future__ import annotations

import functools

import jsonargparse._typehints
from lightning.pytorch.cli import LightningArgumentParser

from stabilize.commands import training


class _Built(Exception):
    """The parser is there."""


class _OnlyParser(training.Command):
    def parse_arguments(self, parser: LightningArgumentParser, args: object) -> None:
        raise _Built


@functools.cache
def fit_parser() -> LightningArgumentParser:
    """Built once: parsing changes nothing in it."""
    command = _OnlyParser.__new__(_OnlyParser)
    try:
        command.__init__([])
    except _Built:
        pass
    return command._subcommand_parsers["fit"]
