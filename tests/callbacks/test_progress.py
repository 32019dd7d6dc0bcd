"""What a run says of its progress, in a terminal and in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from stabilize.callbacks import ProgressBar, ProgressLines
from tests.callbacks import tiny


def test_the_bar_counts_epochs_from_one_and_to_no_end() -> None:
    bar = ProgressBar()
    assert bar._get_train_description(0).strip() == "Epoch 1"
    assert len(bar._get_train_description(41)) == len(bar.validation_description)


def test_a_line_has_the_updates_and_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"val/nll": torch.tensor(1.25), "val/bleu": torch.tensor(33.0), "val/chrf": torch.tensor(1.0)}
    trainer = SimpleNamespace(sanity_checking=False, global_step=1200, callback_metrics=metrics)
    ProgressLines().on_validation_end(cast(Any, trainer), cast(Any, None))
    assert capsys.readouterr().out == "update 1,200: val/nll 1.25, val/bleu 33\n"


class Endless(IterableDataset[Any]):
    """Data that has no length."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from tiny.batches(3)


@pytest.mark.parametrize("kind", [ProgressBar, ProgressLines])
def test_data_of_unknown_length_are_followed_too(
    kind: type[ProgressBar | ProgressLines], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = kind()
    trainer = tiny.trainer(
        tmp_path,
        shown,
        max_steps=6,
        log_every_n_steps=2,
        enable_progress_bar=kind is ProgressBar,
    )
    trainer.fit(tiny.TinyTask(), DataLoader(Endless(), batch_size=None))
    assert trainer.global_step == 6
    if kind is ProgressLines:
        lines = capsys.readouterr().out.splitlines()
        assert lines == [f"update {update}" for update in (2, 4, 6)]
