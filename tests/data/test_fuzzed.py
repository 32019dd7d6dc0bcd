"""Any bytes as a corpus: one sentence of refusal, or training on what was said (FIELD_REPORTS 5)."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stabilize.cli import main
from stabilize.data import ParallelText, Tokenizer
from stabilize.data.cleaning import RULES, clean
from stabilize.errors import UserError
from stabilize.tokens import BEGIN, END, PAD
from tests.limits import limited

WORDS = ("a", "b", "the", "cat", "sieht", "den", "Hund", "12", "3,5", ".", "!", "&apos;", "&amp;", "▁", "<s>", "<unk>")
OTHERS = ("Übermäßig", "не", "你好", "🙂", "ﷺ", "e\u0301", "\u200b", "\ufeff", "\u2028", "\u3000", "⁇")
FRAGMENTS = [
    *(word.encode() for word in (*WORDS, *OTHERS)),
    *(b" ", b"  ", b"\t", b"\r", b"\0", b"\x07", b"\x1c", b"\xc2\x85", b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"),
    b"x" * 300,
    b"long " * 200,
]
READABLE = [part for part in FRAGMENTS if part == part.decode(errors="ignore").encode() and part != b"\0"]
line = st.lists(st.sampled_from(READABLE), max_size=8).map(b" ".join)
text = st.lists(st.tuples(line, line), min_size=1, max_size=30)
odd = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map(b" ".join) | st.binary(max_size=20).map(
    lambda raw: raw.replace(b"\n", b"")
)
odd_text = st.lists(st.tuples(odd, odd), max_size=3)
good = st.lists(
    st.tuples(*[st.lists(st.sampled_from(FRAGMENTS[:15]), min_size=1, max_size=8).map(b" ".join)] * 2), max_size=40
)
"""As a rule more than ten pairs, of which one that cannot be read is let pass."""
fault = st.sampled_from(
    [""] * 30 + ["one line more", "gzip", "gzip", "cut gzip", "no last newline", "windows", "no file", "nothing"]
)


@st.composite
def corpora(draw: st.DrawFn) -> dict[str, bytes]:
    """Files by name."""
    files = {}
    for split, pairs in (("train", draw(good) + draw(text) + draw(odd_text)), ("test", draw(text))):
        for side, language in enumerate(("en", "de")):
            raw, wrong = b"".join(pair[side] + b"\n" for pair in pairs), draw(fault)
            if wrong == "one line more":
                raw += b"one line more\n"
            elif wrong == "windows":
                raw = raw.replace(b"\n", b"\r\n")
            elif wrong == "no last newline":
                raw = raw.removesuffix(b"\n")
            elif wrong == "nothing":
                raw = b""
            elif "gzip" in wrong:
                raw = gzip.compress(raw, mtime=0)[: -5 if "cut" in wrong else None]
            if wrong != "no file":
                files[f"{split}.{language}"] = raw
    return files


options = st.fixed_dictionaries(
    {
        "vocabulary": st.sampled_from([30, 80, 400]),
        "subwords": st.sampled_from(["bpe", "bpe", "unigram"]),
        "byte_fallback": st.booleans(),
        "sampling": st.sampled_from([0.0, 0.1]),
        "unescape": st.booleans(),
        "drop": st.lists(st.sampled_from(["copied", "duplicate", "in_test", "length_ratio"]), unique=True),
        "maximum_length": st.sampled_from([5, 40, 256]),
        "validation_pairs": st.sampled_from([1, 3]),
    }
)


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)


def lines(raw: bytes) -> list[str]:
    raw = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
    return [one.decode("utf-8", "surrogateescape") for one in raw.removesuffix(b"\n").split(b"\n")] if raw else []


def broken(folder: Path, files: dict[str, bytes], chosen: dict[str, Any]) -> bool:
    """Whether the corpus is refused in more than one line; else, where it is not, the text that is trained on has to be
    what the files and the account say."""
    write(folder, files)
    paths = {split: f"{folder}/{split}.{{lang}}" for split in ("train", "test")}
    module = ParallelText(**paths, **chosen, cache=f"{folder}/cache", seed=1)
    try:
        module.setup("fit")
    except UserError as error:
        return "\n" in str(error)
    raw = {name: lines(files[name]) for name in files}
    account, held_out = module.account, chosen["validation_pairs"]
    train = account["train"]
    dropped = sum(met["pairs"] for met in train["rules"].values() if met["done"] == "dropped")
    assert train["lines"] == len(raw["train.en"]) - held_out == len(raw["train.de"]) - held_out
    assert train["pairs"] == train["lines"] - dropped
    assert {*train["rules"]} <= {*RULES}
    seen = []
    for batch in module.train_dataloader():
        for number, *ids in zip(batch.index.tolist(), batch.source.tolist(), batch.target.tolist(), strict=True):
            seen.append(number)
            for side, language in zip(ids, ("en", "de"), strict=True):
                read = clean(raw[f"train.{language}"][number], unescape=chosen["unescape"])[0]
                found = [i for i in side if i not in (PAD, BEGIN, END)]
                expected = module.tokenizer.encode(read)
                if chosen["sampling"]:
                    found, expected = (module.tokenizer.encode(module.tokenizer.decode(i)) for i in (found, expected))
                assert found == expected
    assert len({*seen}) == len(seen) == train["pairs"]
    tested = {}
    for batch in module.test_dataloader() if module.has("test") else ():
        tested |= dict(zip(batch.index.tolist(), batch.source_text, strict=True))
    assert ([*tested] and sorted(tested) == [*range(len(raw["test.en"]))]) or not raw["test.en"]
    assert all("\n" not in one for one in tested.values())
    assert Tokenizer(module.tokenizer.model).hash == module.tokenizer.hash
    return False


fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


@settings(fuzzed, max_examples=30)
@given(files=corpora(), chosen=options)
def test_any_corpus_is_refused_or_learnt_as_it_says(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], chosen: dict[str, Any]
) -> None:
    with limited():
        assert not broken(tmp_path_factory.mktemp("fuzzed") / "text", files, chosen)


@pytest.mark.soak
@settings(fuzzed, max_examples=500)
@given(files=corpora(), chosen=options)
def test_five_hundred_corpora(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], chosen: dict[str, Any]
) -> None:
    with limited():
        assert not broken(tmp_path_factory.mktemp("fuzzed") / "text", files, chosen)


@pytest.mark.soak
@settings(fuzzed, max_examples=40)
@given(files=corpora(), chosen=options)
def test_the_command_on_any_corpus(
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
    files: dict[str, bytes],
    chosen: dict[str, Any],
) -> None:
    folder = tmp_path_factory.mktemp("fuzzed")
    write(folder / "text", files)
    given = [f"--data.{name}={value}".replace("'", "") for name, value in chosen.items()]
    given += [f"--data.{split}={folder}/text/{split}.{{lang}}" for split in ("train", "test")]
    model = [f"--model.{name}=1" for name in ("encoder_layers", "decoder_layers")]
    model += ["--model.width=8", "--model.heads=2", "--model.hidden=8", "--model.validation_search.maximum_ratio=0.1"]
    trainer = ["--trainer.accelerator=cpu", "--trainer.max_steps=1", f"--trainer.default_root_dir={folder}/runs"]
    with limited():
        code = main(["fit", "--data=ParallelText", *given, *model, *trainer, "--model.stabilizer.placement=PreNorm"])
    said = capfd.readouterr()
    assert code in (0, 2), said.err
    assert "Traceback" not in said.err + said.out
    if code == 2:
        assert said.err.splitlines()[-1].startswith("error: ")
        assert not [*(folder / "runs").glob("*")]
    else:
        assert [*(folder / "runs").glob("*/data.json")]
