"""Beam search over cached keys and values.

**Length** has one meaning here: the number of tokens, the end mark counted where there is one, begin mark and padding
never. It is the length of a source sentence, of a hypothesis, in the limit and in the length penalty.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stabilize.errors import UserError
from stabilize.model.cache import Cache
from stabilize.model.transformer import EncoderDecoder
from stabilize.tokens import BEGIN, END, PAD, UNKNOWN


class Hypothesis(NamedTuple):
    """A translation: its tokens without begin and end mark, and its score, see `BeamSearch`."""

    ids: list[int]
    score: float
    truncated: bool
    """Whether the length limit came before the end mark."""


@dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """Search for the hypotheses with the greatest score, log p over a power of their length.

        average:  score = log p / length ** length_penalty
        gnmt:     score = log p / ((5 + length) / 6) ** length_penalty        (Wu et al. 2016, arXiv:1609.08144)

    In every step the `beam` most probable continuations of a sentence are kept. One that ends with the end mark is
    finished, and its place in the beam stays empty: a beam of 1 is greedy search. A sentence is done when none of its
    unfinished hypotheses could still be among the best, even if it lost no more probability up to the greatest length
    allowed. It is also done at that length; where too few have finished by then, unfinished hypotheses, marked as
    truncated, come after those that have. The unknown token, which says nothing to a reader, is never taken.

    Args:
        beam: hypotheses kept for a sentence; 1 is greedy search.
        normalization: what log p is divided by, `average` or `gnmt`, which favours long hypotheses less.
        length_penalty: its exponent; 0 compares log p, 1 of `average` its mean per token, 0.6 of `gnmt` is usual.
        maximum_ratio: greatest length of a hypothesis for each token of the source; see `maximum_extra`.
        maximum_extra: greatest length of a hypothesis = maximum_ratio * source length (rounded down) + maximum_extra.
        minimum_length: least length at which a hypothesis may end; 1 allows an empty one.
    """

    beam: int = 5
    normalization: Literal["average", "gnmt"] = "average"
    length_penalty: float = 1.0
    maximum_ratio: float = 2.0
    maximum_extra: int = 10
    minimum_length: int = 1

    def __post_init__(self) -> None:
        least = {"beam": 1, "length_penalty": 0, "maximum_ratio": 0, "maximum_extra": 1, "minimum_length": 1}
        for name, value in asdict(self).items():
            if name in least and not least[name] <= value < math.inf:
                raise UserError(f"{name} of BeamSearch is {value}; a finite number, {least[name]} or more, would do")
        if self.normalization not in ("average", "gnmt"):
            raise UserError(f"normalization of BeamSearch is {self.normalization}; average or gnmt would do")

    def __call__(self, model: EncoderDecoder, source: Tensor) -> list[Hypothesis]:
        """Translate `source` [batch, source length]: the best hypothesis of each sentence, in order; see `n_best`."""
        return [found[0] for found in self.n_best(model, source, 1)]

    @torch.no_grad()
    def n_best(self, model: EncoderDecoder, source: Tensor, count: int) -> list[list[Hypothesis]]:
        """The `count` best hypotheses of each sentence of `source` [batch, source length], best first, all different.

        There are fewer, but at least one, where the beam found no more. What is found for a sentence does not depend on
        the others in the batch. A model that gives NaN ends the search with what was found before. Putting the model
        into evaluation mode, and back, is the caller's part.

        Raises:
            UserError: more hypotheses than the beam holds.
        """
        if not 1 <= count <= self.beam:
            raise UserError(f"{count} hypotheses of a sentence with a beam of {self.beam}; 1 to {self.beam} would do")
        if not len(source):
            return []
        lengths = (source != PAD).sum(1).tolist()
        limits = [int(self.maximum_ratio * length) + self.maximum_extra for length in lengths]
        if model.longest is not None:
            limits = [min(limit, model.longest) for limit in limits]
        best, tree = _Best(len(source), count, source.device), _Tree()

        # Sentences still open, and some others until it pays to leave them out. Each has the same number of places for
        # hypotheses, one with the begin mark at first, then as many as the beam is wide.
        sentence = torch.arange(len(source), device=source.device)  # [sentences], place in the batch
        limit = torch.tensor(limits, dtype=torch.float32, device=source.device)  # [sentences]
        unfinished = torch.full((len(source),), self.beam, device=source.device)  # [sentences], that may still finish
        log_p = torch.zeros_like(limit)[:, None]  # [sentences, places], -inf: none
        node = torch.full((len(source), 1), -1, device=source.device)  # [sentences, places], number in the tree
        last = torch.full((len(source), 1), BEGIN, device=source.device)  # [rows, 1], rows: hypotheses to go on with
        memory, cache, length = model.encode(source), Cache(), 0

        while len(last):
            length += 1
            hidden = model.decode(last, memory, cache)
            step, token = map(cache.by_sentence, self._continuations(model.project(hidden[:, -1]), length))
            continued = (log_p[..., None] + step.view(*log_p.shape, -1)).flatten(1)
            log_p, choice = continued.topk(min(self.beam, continued.size(1)))
            parent, token = choice // (continued.size(1) // node.size(1)), token.gather(1, choice)
            node = tree.grow(node.gather(1, parent), token)

            place = torch.arange(log_p.size(1), device=source.device)
            log_p = log_p.where(place < unfinished[:, None], -math.inf)
            ended = (token == END) & (log_p > -math.inf)
            cut = (limit == length)[:, None] & (log_p > -math.inf) & ~ended
            best.offer(sentence, node, self._score(log_p, length).where(ended | cut, -math.inf), ended)

            unfinished = unfinished - ended.sum(1)
            log_p = log_p.where(~ended, -math.inf)
            can_win = self._score(log_p.amax(1), limit) > best.score[sentence, -1]
            log_p = log_p.where((can_win & (length < limit))[:, None], -math.inf)
            if 4 * len(last) <= 3 * log_p.numel():  # by hypotheses, which are counted; what stays is moved, not at once
                kept = (log_p > -math.inf).any(1).nonzero().squeeze(1)
                if 0 < 4 * len(kept) <= 3 * len(log_p):
                    memory = memory.select(kept)
                    cache.select(kept)
                    sentence, limit, unfinished, log_p, token, parent, node = (
                        x[kept] for x in (sentence, limit, unfinished, log_p, token, parent, node)
                    )
            last = token.flatten()[cache.branch(parent, log_p > -math.inf)][:, None]
        return best.hypotheses(tree)

    def _score(self, log_p: Tensor, length: int | Tensor) -> Tensor:
        """What hypotheses are compared by; under no log p smaller for a greater length."""
        return log_p / (length if self.normalization == "average" else (5 + length) / 6) ** self.length_penalty

    def _continuations(self, logits: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """log p of the most probable tokens that make a hypothesis `length` long, and these: `[rows, beam]`.

        `logits` is `[rows, vocabulary]`. What may not stand there has -inf.
        """
        log_p = logits.float().log_softmax(-1)
        log_p[:, PAD] = log_p[:, UNKNOWN] = log_p[:, BEGIN] = -math.inf
        if length < self.minimum_length:
            log_p[:, END] = -math.inf
        best, token = log_p.topk(min(self.beam, log_p.size(1)))
        return best, token


class _Tree:
    """Every token that a hypothesis took in a step, with a number of its own, and the number of the one before it."""

    def __init__(self) -> None:
        self._before: list[Tensor] = []
        self._token: list[Tensor] = []
        self._size = 0

    def grow(self, before: Tensor, token: Tensor) -> Tensor:
        """The numbers of new tokens, each after the one with the number `before`, or first where that is -1.

        All are of the same shape.
        """
        number = torch.arange(self._size, self._size + token.numel(), device=token.device).view_as(token)
        self._size += token.numel()
        self._before.append(before.flatten())
        self._token.append(token.flatten())
        return number

    def paths(self, numbers: list[int]) -> list[list[int]]:
        """The tokens up to each of these, from the first on."""
        before, token = torch.cat(self._before).tolist(), torch.cat(self._token).tolist()

        def path(number: int) -> list[int]:
            found = []
            while number >= 0:
                found.append(token[number])
                number = before[number]
            return found[::-1]

        return [path(number) for number in numbers]


class _Best:
    """The best hypotheses found so far for each sentence of the batch, finished ones before all others; at first empty
    ones that come after any other."""

    def __init__(self, sentences: int, count: int, device: torch.device) -> None:
        self.node = torch.full((sentences, count), -1, device=device)
        self.score = torch.full((sentences, count), -math.inf, dtype=torch.float32, device=device)
        self.finished = torch.zeros(sentences, count, dtype=torch.bool, device=device)

    def offer(self, sentence: Tensor, node: Tensor, score: Tensor, finished: Tensor) -> None:
        """Take in the hypotheses that end at these numbers of the tree where they are among the best; a score of -inf
        is none. `sentence` is `[sentences]`, the others `[sentences, places]`."""
        score = torch.cat([self.score[sentence], score], 1)
        finished = torch.cat([self.finished[sentence], finished], 1)
        node = torch.cat([self.node[sentence], node], 1)
        by_score = score.argsort(dim=1, descending=True, stable=True)
        finished_first = finished.gather(1, by_score).byte().argsort(dim=1, descending=True, stable=True)
        order = by_score.gather(1, finished_first)[:, : self.score.size(1)]
        for kept, all_ in ((self.score, score), (self.finished, finished), (self.node, node)):
            kept[sentence] = all_.gather(1, order)

    def hypotheses(self, tree: _Tree) -> list[list[Hypothesis]]:
        count = self.node.size(1)
        paths = tree.paths(self.node.flatten().tolist())
        found = [
            Hypothesis([token for token in path if token != END], score, not finished)
            for path, score, finished in zip(
                paths, self.score.flatten().tolist(), self.finished.flatten().tolist(), strict=True
            )
        ]
        by_sentence = [found[first : first + count] for first in range(0, len(found), count)]
        return [[best, *(other for other in others if other.score > -math.inf)] for best, *others in by_sentence]
