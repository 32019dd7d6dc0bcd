"""What decoding keeps from one token to the next."""

from __future__ import annotations

from torch import Tensor


class Cache:
    """Keys and values of each attention branch of the decoder, `[rows, heads, length, head width]`."""

    def __init__(self) -> None:
        self.length = 0
        """Number of target tokens already decoded."""
        self.entries: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        """By layer and role."""

    def select(self, rows: Tensor) -> None:
        """Keep the rows whose numbers are in `rows` `[rows kept]`, in that order; a number may come twice."""
        self.entries = {
            place: (key.index_select(0, rows), value.index_select(0, rows))
            for place, (key, value) in self.entries.items()
        }
