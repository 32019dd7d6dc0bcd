"""Corpus scores whose state adds up: over batches, in any order, and over ranks.

Every score is a function of sums over sentences (of n-gram matches, of edits, of lengths), sacreBLEU's sufficient
statistics. Adding up those integers gives, at any number of ranks, the very number that the `sacrebleu` command prints
for the whole file; a mean of batch or rank scores would not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, cast

import torch
from sacrebleu import significance
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric as Scorer
from sacrebleu.utils import SACREBLEU_DIR
from torch import Tensor
from torchmetrics import Metric

from stabilize.errors import UserError

ScoreName = Literal["bleu", "chrf", "chrf++", "ter"]


class CorpusScore(Metric):
    """A score of a whole corpus against one or several references a sentence, on sacreBLEU's scale of 0 to 100.

    sacreBLEU offers no public way to the statistics of chrF and TER, so that this class stands on the two methods that
    every sacreBLEU metric implements and that its own significance tests are built on: sentence statistics, and the
    score of a list of them.

    Args:
        scorer: sacreBLEU's metric.
        size: how many integers that metric counts for a sentence.
    """

    is_differentiable = False
    full_state_update = False

    # Integers: exact, and left alone where a module is cast to another float type.
    statistics: Tensor
    """Sums over sentences, times the number of references [size]: that makes whole numbers of TER's lengths too, which
    are means over the references of a sentence."""
    references: Tensor
    """How many a sentence has; 0 before the first."""

    def __init__(self, scorer: Scorer, size: int) -> None:
        super().__init__()
        self.scorer = scorer
        self.add_state("statistics", torch.zeros(size, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("references", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")

    def signature(self, references: int | None = None) -> str:
        """sacreBLEU's own line on how the score is computed, its version included.

        Args:
            references: how many a sentence has; none: as many as in the sentences so far, 1 before the first.
        """
        self.scorer.num_refs = references or max(int(self.references), 1)  # else found when references are read
        return str(self.scorer.get_signature())

    def update(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        """Add sentences: detokenised translations, and the raw references of each.

        Raises:
            TypeError: the references of a sentence are a text, whose characters would be taken for references.
            ValueError: the two are not of the same number, or not all sentences have as many references.
        """
        if len(hypotheses) != len(references):
            raise ValueError(f"{len(hypotheses)} hypotheses but references for {len(references)}; each needs the other")
        if any(isinstance(own, str) for own in references):
            raise TypeError("the references of a sentence are one text; a tuple of one or several would do")
        if not hypotheses:
            return
        before = int(self.references)
        numbers = {len(own) for own in references} | ({before} if before else set())
        if len(numbers) > 1 or 0 in numbers:
            told = " and others ".join(map(str, sorted(numbers)))
            raise ValueError(f"some sentences have {told} references; one or more, and as many for all, would do")
        (number,) = numbers
        counts = self.scorer._extract_corpus_statistics(hypotheses, list(zip(*references, strict=True)))
        added = (torch.tensor(counts, dtype=torch.float64).sum(0) * number).round().long()
        # Not in place: they may come out of inference mode.
        self.statistics = self.statistics + added.to(self.statistics.device)
        self.references = torch.full_like(self.references, number)

    def compute(self) -> Tensor:
        """The score of all sentences so far, a float64 scalar on the CPU; 0 if there were none."""
        sums = [count / max(int(self.references), 1) for count in self.statistics.tolist()]
        return torch.tensor(self.scorer._aggregate_and_compute([sums]).score, dtype=torch.float64)


class CorpusBLEU(CorpusScore):
    """BLEU (Papineni et al. 2002): geometric mean of the precisions of 1- to 4-grams, times the brevity penalty.

    Args:
        tokenizer: sacreBLEU's: `13a`, `intl`, `zh`, `char`, ...

    Raises:
        UserError: sacreBLEU has no such tokeniser, or lacks a package or a file for it.
    """

    higher_is_better = True

    def __init__(self, tokenizer: str = "13a") -> None:
        if tokenizer not in BLEU.TOKENIZERS:
            raise UserError(f"the tokeniser of BLEU is {tokenizer}; {', '.join(sorted(BLEU.TOKENIZERS))} would do")
        try:
            scorer = BLEU(tokenize=tokenizer)
        except (ImportError, RuntimeError) as error:
            raise UserError(f"BLEU with the tokeniser {tokenizer} cannot be had: {error}") from error
        except (OSError, SystemExit) as error:  # the second is how sacreBLEU ends some downloads
            raise UserError(
                f"BLEU with the tokeniser {tokenizer} needs a file that cannot be downloaded ({error}); "
                f"{SACREBLEU_DIR}/models of a machine that has it, copied to here, would do"
            ) from error
        super().__init__(scorer, size=2 + 2 * 4)


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


def corpus_scores(names: Iterable[ScoreName], bleu_tokenizer: str = "13a") -> dict[str, CorpusScore]:
    """New scores by name.

    Args:
        names: which.
        bleu_tokenizer: see `CorpusBLEU`.

    Raises:
        UserError: see `CorpusBLEU`.
    """
    makers: dict[ScoreName, Callable[[], CorpusScore]] = {
        "bleu": lambda: CorpusBLEU(bleu_tokenizer),
        "chrf": CorpusChrF,
        "chrf++": lambda: CorpusChrF(word_order=2),
        "ter": CorpusTER,
    }
    return {name: makers[name]() for name in names}


class Comparison(NamedTuple):
    """A score of some systems, and how likely chance alone makes each differ so much from the first."""

    scores: list[float]
    intervals: list[tuple[float, float]]
    """Mean and half width of the 95 % interval over bootstrap samples, by system."""
    bootstrap: list[float]
    """p of the paired bootstrap test (Koehn 2004), by system after the first."""
    randomization: list[float]
    """p of approximate randomisation (Riezler and Maxwell 2005), by system after the first."""
    signatures: tuple[str, str]
    """Of the bootstrap test and of the other, with numbers of samples and seed."""


def compare(
    scores: dict[str, CorpusScore], systems: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> dict[str, Comparison]:
    """Compare the translations of several systems with the first one's, by sacreBLEU's significance tests.

    Args:
        scores: by which scores.
        systems: all lines of each system.
        references: all lines of each reference.
    """
    for score in scores.values():  # each system is counted once, not in each test: TER takes its time
        counting = functools.cache(score.scorer._extract_corpus_statistics)
        score.scorer._extract_corpus_statistics = counting  # type: ignore[method-assign]
    named: list[tuple[str, Sequence[str]]] = [(str(number), tuple(lines)) for number, lines in enumerate(systems)]
    scorers = {name: score.scorer for name, score in scores.items()}
    kept = tuple(map(tuple, references))
    (bs_signatures, bs), (ar_signatures, ar) = (
        significance.PairedTest(named, scorers, kept, kind)() for kind in ("bs", "ar")
    )
    found = {}
    for name, own in zip(scores, bs_signatures, strict=True):  # `own` is sacreBLEU's name of the score
        by_bs, by_ar = cast("list[significance.Result]", bs[own]), cast("list[significance.Result]", ar[own])
        found[name] = Comparison(
            [result.score for result in by_bs],
            [(float(cast(float, result.mean)), float(cast(float, result.ci))) for result in by_bs],
            [_p_value(by_bs[0], result) for result in by_bs[1:]],
            [_p_value(by_ar[0], result) for result in by_ar[1:]],
            (str(bs_signatures[own]), str(ar_signatures[own])),
        )
    return found


def _p_value(first: significance.Result, other: significance.Result) -> float:
    """sacreBLEU's, but for equal scores, which it gives the smallest p of all."""
    return 1.0 if first.score == other.score else cast(float, other.p_value)
