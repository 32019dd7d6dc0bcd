"""What decoding keeps from one token to the next."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stabilize.kernels import filled_up

ROOM = 8
"""Tokens of each hypothesis for which there is room at first."""


class Cache:
    """Keys and values of each attention branch of the decoder, and who may look at them.

    The hypotheses of a sentence stand side by side in **places**, the same number for all sentences, and share the
    sentence's keys and values: attention sees the places of a sentence as it sees positions, `[sentences, heads,
    places * length, head width]`. Those of the source are made once. Those of a target token stand in a column of
    their own, written once, and stay there: the hypotheses are branches of a tree, and a mask says which columns are
    each one's own. So nothing moves when a beam is reordered. Columns that belong to no hypothesis any more make room
    for new ones; the last ones nobody looks at, see `kernels.filled_up`.

    All else in the decoder works on **rows**, the hypotheses that are there, `[rows, length, width]`: sentence after
    sentence, place after place. Until `branch` says otherwise, a sentence has one place, and a row in it.
    """

    def __init__(self) -> None:
        self.length = 0
        """Number of tokens of each hypothesis already decoded."""
        self.source: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        """Keys and values of the source, by layer and role: `[sentences, heads, columns, head width]`."""
        self._target: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        """Those of target tokens: `[sentences, heads, room, head width]`, of which the first columns are written."""
        self._own: Tensor | None = None
        """True where a column is a hypothesis' own: `[sentences, places, columns]`."""
        self._room = 0
        self._rows: Tensor | None = None
        """The place of each row, counted over all sentences; none: every place has its row."""
        self._filling: Tensor | None = None
        """For each place its row, for an empty one the row of another place of the sentence."""

    def extend(self, sentences: int, length: int, device: torch.device) -> Tensor:
        """Make a column for each of `length` new tokens of each place.

        Returns:
            True where they may look: `[sentences, 1, places * length, columns]`.
        """
        if self._own is None:
            self._own = torch.ones(sentences, 1, 0, dtype=torch.bool, device=device)
        sentences, places, columns = self._own.shape
        if columns + places * length > self._room:
            self._rebuild(torch.arange(sentences, device=device), places * length)
        new = torch.ones(places * length, places * length, dtype=torch.bool, device=device).tril()
        if places > 1:
            place = torch.arange(places, device=device).repeat_interleave(length)
            new &= place == place[:, None]
        mask = torch.cat([self._own.repeat_interleave(length, 1), new.expand(sentences, -1, -1)], -1)
        self._own = mask[:, length - 1 :: length]
        self.length += length
        return self.filled(mask, -1)[:, None]

    @staticmethod
    def filled(x: Tensor, dimension: int) -> Tensor:
        """`x` with zeros, or false, for columns that nobody looks at; its columns are counted from the last, -1."""
        size = x.size(dimension)
        return F.pad(x, (0, 0) * (-1 - dimension) + (0, filled_up(size) - size))

    def append(self, branch: tuple[int, str], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values `[sentences, heads, places * length, head width]` into the newest columns.

        Returns:
            All keys and values, `[sentences, heads, columns, head width]`.
        """
        assert self._own is not None
        columns = self._own.size(2)
        seen = filled_up(columns)
        if branch not in self._target:
            shape = (*key.shape[:2], self._room, key.size(3))
            self._target[branch] = key.new_zeros(shape), value.new_zeros(shape)
        buffers = self._target[branch]
        for buffer, new in zip(buffers, (key, value), strict=True):
            buffer[:, :, columns - new.size(2) : columns] = new
        return buffers[0][:, :, :seen], buffers[1][:, :, :seen]

    def by_sentence(self, x: Tensor) -> Tensor:
        """`[rows, length, ...]` as `[sentences, places * length, ...]`; an empty place has what another one has."""
        assert self._own is not None
        x = x if self._filling is None else x.index_select(0, self._filling)
        return x.reshape(self._own.size(0), -1, *x.shape[2:])

    def by_row(self, x: Tensor) -> Tensor:
        """The inverse: `[sentences, places * length, ...]` as `[rows, length, ...]`."""
        assert self._own is not None
        x = x.reshape(self._own[..., 0].numel(), -1, *x.shape[2:])
        return x if self._rows is None else x.index_select(0, self._rows)

    def branch(self, parent: Tensor, living: Tensor) -> Tensor:
        """Let other hypotheses take the places.

        Args:
            parent: `[sentences, places]`, the place of the hypothesis that the one in a place goes on with. There may
                be more or fewer places than before.
            living: `[sentences, places]`, true where there is one.

        Returns:
            The place of each row, counted over all sentences: `[rows]`.
        """
        assert self._own is not None
        if self._own.size(1) > 1 or parent.size(1) > 1:
            self._own = self._own.gather(1, parent[..., None].expand(-1, -1, self._own.size(2)))
        rows = living.flatten().nonzero().squeeze(1)  # in most steps the one wait for the device
        self._rows = self._filling = None
        if 0 < len(rows) < living.numel():
            count = living.flatten().cumsum(0).view_as(living)
            first = count[:, :1] - living[:, :1].long()  # row of a sentence
            self._filling = torch.maximum(count - 1, first).clamp(max=len(rows) - 1).flatten()
            self._rows = rows
        return rows

    def select(self, sentences: Tensor) -> None:
        """Keep the sentences whose numbers are in `sentences`, in that order; a number may come twice.

        Where places were empty, `branch` comes next, before anything is decoded.
        """
        self.source = {
            branch: (key.index_select(0, sentences), value.index_select(0, sentences))
            for branch, (key, value) in self.source.items()
        }
        self._rebuild(sentences, 0)

    def _rebuild(self, sentences: Tensor, new: int) -> None:
        """Move these sentences, and the columns that belong to a hypothesis, to the front of buffers with room for as
        many again, and for `new` ones."""
        assert self._own is not None
        own = self._own.index_select(0, sentences)
        _, places, columns = own.shape
        used = own.any(1)
        count = int(used.sum(1).max()) if columns else 0
        order = used.byte().argsort(dim=1, descending=True, stable=True)[:, :count]
        self._own = own.gather(2, order[:, None].expand(-1, places, -1))
        room, self._room = self._room, filled_up(max(ROOM * places, 2 * (count + new)))

        def moved(buffer: Tensor) -> Tensor:
            heads, width = buffer.size(1), buffer.size(3)
            line = (sentences[:, None, None] * heads + torch.arange(heads, device=order.device)[:, None]) * room
            kept = buffer.view(-1, width).index_select(0, (line + order[:, None]).flatten())
            shape = torch.Size((len(sentences), heads, self._room, width))
            grown = buffer if buffer.shape == shape else buffer.new_zeros(shape)
            grown[:, :, :count] = kept.view(len(sentences), heads, count, width)
            return grown

        self._target = {branch: (moved(key), moved(value)) for branch, (key, value) in self._target.items()}
