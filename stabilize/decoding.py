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
        best = _Best(len(source), count, max(limits), source.device)

        # All below is about the sentences still open, fewer and fewer; the beam grows from one begin mark to its width.
        sentence = torch.arange(len(source), device=source.device)  # [open], place in the batch
        limit = torch.tensor(limits, dtype=torch.float32, device=source.device)  # [open]
        unfinished = torch.full((len(source),), self.beam, device=source.device)  # [open], hypotheses that may finish
        tokens = torch.full((len(source), 1, 1), BEGIN, device=source.device)  # [open, beam, length + 1]
        log_p = torch.zeros(len(source), 1, dtype=torch.float32, device=source.device)  # [open, beam], -inf: none
        memory, cache, length = model.encode(source), Cache(), 0  # rows: open * beam

        while len(sentence):
            length += 1
            hidden = model.decode(tokens[..., -1].reshape(-1, 1), memory, cache)
            step = self._log_probabilities(model.project(hidden[:, -1]), length).unflatten(0, log_p.shape)
            log_p, choice = (log_p[..., None] + step).flatten(1).topk(min(self.beam, step[0].numel()))
            parent, token = choice // step.size(-1), choice % step.size(-1)
            tokens = torch.cat([tokens.gather(1, parent[..., None].expand(-1, -1, length)), token[..., None]], -1)

            rank = torch.arange(log_p.size(1), device=source.device)
            log_p = log_p.where(rank < unfinished[:, None], -math.inf)
            ended = (token == END) & (log_p > -math.inf)
            cut = (limit == length)[:, None] & (log_p > -math.inf) & ~ended
            best.offer(sentence, tokens[..., 1:], self._score(log_p, length).where(ended | cut, -math.inf), ended)

            unfinished = unfinished - ended.sum(1)
            log_p = log_p.where(~ended, -math.inf)
            can_win = self._score(log_p.amax(1), limit) > best.score[sentence, -1]
            keep = (can_win & (length < limit)).nonzero().squeeze(1)  # the one wait for the device in a step

            rows = (parent + torch.arange(len(parent), device=source.device)[:, None] * step.size(1))[keep].flatten()
            regrouped = len(keep) < len(parent) or step.size(1) < parent.size(1)  # else rows stay with their sentence
            if regrouped:
                memory = memory.select(rows)
            if regrouped or self.beam > 1:
                cache.select(rows)
            sentence, limit, unfinished, tokens, log_p = (x[keep] for x in (sentence, limit, unfinished, tokens, log_p))
        return best.hypotheses()

    def _score(self, log_p: Tensor, length: int | Tensor) -> Tensor:
        """What hypotheses are compared by; under no log p smaller for a greater length."""
        return log_p / (length if self.normalization == "average" else (5 + length) / 6) ** self.length_penalty

    def _log_probabilities(self, logits: Tensor, length: int) -> Tensor:
        """Of the token that makes a hypothesis `length` long; -inf for what may not stand there."""
        log_p = logits.float().log_softmax(-1)
        log_p[:, PAD] = log_p[:, UNKNOWN] = log_p[:, BEGIN] = -math.inf
        if length < self.minimum_length:
            log_p[:, END] = -math.inf
        return log_p


class _Best:
    """The best hypotheses found so far for each sentence of the batch, finished ones before all others; at first empty
    ones that come after any other."""

    def __init__(self, sentences: int, count: int, length: int, device: torch.device) -> None:
        self.ids = torch.full((sentences, count, length), PAD, device=device)
        self.score = torch.full((sentences, count), -math.inf, dtype=torch.float32, device=device)
        self.finished = torch.zeros(sentences, count, dtype=torch.bool, device=device)

    def offer(self, sentence: Tensor, ids: Tensor, score: Tensor, finished: Tensor) -> None:
        """Take in `ids` [open, beam, length] where they are among the best; `score`, `finished` [open, beam].

        A score of -inf is none. Nothing shorter is ever offered later, so that no old token stays behind.
        """
        count, length = self.score.size(1), ids.size(2)
        score = torch.cat([self.score[sentence], score], 1)
        finished = torch.cat([self.finished[sentence], finished], 1)
        ids = torch.cat([self.ids[sentence, :, :length], ids], 1)
        by_score = score.argsort(dim=1, descending=True, stable=True)
        finished_first = finished.gather(1, by_score).byte().argsort(dim=1, descending=True, stable=True)
        order = by_score.gather(1, finished_first)[:, :count]
        self.ids[sentence, :, :length] = ids.take_along_dim(order[..., None], 1)
        self.score[sentence], self.finished[sentence] = score.gather(1, order), finished.gather(1, order)

    def hypotheses(self) -> list[list[Hypothesis]]:
        found = zip(self.ids.tolist(), self.score.tolist(), self.finished.tolist(), strict=True)
        return [
            [
                Hypothesis([i for i in ids if i not in (PAD, END)], score, not whole)
                for place, (ids, score, whole) in enumerate(zip(*of_one, strict=True))
                if place == 0 or score > -math.inf
            ]
            for of_one in found
        ]
