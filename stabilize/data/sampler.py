"""Batches of equal cost: as many sentences as fit into a number of tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from stabilize.errors import UserError


class TokenBatches(Sampler[NDArray[np.int64]]):
    """Row numbers, a batch at a time, each with rows x longest sentence <= tokens.

    The longest sentence is that of either side, with its end token; so neither the source positions nor the target
    positions of a batch, padding included, pass the budget. A sentence that is longer than the budget is a batch of
    its own.

    Rows are sorted by target, then source length, and cut into batches. Each epoch shuffles rows of equal lengths
    among themselves before the cut, and the batches after it. So an epoch has its own batches in its own order, but
    every epoch has the same number of them, and hardly any padding.

    Processes share the batches of an epoch: each row goes to exactly one process, and all have the same number of
    batches. In training, where they cannot be dealt out evenly, the largest are halved; where all are single sentences,
    the shortest ones share a batch. In evaluation the batches are the same ones for any number of processes, so that a
    sentence is computed with the same others; where they do not come out even, some processes end with a batch of no
    rows.

    Args:
        source_lengths: tokens of each row's source with the end token, [rows].
        target_lengths: tokens of each row's target with the end token, [rows].
        tokens: the budget of a batch.
        shuffle: false: the longest batches come first, so that memory runs out at once or never.
        evaluation: whether batches may be empty rather than depend on the number of processes.
        seed: of the orders.
        text: a word that changes with the rows.
        rank: which process this is.
        world_size: how many there are.

    Raises:
        UserError: there are fewer rows to train on than processes.
    """

    def __init__(
        self,
        source_lengths: NDArray[np.int64],
        target_lengths: NDArray[np.int64],
        *,
        tokens: int,
        shuffle: bool = True,
        evaluation: bool = False,
        seed: int = 0,
        text: str = "",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if len(target_lengths) < world_size and not evaluation:
            raise UserError(f"{len(target_lengths)} sentence pairs for {world_size} processes: use fewer devices")
        self._shuffle = shuffle
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        snake = np.where(target_lengths % 2, source_lengths, -source_lengths)
        # Sorts of 16 bits take a tenth of the time.
        self._keys = [_small(snake - snake.min(initial=0)), _small(target_lengths)]
        order = self._order(None)
        self._cuts = _cut(np.maximum(source_lengths, target_lengths)[order], tokens)
        if not evaluation:
            self._cuts = _even(self._cuts, world_size)
        self._made_of = {"batches": len(self._cuts) - 1, "tokens": tokens, "seed": seed, "text": text}
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        """Batches of an epoch for this process."""
        return -(-(len(self._cuts) - 1) // self._world_size)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """The batches of this epoch that are left after `position`."""
        generator = np.random.default_rng((self._seed, self.epoch)) if self._shuffle else None
        rows = self._order(generator)
        batches = np.arange(len(self._cuts) - 1)[::-1]
        if generator is not None:
            batches = generator.permutation(batches)
        mine = batches[self._rank :: self._world_size]
        for batch in mine[self.position :]:
            yield rows[self._cuts[batch] : self._cuts[batch + 1]]
        if len(mine) < len(self) and self.position < len(self):
            yield rows[:0]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; a new one starts at its first batch."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The place in the data: epoch, how many of its batches all processes together have used, and what makes it
        this order."""
        return {"epoch": self.epoch, "position": self.position * self._world_size, **self._made_of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place, of as many processes or of others; to the start of its epoch where that was another
        order."""
        self.epoch, used = state["epoch"], state["position"]
        self.position = used // self._world_size
        other = [key for key, value in self._made_of.items() if state.get(key, value) != value]
        if used >= state["batches"]:
            self.position = len(self)
        elif other and used:
            told = ", ".join(f"{key} {state[key]} then and {self._made_of[key]} now" for key in other)
            warnings.warn(
                f"the checkpoint's place in the data is in another order ({told}): the epoch starts again", stacklevel=2
            )
            self.position = 0
        elif twice := used % self._world_size:
            warnings.warn(
                f"{used} batches of the epoch were read, which {self._world_size} processes do not share evenly: the "
                f"last {twice} are read twice",
                stacklevel=2,
            )

    def _order(self, generator: np.random.Generator | None) -> NDArray[np.int64]:
        """Rows sorted by length, equal ones as they come or at random.

        Source lengths rise under one target length and fall under the next: a batch that holds the end of one
        and the start of the next then pads less.
        """
        rows = np.arange(len(self._keys[0]))
        if generator is not None:
            rows[generator.permutation(len(rows))] = rows.copy()
        for key in self._keys:  # the last one decides
            rows = rows[np.argsort(key[rows], kind="stable")]
        return rows


def _small(numbers: NDArray[np.int64]) -> NDArray[np.unsignedinteger[Any]]:
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


def _cut(lengths: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """Where batches start, and the end of the last: as many rows as rows x longest <= tokens allows, at least one."""
    cuts = [0]
    while (start := cuts[-1]) < len(lengths):
        window = lengths[start : start + max(1, tokens // int(lengths[start]))]
        cost = np.arange(1, len(window) + 1) * np.maximum.accumulate(window)
        cuts.append(start + max(1, int(np.searchsorted(cost, tokens, side="right"))))
    return np.array(cuts)


def _even(cuts: NDArray[np.int64], processes: int) -> NDArray[np.int64]:
    """Change batches until each process gets as many as the others."""
    while (len(cuts) - 1) % processes:
        rows = np.diff(cuts)
        largest = int(rows.argmax())
        if rows[largest] > 1:
            cuts = np.insert(cuts, largest + 1, cuts[largest] + rows[largest] // 2)
        else:
            return np.delete(cuts, np.arange(1, 1 + len(rows) % processes))
    return cuts
