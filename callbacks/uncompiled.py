"""Let compiled code run as it was written for a while: hooks inside it would not be called."""

from __future__ import annotations

from contextlib import ExitStack

import torch

_askers: set[int] = set()
_stance = ExitStack()


def begin(asker: object) -> None:
    """Compile nothing, and use nothing compiled, until all who asked for it have called `end`."""
    if not _askers:
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
    _askers.add(id(asker))


def end(asker: object) -> None:
    """Take back what `asker` asked for, if it did."""
    _askers.discard(id(asker))
    if not _askers:
        _stance.close()
