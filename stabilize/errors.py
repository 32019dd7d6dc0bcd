"""What a user did wrong, in the user's words."""

from __future__ import annotations


class UserError(Exception):
    """One sentence that names the key or file, the value given, and what would do.

    The command line prints it without a traceback and exits with code 2.
    """
