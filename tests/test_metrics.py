"""Corpus scores against sacreBLEU on the whole text at once (FIELD_REPORTS 4.1 to 4.4, 4.6, 4.8)."""

from __future__ import annotations

import copy
import pickle
import random
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.tokenizers import tokenizer_spm

from stabilize.errors import UserError
from stabilize.metrics import CorpusBLEU, CorpusChrF, CorpusScore, CorpusTER

Make = Callable[[], CorpusScore]

SACREBLEU = {
    "bleu": (CorpusBLEU, sacrebleu.BLEU()),
    "bleu, intl": (lambda: CorpusBLEU(tokenizer="intl"), sacrebleu.BLEU(tokenize="intl")),
    "bleu, zh": (lambda: CorpusBLEU(tokenizer="zh"), sacrebleu.BLEU(tokenize="zh")),
    "chrf": (CorpusChrF, sacrebleu.CHRF()),
    "chrf++": (lambda: CorpusChrF(word_order=2), sacrebleu.CHRF(word_order=2)),
    "ter": (CorpusTER, sacrebleu.TER()),
}
against_sacrebleu = pytest.mark.parametrize(("make", "peer"), SACREBLEU.values(), ids=SACREBLEU.keys())
every_score = pytest.mark.parametrize("make", [make for make, _ in SACREBLEU.values()], ids=SACREBLEU.keys())

AWKWARD = [
    ("It cost 1,234.50 in 2019.", "It cost 1.234,50 in 2019."),
    ('He said "no" - twice.', "He said 'no'\u2013twice."),
    ("猫はマットの上に座った。", "猫がマットの上で寝た。"),
    ("Zwei Männer (40\u00a0Jahre) gehen…", "Zwei Männer, 40\u00a0Jahre alt, gehen …"),
    ("", "Ein Hund läuft durch den Schnee."),
    ("Ein Hund läuft durch den Schnee.", ""),
    ("", ""),
    ("the the the the &quot;cat&quot;", "the &amp; cat sat on the mat"),
    ("A line  with trailing space. ", "A line with trailing space."),
    ("Zwei junge Männer stehen auf der Straße.", "Auf der Straße stehen zwei junge Männer."),
]

# Words from a small set, so that longer n-grams match as well, and anything at all.
words = st.lists(st.sampled_from(["der", "Hund", "läuft", "1,5", "(a)", '"', "。", "."]), max_size=12).map(" ".join)
texts = words | st.text(max_size=20)
pairs = st.lists(st.tuples(texts, texts), min_size=1, max_size=12)
with_three = st.lists(st.tuples(texts, texts, texts, texts), min_size=1, max_size=8)


def add(metric: CorpusScore, corpus: Sequence[tuple[str, ...]]) -> None:
    """Each line is a hypothesis and its references."""
    metric.update([line[0] for line in corpus], [line[1:] for line in corpus])


def score_of(make: Make, *batches: Sequence[tuple[str, ...]]) -> float:
    metric = make()
    for batch in batches:
        add(metric, batch)
    return metric.compute().item()


def sacrebleu_of(peer: sacrebleu.BLEU, corpus: Sequence[tuple[str, ...]]) -> float:
    hypotheses, *references = zip(*corpus, strict=True)
    return peer.corpus_score(hypotheses, references).score


@against_sacrebleu
@settings(max_examples=40, deadline=None)
@given(corpus=pairs)
def test_equals_sacrebleu(make: Make, peer: sacrebleu.BLEU, corpus: list[tuple[str, str]]) -> None:
    assert score_of(make, corpus) == sacrebleu_of(peer, corpus)


@against_sacrebleu
@settings(max_examples=20, deadline=None)
@given(corpus=with_three)
def test_equals_sacrebleu_with_three_references(
    make: Make, peer: sacrebleu.BLEU, corpus: list[tuple[str, ...]]
) -> None:
    metric = make()
    for line in corpus:
        add(metric, [line])
    # TER's lengths are means of three, which sacreBLEU adds up as rounded numbers, and we do not.
    tolerance = 1e-12 if make is CorpusTER else 0.0
    assert metric.compute().item() == pytest.approx(sacrebleu_of(peer, corpus), rel=tolerance, abs=0)
    assert metric.signature() == str(peer.get_signature())
    assert "nrefs:3" in metric.signature()


@against_sacrebleu
def test_equals_sacrebleu_on_awkward_lines(make: Make, peer: sacrebleu.BLEU) -> None:
    assert score_of(make, AWKWARD) == sacrebleu_of(peer, AWKWARD)
    for pair in AWKWARD:
        assert score_of(make, [pair]) == sacrebleu_of(peer, [pair])


@every_score
@settings(max_examples=15, deadline=None)
@given(corpus=pairs, seed=st.integers(0, 2**32), size=st.integers(1, 7))
def test_neither_order_nor_batches_matter(make: Make, corpus: list[tuple[str, str]], seed: int, size: int) -> None:
    shuffled = random.Random(seed).sample(corpus, len(corpus))
    batches = [shuffled[i : i + size] for i in range(0, len(shuffled), size)]
    assert score_of(make, *batches) == score_of(make, corpus)


