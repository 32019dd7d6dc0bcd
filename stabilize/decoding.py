"""Beam search over cached keys and values.

**Length** has one meaning here: the number of tokens, the end mark counted where there is one, begin mark and padding
never. It is the length of a source sentence, of a hypothesis, in the limit and in the length penalty.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stabilize.errors import UserError
from stabilize.model.cache import Cache
from stabilize.model.transformer import EncoderDecoder
from stabilize.tokens import BEGIN, END, PAD


class Hypothesis(NamedTuple):
    """A translation: its tokens without begin and end mark, and its score, log p / length ** length_penalty."""

    ids: list[int]
    score: float
    truncated: bool
    """Whether the search ended at the length limit before any hypothesis came to its end mark."""


@dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """Search for the hypothesis with the greatest log p / length ** length_penalty (Wu et al. 2016, arXiv:1609.08144).

    In every step the `beam` most probable continuations of a sentence are kept. One that ends with the end mark is
    finished, and its place in the beam stays empty: a beam of 1 is greedy search. A sentence is done when none of its
    unfinished hypotheses could still win, even if it lost no more probability up to the greatest length allowed. It is
    also done at that length; where nothing has finished by then, the best unfinished hypothesis is the result, marked
    as truncated.

    Args:
        beam: hypotheses kept for a sentence; 1 is greedy search.
        length_penalty: exponent of the length that log p is divided by; 0 compares log p, 1 its mean per token.
        maximum_ratio: greatest length of a hypothesis for each token of the source; see `maximum_extra`.
        maximum_extra: greatest length of a hypothesis = maximum_ratio * source length (rounded down) + maximum_extra.
        minimum_length: least length at which a hypothesis may end; 1 allows an empty one.
    """

    beam: int = 5
    length_penalty: float = 1.0
    maximum_ratio: float = 2.0
    maximum_extra: int = 10
    minimum_length: int = 1

    def __post_init__(self) -> None:
        least = {"beam": 1, "length_penalty": 0, "maximum_ratio": 0, "maximum_extra": 1, "minimum_length": 1}
        for name, value in asdict(self).items():
            if not least[name] <= value < math.inf:
                raise UserError(f"{name} of BeamSearch is {value}; a finite number, {least[name]} or more, would do")

    @torch.no_grad()
    def __call__(self, model: EncoderDecoder, source: Tensor) -> list[Hypothesis]:
        """Translate `source` [batch, source length]: the best hypothesis of each sentence, in order.

        What is found for a sentence does not depend on the others in the batch. A model that gives NaN ends the search
        with what was found before. Putting the model into evaluation mode, and back, is the caller's part.
        """
        lengths = (source != PAD).sum(1).tolist()
        limits = [int(self.maximum_ratio * length) + self.maximum_extra for length in lengths]
        if model.longest is not None:
            limits = [min(limit, model.longest) for limit in limits]
        best = _Best(len(source), max(limits, default=0), source.device)

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
            cut = (length == limit) & ~ended.any(1) & (best.score[sentence] == -math.inf)
            offered = self._score(log_p, length).where(ended | cut[:, None], -math.inf)
            best.offer(sentence, tokens[..., 1:], offered, truncated=cut)

            unfinished = unfinished - ended.sum(1)
            log_p = log_p.where(~ended, -math.inf)
            can_win = self._score(log_p.amax(1), limit) > best.score[sentence]
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
        """What hypotheses are compared by."""
        return log_p / length**self.length_penalty

    def _log_probabilities(self, logits: Tensor, length: int) -> Tensor:
        """Of the token that makes a hypothesis `length` long; -inf for what may not stand there."""
        log_p = logits.float().log_softmax(-1)
        log_p[:, PAD] = log_p[:, BEGIN] = -math.inf
        if length < self.minimum_length:
            log_p[:, END] = -math.inf
        return log_p


class _Best:
    """The best hypothesis found so far for each sentence of the batch; at first an empty one that any other beats."""

    def __init__(self, sentences: int, length: int, device: torch.device) -> None:
        self.ids = torch.full((sentences, length), PAD, device=device)
        self.score = torch.full((sentences,), -math.inf, dtype=torch.float32, device=device)
        self.truncated = torch.ones(sentences, dtype=torch.bool, device=device)

    def offer(self, sentence: Tensor, ids: Tensor, score: Tensor, truncated: Tensor) -> None:
        """Take the best of `ids` [open, beam, length] by `score` [open, beam] where it beats what is there.

        `sentence` and `truncated` are [open]. Nothing shorter is ever offered later, so that no old token stays behind.
        """
        score, place = score.max(1)
        better, length = score > self.score[sentence], ids.size(2)
        ids = ids.take_along_dim(place[:, None, None], 1).squeeze(1)
        self.ids[sentence, :length] = ids.where(better[:, None], self.ids[sentence, :length])
        self.score[sentence] = score.where(better, self.score[sentence])
        self.truncated[sentence] = truncated.where(better, self.truncated[sentence])

    def hypotheses(self) -> list[Hypothesis]:
        found = zip(self.ids.tolist(), self.score.tolist(), self.truncated.tolist(), strict=True)
        return [Hypothesis([i for i in ids if i not in (PAD, END)], score, cut) for ids, score, cut in found]
