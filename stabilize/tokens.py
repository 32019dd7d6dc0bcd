"""Ids of the special tokens, the same everywhere."""

from typing import Final

PAD: Final = 0
UNKNOWN: Final = 1
BEGIN: Final = 2
END: Final = 3
