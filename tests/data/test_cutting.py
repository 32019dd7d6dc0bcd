"""Other ways to cut a text: as often as they should be drawn, and a function of the seed in every process."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from stabilize.data import Tokenizer
from stabilize.data.grammar import sentence

random = Random(4)
LINES = [line for _ in range(200) for line in sentence(random)]
KINDS = [("bpe", False), ("bpe", True), ("unigram", False), ("unigram", True)]
TOKENIZERS = {
    (kind, fallback): Tokenizer.train(LINES, vocabulary=450, subwords=kind, byte_fallback=fallback)
    for kind, fallback in KINDS
}
USUAL = {"bpe": 1e-300, "unigram": 1e6}
"""Shares with which the usual way is drawn, always."""
text = (
    st.text(st.sampled_from("aeinst .▁?üß▅\t\u00a0</>Жя🙂D"), max_size=30)
    | st.text(max_size=12)
    | st.sampled_from(LINES)
)


def test_every_process_draws_the_same(tmp_path: Path) -> None:
    tokenizers = [TOKENIZERS[kind, False] for kind in ("bpe", "unigram")]
    for number, tokenizer in enumerate(tokenizers):
        tokenizer.save(tmp_path / f"{number}.model")
    code = (
        "import json, sys; from stabilize.data.tokenizer import Tokenizer; lines = json.load(sys.stdin);"
        "print(json.dumps([[Tokenizer.load(model).sample(line, 0.3, 7) for line in lines] for model in sys.argv[1:]]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, *(str(tmp_path / f"{number}.model") for number in range(2))],
        input=json.dumps(LINES[:50]), text=True, capture_output=True, check=True,
    )  # fmt: skip
    # The lines in another order, and words known from before.
    here = [[tokenizer.sample(line, 0.3, 7) for line in reversed(LINES[:50])][::-1] for tokenizer in tokenizers]
    assert json.loads(process.stdout) == here


@pytest.mark.parametrize(("kind", "fallback"), KINDS)
@given(line=text, seed=st.integers(0, 2**32 - 1))
def test_the_usual_way_is_one_of_them_and_all_say_the_same(kind: str, fallback: bool, line: str, seed: int) -> None:
    tokenizer = TOKENIZERS[kind, fallback]
    assert_usual(tokenizer, kind, line)
    for share in (0.0, 0.3, 0.9):
        assert tokenizer.decode(tokenizer.sample(line, share, seed)) == tokenizer.decode(tokenizer.encode(line))


@pytest.mark.parametrize(("kind", "fallback"), KINDS)
def test_the_usual_way_of_real_text(shared_data: Path, kind: str, fallback: bool) -> None:
    lines = []
    for language in ("en", "de"):
        with gzip.open(shared_data / "wmt" / f"wmt-mix-10k.train.{language}.gz") as file:
            lines += [line.decode().removesuffix("\n") for line in itertools.islice(file, 300)]
    known = lines[::10] if fallback else lines
    tokenizer = Tokenizer.train(known, vocabulary=1200, subwords=kind, byte_fallback=fallback)  # type: ignore[arg-type]
    for line in [*lines, "aa" * 2000, "漢字かな交じり文" * 20]:
        assert_usual(tokenizer, kind, line)


def assert_usual(tokenizer: Tokenizer, kind: str, line: str) -> None:
    ids, usual = tokenizer.sample(line, USUAL[kind], 0), tokenizer.encode(line)
    if kind == "unigram":  # of two ways that are as good, either may be the usual one
        score = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model).GetScore
        assert math.fsum(map(score, ids)) == pytest.approx(math.fsum(map(score, usual)), rel=1e-6)
        assert (len(ids), tokenizer.decode(ids)) == (len(usual), tokenizer.decode(usual))
    else:
        assert ids == usual


def merged(scores: dict[str, float], pieces: tuple[str, ...], apart: frozenset[int], share: float) -> Counter[str]:
    """How probable each end of BPE-dropout is, by walking through them all; apart: pieces that stay off the next."""
    offers = [
        (-scores["".join(pair)], i)
        for i, pair in enumerate(itertools.pairwise(pieces))
        if i not in apart and "".join(pair) in scores
    ]
    if not offers:
        return Counter({" ".join(pieces): 1.0})  # type: ignore[dict-item]
    _, i = min(offers)
    after = (*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :])
    others = frozenset(j - (j > i) for j in apart if j not in (i - 1, i + 1))
    found: Counter[str] = Counter()
    for weight, part in (
        (share, merged(scores, pieces, apart | {i}, share)),
        (1 - share, merged(scores, after, others, share)),
    ):
        for way, probability in part.items():
            found[way] += weight * probability
    return found


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_each_way_is_drawn_as_often_as_it_should_be(kind: str, share: float) -> None:
    tokenizer, words = TOKENIZERS[kind, False], "the old"
    pieces = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    if kind == "bpe":
        scores = {piece: pieces.GetScore(i) for i, piece in enumerate(tokenizer.pieces) if i > 3}
        expected = dict(merged(scores, tuple("▁the▁old"), frozenset(), share))
    else:
        ways = pieces.NBestEncode(words, nbest_size=512, out_type=str)
        weights = [math.exp(share * sum(pieces.GetScore(pieces.PieceToId(i)) for i in way)) for way in ways]
        expected = {" ".join(way): weight / sum(weights) for way, weight in zip(ways, weights, strict=True)}
    assert 20 < len(expected) < 512
    assert sum(expected.values()) == pytest.approx(1)
    number = 4000
    drawn = Counter(" ".join(tokenizer.pieces[i] for i in tokenizer.sample(words, share, s)) for s in range(number))
    assert {*drawn} <= {*expected}
    for way, probability in expected.items():
        # Five standard deviations of a share, and one draw more where they are rare.
        assert abs(drawn[way] - number * probability) < 5 * math.sqrt(number * probability) + 1
