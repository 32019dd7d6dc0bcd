"""Corpus scores whose state adds up: over batches, in any order, and over ranks.

Every score is a function of sums over sentences (of n-gram matches, of edits, of lengths), sacreBLEU's sufficient
statistics. Adding up those integers gives, at any number of ranks, the very number that the `sacrebleu` command prints
for the whole file; a mean of batch or rank scores would not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric as Scorer
from torch import Tensor
from torchmetrics import Metric


class CorpusScore(Metric):
    """A score of a whole corpus against one reference a sentence, on sacreBLEU's scale of 0 to 100.

    sacreBLEU offers no public way to the statistics of chrF and TER, so that this class stands on the two methods that
    every sacreBLEU metric implements and that its own significance tests are built on: sentence statistics, and the
    score of a list of them.

    Args:
        scorer: sacreBLEU's metric.
        size: how many integers that metric counts for a sentence.
    """

    is_differentiable = False
    full_state_update = False

    statistics: Tensor  # int64 [size]: exact, and left alone where a module is cast to another float type

    def __init__(self, scorer: Scorer, size: int) -> None:
        super().__init__()
        self.scorer = scorer
        self.scorer.num_refs = 1  # what sacreBLEU would find in the first batch; so the signature is known before it
        self.add_state("statistics", torch.zeros(size, dtype=torch.int64), dist_reduce_fx="sum")

    @property
    def signature(self) -> str:
        """sacreBLEU's own line on how the score was computed, its version included."""
        return str(self.scorer.get_signature())

    def update(self, hypotheses: Sequence[str], references: Sequence[str]) -> None:
        """Add sentences: detokenised translations, and the raw reference of each.

        Raises:
            ValueError: the two are not of the same number.
        """
        if len(hypotheses) != len(references):
            raise ValueError(f"{len(hypotheses)} hypotheses but {len(references)} references; each needs the other")
        if hypotheses:
            counts = self.scorer._extract_corpus_statistics(hypotheses, [references])
            added = torch.tensor(counts, dtype=torch.int64).sum(0).to(self.statistics.device)
            self.statistics = self.statistics + added  # not in place: it may come out of inference mode

    def compute(self) -> Tensor:
        """The score of all sentences so far, a float64 scalar on the CPU; 0 if there were none."""
        return torch.tensor(self.scorer._aggregate_and_compute([self.statistics.tolist()]).score, dtype=torch.float64)


class CorpusBLEU(CorpusScore):
    """BLEU (Papineni et al. 2002): geometric mean of the precisions of 1- to 4-grams, times the brevity penalty.

    Args:
        tokenize: sacreBLEU's tokeniser: `13a`, `intl`, `zh`, `char`, ...
    """

    higher_is_better = True

    def __init__(self, tokenize: str = "13a") -> None:
        super().__init__(BLEU(tokenize=tokenize), size=2 + 2 * 4)


class CorpusChrF(CorpusScore):
    """chrF2 (Popović 2015): F-score of 1- to 6-grams of characters, recall weighted twice.

    Args:
        word_order: longest n-gram of words counted beside them; 2 is chrF++.
    """

    higher_is_better = True

    def __init__(self, word_order: int = 0) -> None:
        super().__init__(CHRF(word_order=word_order), size=3 * (6 + word_order))


class CorpusTER(CorpusScore):
    """Translation edit rate (Snover et al. 2006): edits, shifts included, per 100 words of the reference."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__(TER(), size=2)
