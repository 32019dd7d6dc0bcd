"""The cache of a beam against lists of tokens for each hypothesis."""

from __future__ import annotations

from random import Random

import pytest
import torch

from stabilize.kernels import filled_up
from stabilize.model import Cache

BRANCH = (1, "self_attention")


class Beam:
    """A cache whose keys and values are the tokens themselves, and the hypotheses as lists."""

    def __init__(self, sentences: int) -> None:
        self.cache = Cache()
        self.prefixes: list[list[list[int] | None]] = [[[]] for _ in range(sentences)]
        self.next = 1

    def decode(self, length: int) -> None:
        """Give each hypothesis new tokens, and look at what each may look at."""
        of_row = [prefix for places in self.prefixes for prefix in places if prefix is not None]
        new = torch.arange(self.next, self.next + len(of_row) * length).view(len(of_row), length)
        self.next += new.numel()
        mask = self.cache.extend(len(self.prefixes), length, new.device)
        written = self.cache.by_sentence(new)[:, None, :, None].float()
        key, value = self.cache.append(BRANCH, written, -written)
        assert key.equal(-value)
        assert key.size(2) == mask.size(3) == filled_up(key.size(2))
        for prefix, tokens in zip(of_row, new.tolist(), strict=True):
            prefix.extend(tokens)
        sentence = torch.arange(len(mask))[:, None].expand(mask.size(0), mask.size(2))
        rows = zip(self.cache.by_row(mask[:, 0]).flatten(0, 1), self.cache.by_row(sentence).flatten(), strict=True)
        seen = [key[number, 0, :, 0][own].int().tolist() for own, number in rows]
        assert seen == [prefix[: len(prefix) - length + i] for prefix in of_row for i in range(1, length + 1)]

    def branch(self, random: Random, places: int) -> None:
        """Hypotheses take other places, and some leave."""
        parent = torch.zeros(len(self.prefixes), places, dtype=torch.int64)
        living = torch.zeros(len(self.prefixes), places, dtype=torch.bool)
        for number, before in enumerate(self.prefixes):
            there = [place for place, prefix in enumerate(before) if prefix is not None]
            after: list[list[int] | None] = []
            for place in range(places):
                parent[number, place] = chosen = random.choice(there or [0])
                living[number, place] = bool(there) and random.random() < (0.95 if places == 1 else 0.7)
                after.append(list(before[chosen] or []) if living[number, place] else None)
            self.prefixes[number] = after
        rows = self.cache.branch(parent, living)
        assert rows.tolist() == living.flatten().nonzero().squeeze(1).tolist()

    def leave(self) -> None:
        """Leave out the sentences that have no hypothesis; `branch` comes next."""
        kept = [number for number, places in enumerate(self.prefixes) if any(prefix is not None for prefix in places)]
        self.cache.select(torch.tensor(kept))
        self.prefixes = [self.prefixes[number] for number in kept]


@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_a_hypothesis_sees_its_own_tokens_and_no_others(seed: int, places: int) -> None:
    random = Random(seed)
    beam = Beam(4)
    beam.decode(1)
    for step in range(40):
        beam.branch(random, places)
        if not any(prefix is not None for of_one in beam.prefixes for prefix in of_one):
            break
        beam.decode(random.choice([1, 1, 2]))
        if step % 4 == 3:
            beam.leave()
            beam.branch(random, places)
            if not beam.prefixes or not any(prefix is not None for of_one in beam.prefixes for prefix in of_one):
                break
            beam.decode(1)


def test_columns_that_nobody_goes_on_from_are_given_to_others() -> None:
    """Of a beam of four whose hypotheses all go on from the same one, five tokens live on in each step."""
    cache, widest = Cache(), 0
    for step in range(200):
        cache.extend(1, 1, torch.device("cpu"))
        new = torch.zeros(1, 1, 1 if step == 0 else 4, 1)
        widest = max(widest, cache.append(BRANCH, new, new)[0].size(2))
        cache.branch(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.bool))
    assert cache.length == 200
    assert widest < 2 * 200 + 2 * 16, "not four columns a step"
