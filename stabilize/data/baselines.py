"""Two translations that need no model: what a trained one must beat by far."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stabilize.data.pairs import Pairs

# More pairs than this would cost minutes and gigabytes: a baseline learns from the first ones.
TRAINING_PAIRS: Final = 100_000


def word_by_word(train: Pairs, source: Iterable[str], *, rounds: int = 5) -> list[str]:
    """Look each word up in a dictionary learnt from the training pairs, and keep the order.

    The dictionary is IBM model 1 (Brown et al. 1993) by expectation maximisation: each target word f of a pair is
    spread over the pair's source words e,

        t(f | e)  <-  sum over pairs and positions of  t(f | e) / sum_e' t(f | e'),  normalised over f.

    A word's entry is its most likely translation; unknown words stay as they are.
    """
    train = train.first(TRAINING_PAIRS)
    e, f = _Text(train.source), _Text(train.target)
    # One link for each target position and each source position of its pair.
    fan = e.line_lengths[f.lines]
    position = np.repeat(np.arange(len(f.words)), fan)
    source_position = e.line_starts[f.lines[position]] + np.arange(len(position)) - np.repeat(np.cumsum(fan) - fan, fan)
    entries, entry = np.unique(e.words[source_position] * len(f.names) + f.words[position], return_inverse=True)
    entry_source, entry_target = np.divmod(entries, len(f.names))
    probability = np.ones(len(entries))
    for _ in range(rounds):
        share = probability[entry]
        share /= np.bincount(position, share)[position]
        expected = np.bincount(entry, share)
        probability = expected / np.bincount(entry_source, expected)[entry_source]
    by_probability = np.argsort(probability)
    best = dict(zip(entry_source[by_probability].tolist(), entry_target[by_probability].tolist(), strict=True))
    dictionary = {name: f.names[best[word]] for word, name in enumerate(e.names) if word in best}
    return [_join(dictionary.get(word, word) for word in _split(line)) for line in source]


def nearest_neighbour(train: Pairs, source: Iterable[str]) -> list[str]:
    """The translation of the training line that is most like the line: cosine of tf-idf vectors of its words."""
    train = train.first(TRAINING_PAIRS)
    known = _Text(train.source)
    entries, counts = np.unique(known.words * len(train) + known.lines, return_counts=True)
    words, lines = np.divmod(entries, len(train))
    rarity = np.log(len(train) / np.bincount(words)) + 1
    weights = counts * rarity[words]
    weights /= np.sqrt(np.bincount(lines, weights**2))[lines]
    starts = np.searchsorted(words, np.arange(len(known.names) + 1))
    number = {name: word for word, name in enumerate(known.names)}
    translations = []
    for line in source:
        similarity = np.zeros(len(train))
        for word, count in Counter(_split(line)).items():
            if word in number:
                here = slice(starts[number[word]], starts[number[word] + 1])
                similarity[lines[here]] += weights[here] * rarity[number[word]] * count
        translations.append(train.target[int(similarity.argmax())])
    return translations


class _Text:
    """Lines as flat arrays of word numbers.

    Attributes:
        names: the distinct words.
        words: number of the word at each position, [positions].
        lines: the line of each position, [positions].
        line_lengths, line_starts: positions of each line, [lines].
    """

    def __init__(self, lines: Iterable[str]) -> None:
        numbers: dict[str, int] = {}
        split = [[numbers.setdefault(word, len(numbers)) for word in _split(line)] for line in lines]
        self.names = list(numbers)
        self.words: NDArray[np.int64] = np.array([word for line in split for word in line], np.int64)
        self.line_lengths: NDArray[np.int64] = np.array([len(line) for line in split], np.int64)
        self.line_starts = np.cumsum(self.line_lengths) - self.line_lengths
        self.lines = np.repeat(np.arange(len(split)), self.line_lengths)


def _split(line: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", line)


def _join(words: Iterable[str]) -> str:
    return re.sub(r" ([.,;:!?])", r"\1", " ".join(words))
