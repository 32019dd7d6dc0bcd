"""What was measured so far, small enough to go into every checkpoint."""

from __future__ import annotations

from typing import Any

LIMIT = 512  # rows, even after a million updates


class History:
    """Rows of one number a layer, each with its update, at evenly spaced updates.

    When `LIMIT` rows are full every second one goes, and from then on only every second one is added. Everything is a
    plain list of numbers, because checkpoints are read with `weights_only=True`.
    """

    def __init__(self) -> None:
        self.updates: list[int] = []
        self.rows: list[list[float]] = []
        self.offered = 0
        self.stride = 1
        self.latest = 0
        """The last update that was offered, also where thinning has left it out."""

    def append(self, update: int, row: list[float]) -> None:
        """Add the row of an update, unless thinning leaves it out."""
        if self.offered % self.stride == 0:
            self.updates.append(update)
            self.rows.append(row)
        self.offered += 1
        self.latest = update
        if len(self.rows) == LIMIT:
            self.updates, self.rows, self.stride = self.updates[::2], self.rows[::2], 2 * self.stride

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain lists and numbers."""
        return vars(self) | {"updates": self.updates[:], "rows": self.rows[:]}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> History:
        """Return the history that `state_dict` described."""
        history = cls()
        vars(history).update(state)
        return history
