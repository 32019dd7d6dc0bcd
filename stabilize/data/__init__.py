"""Parallel text -> subwords -> batches of equal cost."""

from stabilize.data.batch import Batch
from stabilize.data.hub_corpus import HubCorpus
from stabilize.data.module import TranslationData
from stabilize.data.parallel_text import ParallelText
from stabilize.data.synthetic import SyntheticCorpus
from stabilize.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "HubCorpus",
    "ParallelText",
    "SyntheticCorpus",
    "Tokenizer",
    "TranslationData",
]
