"""Other ways to cut a text into subword pieces, each a function of a seed.

SentencePiece draws such ways itself, but salts its generator anew in each process: a seed would say nothing about a run
that is repeated or goes on. So they are drawn here, with the same probabilities.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any, Final

from stabilize.tokens import UNKNOWN

REMEMBERED: Final = 2**16
"""Results that are kept, of the parts of a text, because words come again: some 100 MB."""

WORD: Final = 32
"""Characters of the longest part whose results are kept."""


class Cutting(ABC):
    """Draws ways to cut normalised text into pieces.

    Args:
        ids, scores: of each piece of text.
        byte_ids: of the 256 bytes, with which a character without a piece is spelled; none: it is the unknown token.
    """

    def __init__(self, ids: Mapping[str, int], scores: Mapping[str, float], byte_ids: Sequence[int]) -> None:
        self._ids = ids
        self._scores = scores
        self._byte_ids = byte_ids
        self._joints = {joint for piece in ids for joint in itertools.pairwise(piece)}
        self._longest = max(map(len, ids), default=0)
        self._unknown = min(scores.values(), default=0.0) - 10  # the score of a character without a piece
        self._remembered: dict[tuple[str, Any], Any] = {}

    def draw(self, text: str, share: float, seed: int) -> list[int]:
        """Ids of a way to cut a text; share: above 0, below 1, what it is of says the kind of cutting."""
        random = Random(seed)
        found: list[int] = []
        # Where no piece has two neighbouring characters, every way has a cut: the parts between are drawn one by one.
        joints = self._joints
        cuts = [i for i, joint in enumerate(itertools.pairwise(text), 1) if joint not in joints]
        for start, end in itertools.pairwise((0, *cuts, len(text))):
            found += self._drawn(text[start:end], share, random)
        if UNKNOWN in found:  # SentencePiece writes neighbouring ones as one
            return [i for i, before in zip(found, [None, *found], strict=False) if (i, before) != (UNKNOWN, UNKNOWN)]
        return found

    @abstractmethod
    def _drawn(self, part: str, share: float, random: Random) -> list[int]:
        """Ids of a way to cut a part of a text."""

    def _spelled(self, piece: str) -> list[int]:
        if piece in self._ids:
            return [self._ids[piece]]
        return [self._byte_ids[byte] for byte in piece.encode()] if self._byte_ids else [UNKNOWN]

    def _recalled(self, part: str, detail: Any) -> Any:
        """What `_worked_out` says, from memory where it is a word that was seen before."""
        if len(part) > WORD:
            return self._worked_out(part, detail)
        key = part, detail
        if key not in self._remembered:
            if len(self._remembered) >= REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = self._worked_out(part, detail)
        return self._remembered[key]

    @abstractmethod
    def _worked_out(self, part: str, detail: Any) -> Any:
        """What a draw stands on that takes long, and that chance has no part in."""


class Merging(Cutting):
    """BPE-dropout (Provilkov et al. 2020, arXiv:1910.13267): each merge is left out with probability `share`.

    As in SentencePiece, two neighbours whose merge was left out stay apart until one of them has grown.
    """

    def _drawn(self, part: str, share: float, random: Random) -> list[int]:
        usual: list[int]
        ids: list[int]
        usual, offers = self._recalled(part, ())
        scale = 1 / math.log1p(-share)
        # How many merges are done before the next one that is left out is geometric: one draw, not one for each.
        number = int(math.log(1 - random.random()) * scale)
        if number >= offers:
            return usual
        left_out = []
        while number < 3 * len(part):  # the neighbours at first, and two new pairs for each merge
            left_out.append(number)
            number += 1 + int(math.log(1 - random.random()) * scale)
        ids, _ = self._recalled(part, tuple(left_out))
        return ids

    def _worked_out(self, part: str, left_out: tuple[int, ...]) -> tuple[list[int], int]:
        """Ids after all merges but those with these numbers, and how many merges there were to decide on."""
        numbers = frozenset(left_out)
        scores = self._scores
        length = [1] * len(part)  # of the piece that starts at a character; 0: none does
        previous = [*range(-1, len(part))]  # the start of the piece before
        agenda = [
            (-scores[pair], i, i + 1, i + 2)
            for i, pair in enumerate(map("".join, itertools.pairwise(part)))
            if pair in scores
        ]
        heapify(agenda)
        offers = 0
        while agenda:
            _, start, middle, end = heappop(agenda)
            if (length[start], length[middle]) != (middle - start, end - middle):
                continue  # one of the two is part of another piece by now
            offers += 1
            if offers - 1 in numbers:
                continue
            length[start], length[middle] = end - start, 0
            pairs = [(previous[start], start, end)] if start else []
            if end < len(part):
                previous[end] = start
                pairs.append((start, end, end + length[end]))
            for pair in pairs:
                score = scores.get(part[pair[0] : pair[2]])
                if score is not None:
                    heappush(agenda, (-score, *pair))
        ids = [i for start, size in enumerate(length) if size for i in self._spelled(part[start : start + size])]
        return ids, offers


class Lattice(Cutting):
    """Unigram (Kudo 2018, arXiv:1804.10959): a way x is drawn in proportion to P(x) ** `share`, of all there are.

    Forward sums over the pieces that end at each character, then draws backward from the end.
    """

    def _drawn(self, part: str, share: float, random: Random) -> list[int]:
        lattice: list[tuple[list[int], list[float]]] = self._recalled(part, share)
        end, pieces = len(part), []
        while end:
            starts, sums = lattice[end]
            start = starts[bisect_left(sums, random.random() * sums[-1])]
            pieces.append(part[start:end])
            end = start
        return [i for piece in reversed(pieces) for i in self._spelled(piece)]

    def _worked_out(self, part: str, share: float) -> list[tuple[list[int], list[float]]]:
        """For each end of a piece, where pieces that end there start, and the sums of these starts' probabilities."""
        scores, unknown = self._scores, self._unknown
        logarithms = [0.0]
        lattice: list[tuple[list[int], list[float]]] = [([], [])]
        for end in range(1, len(part) + 1):
            starts = [i for i in range(max(0, end - self._longest), end) if part[i:end] in scores or i == end - 1]
            each = [logarithms[i] + share * scores.get(part[i:end], unknown) for i in starts]
            highest = max(each)
            sums = [*itertools.accumulate(math.exp(value - highest) for value in each)]
            logarithms.append(highest + math.log(sums[-1]))
            lattice.append((starts, sums))
        return lattice
