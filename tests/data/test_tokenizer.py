"""The tokenizer: same bytes, same text, same special ids, and no noise (FIELD_REPORTS 5.5, 5.10)."""

from __future__ import annotations

import gzip
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilize.data import Tokenizer
from stabilize.data.grammar import sentence
from stabilize.data.tokenizer import Subwords
from stabilize.errors import UserError
from stabilize.tokens import BEGIN, END, PAD, UNKNOWN

random = Random(1)


def with_single_spaces(text: str) -> str:
    """What the tokenizer makes of a line."""
    return re.sub(" +", " ", text).strip(" ")


LINES = [line for _ in range(400) for line in sentence(random)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(LINES, vocabulary=200)


def test_text_comes_back(tokenizer: Tokenizer) -> None:
    assert all(tokenizer.decode(tokenizer.encode(line)) == line for line in LINES)


def test_text_is_not_normalised() -> None:
    text = "Über 5 m² … „ﬁn“ ½ ™"
    tokenizer = Tokenizer.train([text] * 3, vocabulary=60)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("subwords", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "line",
    ["long " * 1000 + "Ж", "x" * 70_000 + "Ж" + "x" * 20_000, "a bar ▅ Ж", "a tab\tЖ", "<unk> Ж", "a▁Ж"],
    ids=len,
)
def test_every_line_is_learnt_from(line: str, subwords: Subwords) -> None:
    """SentencePiece itself leaves out lines of more than 4,192 bytes or with ▅, and says nothing."""
    tokenizer = Tokenizer.train([*LINES[:200], line], vocabulary=200, subwords=subwords)
    assert UNKNOWN not in tokenizer.encode("Ж")


def test_special_ids(tokenizer: Tokenizer) -> None:
    pieces = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    ids = (pieces.pad_id(), pieces.unk_id(), pieces.bos_id(), pieces.eos_id())
    assert ids == (PAD, UNKNOWN, BEGIN, END) == (0, 1, 2, 3)
    assert not {PAD, BEGIN, END} & {i for line in LINES for i in tokenizer.encode(line)}
    assert tokenizer.decode([BEGIN, *tokenizer.encode(LINES[0]), END, PAD, PAD]) == LINES[0]


def test_blank_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == tokenizer.encode("  ") == []
    assert tokenizer.decode([]) == ""


def test_same_lines_same_bytes(tokenizer: Tokenizer) -> None:
    code = (
        "import sys; from stabilize.data.tokenizer import Tokenizer;"
        "print(Tokenizer.train(sys.stdin.read().split('\\n'), vocabulary=200).hash)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        input="\n".join(LINES), text=True, capture_output=True, check=True,
        env=os.environ | {"PYTHONHASHSEED": "2", "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert process.stdout.strip() == tokenizer.hash
    assert process.stderr == "", "SentencePiece's log is not for the terminal"


def test_saved_and_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.model")
    loaded = Tokenizer.load(tmp_path / "tokenizer.model")
    assert loaded.hash == tokenizer.hash
    assert loaded.encode(LINES[5]) == tokenizer.encode(LINES[5])


def test_a_small_corpus_gives_a_small_vocabulary() -> None:
    tokenizer = Tokenizer.train(["a b", "b a"], vocabulary=8000)
    assert 4 < tokenizer.vocabulary < 20


def test_byte_fallback_knows_every_character() -> None:
    tokenizer = Tokenizer.train(LINES, vocabulary=400, byte_fallback=True)
    assert tokenizer.decode(tokenizer.encode("Здравствуй 🙂")) == "Здравствуй 🙂"


@settings(max_examples=200)
@given(words=st.text(st.sampled_from("a ä.\u00a0\u2028\t'0ﬁ🙂"), max_size=20))
def test_only_spaces_are_normalised(words: str) -> None:
    alphabet = Tokenizer.train(["a ä.\u00a0\u2028\t'0ﬁ🙂 a ä"] * 3, vocabulary=60)
    assert alphabet.decode(alphabet.encode(words)) == with_single_spaces(words)


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_ten_thousand_real_lines_come_back(shared_data: Path, byte_fallback: bool) -> None:
    """Exactly where spaces are single, as in 99 of 100; with bytes, also what a fiftieth of the lines does not know."""
    lines = []
    for language in ("en", "de"):
        with gzip.open(shared_data / "wmt" / f"wmt-mix-10k.train.{language}.gz") as file:
            lines += [line.decode().removesuffix("\n") for line in itertools.islice(file, 5000)]
    tokenizer = Tokenizer.train(lines[::50] if byte_fallback else lines, vocabulary=2000, byte_fallback=byte_fallback)
    returned = [tokenizer.decode(tokenizer.encode(line)) for line in lines]
    assert returned == [with_single_spaces(line) for line in lines]
    assert sum(a == b for a, b in zip(returned, lines, strict=True)) > 9_850


def test_what_is_decoded_is_one_line() -> None:
    """Though bytes can spell what ends one."""
    tokenizer = Tokenizer.train(LINES, vocabulary=400, byte_fallback=True)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    ids = [i for byte in ("61", "0A", "62", "0D", "63", "00") for i in [pieces.piece_to_id(f"<0x{byte}>")]]
    assert tokenizer.decode(ids) == "a b c "


def test_unknown_characters_are_visible(tokenizer: Tokenizer) -> None:
    assert UNKNOWN in tokenizer.encode("Я")
    assert "⁇" in tokenizer.decode(tokenizer.encode("Я"))


@pytest.mark.parametrize(("lines", "vocabulary"), [([], 100), (["", " "], 100)])
def test_what_cannot_be_learnt(lines: list[str], vocabulary: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=rf"vocabulary: {vocabulary} .* {len(lines)} lines"):
        Tokenizer.train(lines, vocabulary=vocabulary)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("subwords", ["bpe", "unigram"])
@pytest.mark.parametrize("byte_fallback", [False, True])
def test_a_vocabulary_that_is_too_small_is_told_what_would_do(subwords: Subwords, byte_fallback: bool) -> None:
    options: Any = {"subwords": subwords, "byte_fallback": byte_fallback}
    with pytest.raises(UserError, match=r"data\.vocabulary is 20, .*; \d+ or more would do") as refused:
        Tokenizer.train(LINES, vocabulary=20, **options)
    least = int(re.findall(r"(\d+) or more", str(refused.value))[0])
    with pytest.raises(UserError, match=rf"; {least} or more would do"):
        Tokenizer.train(LINES, vocabulary=least - 1, **options)
    assert Tokenizer.train(LINES, vocabulary=least, **options).vocabulary <= least


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a SentencePiece model"):
        Tokenizer(b"nothing of the kind")
    with pytest.raises(UserError, match="absent"):
        Tokenizer.load(tmp_path / "absent")