@every_score
def test_ranks_add_up(make: Make) -> None:
    """What a sum over ranks does to the states, with all good sentences on one rank and none on the first."""
    good = [(reference, "x y z", reference) for _, reference in AWKWARD[:4]]
    other = [(*line, "") for line in AWKWARD]
    ranks = [make() for _ in range(3)]
    for rank, corpus in zip(ranks, ([], good, other), strict=True):
        add(rank, corpus)
    together = ranks[0]
    for name, reduction in together._reductions.items():
        setattr(together, name, reduction(torch.stack([getattr(rank, name) for rank in ranks])))
    assert together.compute().item() == score_of(make, good + other)


@against_sacrebleu
def test_signature(make: Make, peer: sacrebleu.BLEU) -> None:
    sacrebleu_of(peer, AWKWARD)
    assert make().signature() == str(peer.get_signature())
    assert f"version:{sacrebleu.__version__}" in make().signature()


def test_the_signature_tells_tokenisers_apart() -> None:
    assert CorpusBLEU().signature() != CorpusBLEU(tokenizer="intl").signature()


@pytest.mark.parametrize("fault", [urllib.error.URLError("no network"), ssl.SSLError("no certificate")])
def test_a_tokeniser_that_has_to_be_downloaded(fault: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sacreBLEU hands on the one fault, and ends the process at the other."""

    def offline(*_: object) -> None:
        raise fault

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    monkeypatch.setattr(tokenizer_spm, "SACREBLEU_DIR", str(tmp_path))
    with pytest.raises(UserError, match=r"flores200 needs a file that cannot be downloaded .*/models of a machine"):
        CorpusBLEU("flores200")


@pytest.mark.parametrize("make", [CorpusBLEU, CorpusChrF])
def test_empty_hypotheses_score_nothing(make: Make) -> None:
    assert score_of(make, [("", reference) for _, reference in AWKWARD]) == 0.0


def test_an_echo_scores_100() -> None:
    echo = [(reference, reference) for _, reference in AWKWARD if reference]
    assert score_of(CorpusBLEU, echo) == pytest.approx(100.0)
    assert score_of(CorpusChrF, echo) == pytest.approx(100.0)
    assert score_of(CorpusTER, echo) == 0.0


def test_one_right_line_of_three_is_not_a_hundred() -> None:
    """What references in the wrong orientation make of it."""
    right = "Zwei junge Männer stehen auf der Straße."
    corpus = [(right, right), ("nichts davon ist wahr", "Ein Hund läuft."), ("gar nichts", "Die Katze schläft heute.")]
    assert 0 < score_of(CorpusBLEU, corpus) < 60
    assert score_of(CorpusBLEU, corpus) == sacrebleu_of(sacrebleu.BLEU(), corpus)
    assert score_of(CorpusBLEU, corpus[::-1]) == score_of(CorpusBLEU, corpus)


def test_references_in_the_wrong_orientation_are_refused() -> None:
    """One list that holds all references, as sacreBLEU's own function takes them."""
    with pytest.raises(ValueError, match="3 hypotheses but references for 1"):
        CorpusBLEU().update(["a", "b", "c"], [["a", "b", "c"]])
    with pytest.raises(TypeError, match="are one text"):
        CorpusBLEU().update(["a", "b", "c"], ["a", "b", "c"])


@every_score
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_nothing_scores_0(make: Make) -> None:
    assert score_of(make) == score_of(make, []) == 0.0


@every_score
@pytest.mark.parametrize("counts", [(2, 3), (3, 2), (0, 1), (1, 0)])
def test_differing_numbers_are_refused(make: Make, counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{counts[0]} hypotheses but references for {counts[1]}"):
        make().update(["a"] * counts[0], [("a",)] * counts[1])


def test_differing_numbers_of_references_are_refused() -> None:
    metric = CorpusBLEU()
    add(metric, [("a", "b", "c")])
    with pytest.raises(ValueError, match="some sentences have 1 and others 2 references"):
        add(metric, [("a", "b")])
    metric.reset()
    with pytest.raises(ValueError, match="some sentences have 1 and others 3 references"):
        add(metric, [("a", "b"), ("a", "b", "c", "d")])
    with pytest.raises(ValueError, match="some sentences have 0 references"):
        add(metric, [("a",)])
    add(metric, [("a", "b")])


@every_score
def test_an_epoch_leaves_nothing_behind(make: Make) -> None:
    metric = make()
    metric.update(["ein Hund"], [("eine Katze", "ein Kater")])
    metric.reset()
    add(metric, AWKWARD)
    assert metric.compute().item() == score_of(make, AWKWARD)


@every_score
def test_survives_what_lightning_does_to_modules(make: Make) -> None:
    """Counts beyond bfloat16's 256 stay exact when the task is cast; copies and pickles go to other processes."""
    corpus = AWKWARD * 40
    metric = make().to("cpu").to(torch.bfloat16).bfloat16()
    add(metric, corpus)
    for same in (metric, metric.to(torch.bfloat16), copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert same.compute().item() == score_of(make, corpus)
