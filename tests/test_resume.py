"""Every stabiliser goes on from a checkpoint as if it had never stopped, its clock, statistics and profile included."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.models import STABILIZERS, STARTS, every_start
from tests.tasks import Sentences, small_task, small_trainer

ADAM = functools.partial(torch.optim.Adam, lr=1e-2)


def task(name: str) -> Any:
    """Two layers a stack, so that what a first and a last layer have of their own is there; with dropout."""
    encoder, decoder = (STABILIZERS | STARTS)[name]
    shape = {"encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}
    return small_task(encoder, decoder_stabilizer=decoder, optimizer=ADAM, **shape)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@every_start
def test_two_updates_and_one_more_are_three(name: str, tmp_path: Path) -> None:
    every_update = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"max_steps": 3, "logger": False}
    whole, resumed = task(name), task(name)
    small_trainer(tmp_path, every_update, enable_checkpointing=True, **options).fit(whole, datamodule=Sentences())
    small_trainer(tmp_path, **options).fit(resumed, datamodule=Sentences(), ckpt_path=tmp_path / "step=2.ckpt")

    two = torch.load(tmp_path / "step=2.ckpt", weights_only=True)["state_dict"]
    assert not all(value.equal(two[key]) for key, value in whole.state_dict().items())
    for key, value in whole.state_dict().items():
        assert resumed.state_dict()[key].equal(value), key
