"""What a user did wrong, in the user's words."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Collection

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""How a system says that there is no more room."""


class UserError(Exception):
    """One sentence that names the key or file, the value given, and what would do.

    The command line prints it without a traceback and exits with code 2.
    """


class TrainingStoppedError(Exception):
    """Training was ended because it cannot go on well; one sentence says what was seen and what would do.

    The command line prints it without a traceback and exits with code 3.
    """


def at_least(group: str, **numbers: tuple[float, float]) -> None:
    """Check settings of `group`, each given as (value, least).

    Raises:
        UserError: one is below its least, or no number.
    """
    for name, (value, least) in numbers.items():
        if value is None or not value >= least:
            raise UserError(f"{group}.{name} is {value}; {least} is the least that will do")


def known(word: str, names: Collection[str], kind: str) -> str:
    """`word` if it is one of the names.

    Raises:
        UserError: it is not; the nearest are named.
    """
    if word in names:
        return word
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    raise UserError(f"no {kind} {word}; {'nearest: ' + ', '.join(near) if near else 'there are ' + ', '.join(names)}")
