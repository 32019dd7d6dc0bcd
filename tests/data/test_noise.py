"""Noise: the same draws whoever makes a batch, and the rates that are asked for."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from stabilize.data import ParallelText, Tokenizer
from stabilize.data.grammar import sentence
from stabilize.data.loader import BatchLoader
from stabilize.errors import UserError
from stabilize.tokens import BEGIN, END, PAD, UNKNOWN

random = Random(2)
PAIRS = [sentence(random) for _ in range(150)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for side, language in enumerate(("en", "de")):
        (folder / f"train.{language}").write_text("".join(f"{pair[side]}\n" for pair in PAIRS), encoding="utf-8")
    return folder


def ready(folder: Path, **options: Any) -> ParallelText:
    settings = {"train": f"{folder}/train.{{lang}}", "validation_pairs": 10, "vocabulary": 200, "batch_tokens": 300}
    module = ParallelText(**({**settings, "seed": 3} | options))
    module.setup("fit")
    return module


def by_line(loader: BatchLoader, epoch: int = 0) -> dict[int, tuple[list[int], list[int]]]:
    """The ids of each line, without padding."""
    loader.sampler.set_epoch(epoch)
    found = {}
    for batch in loader:
        for line, *sides in zip(*(part.tolist() for part in (batch.index, batch.source, batch.target)), strict=True):
            source, target = ([i for i in ids if i != PAD] for ids in sides)
            found[line] = (source, target)
    return found


@pytest.mark.parametrize("subwords", ["bpe", "unigram"])
def test_other_pieces_for_the_same_text(folder: Path, subwords: str) -> None:
    module = ready(folder, subwords=subwords, sampling=0.2)
    first, second = (by_line(module.train_dataloader(), epoch) for epoch in (0, 1))
    usual = by_line(ready(folder, subwords=subwords).train_dataloader())
    assert first != second != usual != first
    for drawn in (first, second):
        for line, (source, target) in drawn.items():
            assert (module.tokenizer.decode(source), module.tokenizer.decode(target)) == PAIRS[line]
            assert (source[-1], target[0], target[-1]) == (END, BEGIN, END)
    lengths = [sum(len(source) for source, _ in drawn.values()) for drawn in (first, usual)]
    assert lengths[0] > 1.05 * lengths[1]


@pytest.mark.parametrize("options", [{"workers": 2}, {"batch_tokens": 90}])
def test_the_draws_of_a_line_do_not_hang_on_who_makes_its_batch(folder: Path, options: dict[str, int]) -> None:
    noise = {"sampling": 0.1, "unread": 0.1}
    expected = by_line(ready(folder, **noise).train_dataloader(), epoch=4)
    assert by_line(ready(folder, **noise, **options).train_dataloader(), epoch=4) == expected
    assert by_line(ready(folder, **noise, seed=4).train_dataloader(), epoch=4) != expected


def test_what_is_left_of_an_epoch_is_drawn_as_it_would_have_been(folder: Path) -> None:
    module = ready(folder, sampling=0.1, unread=0.1)
    loader = module.train_dataloader()
    loader.sampler.set_epoch(2)
    whole = [batch.source.tolist() for batch in loader]
    batches = iter(loader)
    next(batches), next(batches)
    resumed = module.train_dataloader()
    resumed.load_state_dict(loader.state_dict())
    assert [batch.source.tolist() for batch in resumed] == whole[2:]


def test_the_share_of_unread_tokens(folder: Path) -> None:
    usual = by_line(ready(folder).train_dataloader())
    noisy = by_line(ready(folder, unread=0.25).train_dataloader())
    hidden = total = 0
    for line, (source, target) in noisy.items():
        assert target == usual[line][1]
        assert source[-1] == END
        assert all(token in (UNKNOWN, before) for token, before in zip(source, usual[line][0], strict=True))
        hidden += source.count(UNKNOWN)
        total += len(source) - 1
    # Four standard deviations of a binomial share.
    assert abs(hidden / total - 0.25) < 4 * (0.25 * 0.75 / total) ** 0.5


def test_evaluation_has_no_noise(folder: Path) -> None:
    quiet, noisy = ready(folder), ready(folder, sampling=0.5, unread=0.5)
    assert by_line(noisy.val_dataloader()) == by_line(quiet.val_dataloader())


def test_pieces_that_would_be_too_many_stay_the_usual_ones(folder: Path) -> None:
    usual = by_line(ready(folder).train_dataloader())
    limit = max(len(source) for source, _ in usual.values())
    drawn = by_line(ready(folder, sampling=0.9, maximum_length=limit).train_dataloader())
    assert max(len(source) for source, _ in drawn.values()) == limit
    assert any(source == usual[line][0] for line, (source, _) in drawn.items())


def test_a_seed_is_a_draw() -> None:
    tokenizer = Tokenizer.train([line for pair in PAIRS for line in pair], vocabulary=200)
    text = PAIRS[0][0]
    draws = [tuple(tokenizer.sample(text, 0.5, seed)) for seed in (1, 2, 3, 1, 2**32 - 1, 0)]
    assert draws[0] == draws[3]
    assert len({*draws}) >= 4
    assert tokenizer.sample(text, 0.0, 5) == tokenizer.encode(text)


@pytest.mark.parametrize("name", ["sampling", "unread"])
@pytest.mark.parametrize("share", [1.0, -0.1])
def test_shares_that_cannot_be(folder: Path, name: str, share: float) -> None:
    with pytest.raises(UserError, match=rf"data\.{name} is {share}"):
        ready(folder, **{name: share})
