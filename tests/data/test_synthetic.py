"""The embedded corpus: distinct, disjoint, the same everywhere, and not to be had by copying."""

from __future__ import annotations

from sacrebleu import corpus_bleu

from stabilize.data import SyntheticCorpus


def test_splits_are_disjoint_and_distinct() -> None:
    corpus = SyntheticCorpus(train_pairs=3000, validation_pairs=300, test_pairs=200)
    splits = [corpus.read(split) for split in ("train", "validation", "test")]
    assert [len(split) for split in splits] == [3000, 300, 200]
    assert len({line for split in splits for line in split.source}) == 3500


def test_more_training_text_keeps_the_test() -> None:
    small, large = SyntheticCorpus(train_pairs=10), SyntheticCorpus(train_pairs=1000)
    assert small.read("test") == large.read("test")
    assert small.read("validation") == large.read("validation")
    assert small.read("train").source == large.read("train").source[:10]


def test_the_corpus_seed_decides() -> None:
    seeds = [{}, {"seed": 1}, {"corpus_seed": 1}]
    first, same, other = (SyntheticCorpus(train_pairs=50, **seed).read("train") for seed in seeds)
    assert first == same != other


def test_sentences_are_of_middling_length() -> None:
    lengths = [len(line.split()) for line in SyntheticCorpus(train_pairs=3000).read("train").source]
    assert 6 <= sum(lengths) / len(lengths) <= 14


def test_no_cheap_way_to_a_good_score() -> None:
    corpus = SyntheticCorpus(baselines=True)
    references = corpus.read("test").target
    for name, hypotheses in corpus.baseline_translations().items():
        assert 2 < corpus_bleu(hypotheses, [references]).score < 35, name
