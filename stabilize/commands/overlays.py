"""Command lines over which further configs are laid, each by itself, for verbs that set one beside the other."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from jsonargparse import Namespace

from stabilize.commands.menu import bundles
from stabilize.commands.mistakes import CONFIG, options
from stabilize.commands.training import Command
from stabilize.errors import UserError, known


class OverlayCommand(Command):
    """A command line, and others that have one more config."""

    def with_overlay(self, path: Path | None) -> Namespace:
        """What the words say, with the config at `path` after them if there is one.

        Raises:
            UserError: a mistake in that file.
        """
        overlay = [] if path is None else ["--config", str(path)]
        return self.parsed([*self.words, *overlay])[self.verb]

    @property
    def name(self) -> str:
        """What the config is called by itself: after its last file."""
        given = [path for option, path in options(self.words[1:]) if option in CONFIG]
        return Path(given[-1]).stem if given else "defaults"


def paths_of(names: Sequence[str], option: str = "strategies") -> dict[str, Path]:
    """The config of each name of configs/strategies, or path, that `option` gives, by the name it is shown under.

    Raises:
        UserError: there is no such config, or none is asked for.
    """
    menu = bundles()
    if not names:
        raise UserError(f"{option} is empty; --{option} post_ln pre_ln would do")
    found = {
        name: Path(name) if name.endswith((".yaml", ".yml")) else menu[known(name, menu, "strategy config")]
        for name in names
    }
    stems = [path.stem for path in found.values()]
    return {path.stem if stems.count(path.stem) == 1 else name: path for name, path in found.items()}


def gathered(words: Sequence[str], lists: Collection[str]) -> list[str]:
    """The words, with those after an option of `lists`, up to the next option, made one, as a list in YAML."""
    found: dict[str, list[str]] = {}
    rest: list[str] = []
    takes: list[str] | None = None
    for word in words:
        if word in lists:
            takes = found.setdefault(word, [])
        elif takes is None or re.match(r"-\D", word):
            takes = None
            rest.append(word)
        else:
            takes.append(word)
    return rest + [f"{option}=[{', '.join(values)}]" for option, values in found.items()]
