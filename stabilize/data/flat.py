"""Very many sequences in two arrays, in memory or mapped from files: nothing in them is counted by Python's memory
management, so processes share the pages, and opening them costs the same however many there are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from stabilize.data.tokenizer import Tokenizer
from stabilize.errors import UserError
from stabilize.tokens import END, PAD


class Shared:
    """Whose mapped arrays travel to another process as the names of their files."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: (array.filename, str(array.dtype)) if isinstance(array, np.memmap) else array
            for name, array in vars(self).items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(
            {name: mapped(*value) if isinstance(value, tuple) else value for name, value in state.items()}
        )


class Flat(Shared):
    """Sequences one after the other.

    Args:
        values: of all sequences.
        ends: where each sequence ends in `values`, [sequences].
    """

    def __init__(self, values: NDArray[Any], ends: NDArray[np.int64]) -> None:
        self.values = values
        self.ends = ends

    @classmethod
    def open(cls, path: Path, dtype: str) -> Self:
        """What a `FlatWriter` wrote.

        Raises:
            UserError: the files are damaged.
        """
        flat = cls(mapped(_values(path), dtype), mapped(_ends(path), "int64"))
        if len(flat.values) != (flat.ends[-1] if len(flat) else 0):
            raise UserError(f"{path.parent} is damaged: remove it, and it will be made again")
        return flat

    def __len__(self) -> int:
        return len(self.ends)

    def starts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where some sequences start, [rows]."""
        return np.where(rows > 0, self.ends[rows - 1], 0)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Of all sequences, [sequences]."""
        return np.diff(self.ends, prepend=0)


class Lines(Flat):
    """Lines of text in UTF-8, each with its newline."""

    def __getitem__(self, row: int) -> str:
        (text,) = self.between(row, row + 1)
        return text

    def between(self, first: int, last: int) -> list[str]:
        """The lines from `first` up to and without `last`."""
        if first >= last:
            return []
        start = self.ends[first - 1] if first else 0
        return self.values[start : self.ends[last - 1]].tobytes().decode("utf-8").split("\n")[:-1]


class Sentences(Flat):
    """The ids of lines, each with the end token."""

    @classmethod
    def of(cls, lines: Sequence[str], tokenizer: Tokenizer) -> Self:
        """In memory."""
        ids, lengths = tokenizer.encode_all(lines)
        return cls(ids, np.cumsum(lengths))

    def cut(self, longest: int) -> Self:
        """The first `longest` tokens of each line, of which the end token is the last."""
        lengths = np.minimum(self.lengths, longest)
        places = np.arange(len(self.values)) - np.repeat(self.ends - self.lengths, self.lengths)
        ids, ends = self.values[places < np.repeat(lengths, self.lengths)], np.cumsum(lengths)
        ids[ends - 1] = END
        return type(self)(ids, ends)

    def padded(self, rows: NDArray[np.int64]) -> Tensor:
        """Some lines side by side, filled up with the pad token, [rows, longest], int64."""
        starts = self.starts(rows)[:, None]
        lengths = self.ends[rows, None] - starts
        places = np.arange(lengths.max(initial=0))
        # A place past the end of the flat array is padding anyway.
        ids = self.values.take(starts + places, mode="clip")
        return torch.from_numpy(np.where(places < lengths, ids, PAD).astype(np.int64))

    def entropy(self) -> float:
        """Of single tokens, in nats: what a reader pays a token who knows nothing but how frequent each one is."""
        counts = np.zeros(0, np.int64)
        for start in range(0, len(self.values), 2**24):
            part = np.bincount(self.values[start : start + 2**24], minlength=len(counts))
            part[: len(counts)] += counts
            counts = part
        shares = counts[counts > 0] / max(len(self.values), 1)
        return float(-(shares * np.log(shares)).sum())


class FlatWriter:
    """Writes the two files of a `Flat`, piece by piece; a context, which ends when everything is on the disk.

    Args:
        path: of both files, without their suffixes.
        sequences: of those that are there already, how many are kept.
        values: the same of their values.
    """

    def __init__(self, path: Path, dtype: str, sequences: int = 0, values: int = 0) -> None:
        self.sequences, self.count = sequences, values
        self._dtype = np.dtype(dtype)
        self._values, self._ends = open(_values(path), "ab"), open(_ends(path), "ab")  # noqa: SIM115  see `__exit__`
        self._values.truncate(values * self._dtype.itemsize)
        self._ends.truncate(sequences * 8)

    def add(self, values: ArrayLike, lengths: ArrayLike) -> None:
        """Some sequences more."""
        ends = self.count + np.cumsum(np.asarray(lengths, np.int64))
        self._values.write(np.ascontiguousarray(values, self._dtype).data)
        self._ends.write(ends.data)
        self.sequences += len(ends)
        self.count = int(ends[-1]) if len(ends) else self.count

    def flush(self) -> None:
        """Hand everything to the operating system, where it outlives this process."""
        self._values.flush()
        self._ends.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._values, self._ends):
            with file:
                file.flush()
                os.fsync(file.fileno())


def write_lines(writer: FlatWriter, lines: Iterable[str]) -> None:
    """Add lines of text, which `Lines` will read."""
    encoded = [f"{line}\n".encode() for line in lines]
    writer.add(np.frombuffer(b"".join(encoded), np.uint8), [len(line) for line in encoded])


def _values(path: Path) -> Path:
    return path.with_name(f"{path.name}.values")


def _ends(path: Path) -> Path:
    return path.with_name(f"{path.name}.ends")


def mapped(path: Path | str, dtype: str) -> NDArray[Any]:
    """A file of numbers as an array whose pages are read when they are looked at."""
    if not os.path.getsize(path):  # which cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")
