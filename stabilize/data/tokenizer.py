"""Subwords: a SentencePiece model, one vocabulary for source and target."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from stabilize.data.cutting import Cutting, Lattice, Merging
from stabilize.errors import UserError
from stabilize.tokens import BEGIN, END, PAD, UNKNOWN

Subwords = Literal["bpe", "unigram"]

TRAINING_LINES: Final = 1_000_000
"""More lines than this change the pieces little and cost minutes."""

PART: Final = 2**14
"""Characters of a line that are learnt from in one go; of single words that are much longer, SentencePiece's unigram
model cannot be learnt."""

RESERVED: Final = "\N{LOWER FIVE EIGHTHS BLOCK}"
"""What SentencePiece keeps for itself: it leaves out lines that have it, and reads it as the unknown token."""

LINE_BREAKS: Final = str.maketrans("\n\r\0", "   ")
"""What a model can spell with pieces that are single bytes, and nobody can write into a line of a file."""


class Tokenizer:
    """Text to ids and back: `decode(encode(text)) == text` for one line with single spaces and known characters.

    Text is not normalised (SentencePiece's `identity`): the usual NFKC rules turn an ellipsis into three dots and a
    superscript into a digit, so that a translation could never equal a reference that has them. Of each run of spaces
    one is left, at the ends none; U+2581, by which SentencePiece writes a space, is read as one.

    Args:
        model: a serialised SentencePiece model with pad 0, unknown 1, begin 2 and end 3.

    Raises:
        UserError: these bytes are no SentencePiece model, or its special tokens have other ids.
    """

    def __init__(self, model: bytes) -> None:
        self._pieces = sentencepiece.SentencePieceProcessor()
        try:
            self._pieces.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise UserError("the tokenizer is not a SentencePiece model: give a .model file that it wrote") from error
        specials = (self._pieces.pad_id(), self._pieces.unk_id(), self._pieces.bos_id(), self._pieces.eos_id())
        if specials != (PAD, UNKNOWN, BEGIN, END):
            raise UserError(f"the tokenizer has pad, unknown, begin, end at {specials}: train it with 0, 1, 2, 3")
        self.model = model

    @classmethod
    def train(
        cls, lines: Iterable[str], *, vocabulary: int, subwords: Subwords = "bpe", byte_fallback: bool = False
    ) -> Tokenizer:
        """Learn pieces; the same lines give the same bytes.

        Args:
            lines: text of both languages, all of which is used but the character ▅, which stays unknown.
            vocabulary: number of pieces, special tokens included; a small corpus may give fewer.
            subwords: byte-pair encoding, or the unigram language model.
            byte_fallback: write characters that are rare in `lines` as UTF-8 bytes (256 pieces) instead of giving
                every character its own piece and the unseen ones the unknown token.

        Raises:
            UserError: nothing to learn from, or the vocabulary cannot hold the characters.
        """
        model = io.BytesIO()
        count = itertools.count()
        try:
            sentencepiece.SentencePieceTrainer.Train(
                sentence_iterator=_parts(line for line, _ in zip(lines, count, strict=False)),
                max_sentence_length=4 * PART,  # in bytes; longer ones would be left out without a word
                model_writer=model,
                model_type=subwords,
                vocab_size=vocabulary,
                hard_vocab_limit=False,
                byte_fallback=byte_fallback,
                character_coverage=0.9995 if byte_fallback else 1.0,
                normalization_rule_name="identity",
                pad_id=PAD,
                unk_id=UNKNOWN,
                bos_id=BEGIN,
                eos_id=END,
                num_threads=1,
                minloglevel=2,
            )
        except (RuntimeError, ValueError) as error:
            if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
                bytes_too = (
                    "" if byte_fallback else ", or data.byte_fallback: true where there are very many characters"
                )
                raise UserError(
                    f"data.vocabulary is {vocabulary}, too few pieces for the characters of the text; {least[1]} or "
                    f"more would do{bytes_too}"
                ) from error
            raise UserError(
                f"data.vocabulary: {vocabulary} pieces cannot be learnt from {next(count)} lines (SentencePiece: "
                f"{str(error).splitlines()[-1].strip()}); non-blank text would do"
            ) from error
        return cls(model.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a model file.

        Raises:
            UserError: the file cannot be read or is no model.
        """
        try:
            return cls(Path(path).read_bytes())
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}: give the tokenizer.model of a run") from error

    def save(self, path: str | Path) -> None:
        """Write the model file."""
        Path(path).write_bytes(self.model)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without begin and end."""
        ids: list[int] = self._pieces.EncodeAsIds(text)
        return ids

    def encode_all(self, texts: Sequence[str], threads: int = 1) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Ids of many texts one after the other, each with the end token, and the number of each one's ids."""
        found: list[list[int]] = self._pieces.Encode(list(texts), add_eos=True, num_threads=threads)
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        return np.fromiter(itertools.chain.from_iterable(found), self.dtype, int(lengths.sum())), lengths

    def sample(self, text: str, share: float, seed: int) -> list[int]:
        """Ids of another way to cut a text into pieces, the same one for the same seed, in whatever process.

        Args:
            share: BPE: of the merges that are left out (BPE-dropout, Provilkov et al. 2020); unigram: the exponent of
                the probabilities that ways are drawn with (Kudo 2018); 0: the usual pieces.
        """
        if not share:
            return self.encode(text)
        return self._cutting.draw(self._pieces.Normalize(text), share, seed)

    @functools.cached_property
    def _cutting(self) -> Cutting:
        pieces = self._pieces
        texts = {
            piece: i
            for i, piece in enumerate(self.pieces)
            if not (pieces.IsUnknown(i) or pieces.IsControl(i) or pieces.IsByte(i))
        }
        byte_ids = [i for i in range(self.vocabulary) if pieces.IsByte(i)]
        try:
            pieces.NBestEncode("", nbest_size=1)
            kind: type[Cutting] = Lattice
        except RuntimeError:  # only a unigram model knows more than one way
            kind = Merging
        return kind(texts, {piece: pieces.GetScore(i) for piece, i in texts.items()}, byte_ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, one line; pad, begin and end are dropped, the unknown token reads ` ⁇ `."""
        text: str = self._pieces.DecodeIds([int(i) for i in ids if i not in (PAD, BEGIN, END)])
        return text.translate(LINE_BREAKS)

    @property
    def pieces(self) -> list[str]:
        """The text of each id, a space written as ▁."""
        return [self._pieces.IdToPiece(number) for number in range(self.vocabulary)]

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return int(self._pieces.GetPieceSize())

    @property
    def dtype(self) -> str:
        """The smallest integers that hold an id."""
        return np.min_scalar_type(self.vocabulary - 1).name

    @property
    def hash(self) -> str:
        """Short fingerprint of the model: equal hashes mean equal ids."""
        return hashlib.sha256(self.model).hexdigest()[:16]


def _parts(lines: Iterable[str]) -> Iterator[str]:
    """Lines as SentencePiece takes them: none too long, and none with the character that it keeps for itself."""
    for line in lines:
        for start in range(0, len(line), PART):
            yield line[start : start + PART].replace(RESERVED, " ")
