"""The mean of the weights, where it is used, and that training goes on with the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from stabilize import checkpoint
from stabilize.callbacks import WeightAverage
from stabilize.errors import UserError
from stabilize.strategies import MaskedBatchNorm, NoWarmup, PreNorm, Stabilizer
from stabilize.task import TranslationTask
from tests.tasks import Sentences, curve, fit, sentence_batch, small_task, small_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),  # same batches
]

BATCH = sentence_batch(0, 1, 2)
BATCH_NORM = Stabilizer(PreNorm(), norm=MaskedBatchNorm(), warmup=NoWarmup())
"""Has running statistics."""


def state(task: TranslationTask) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in task.state_dict().items()}


class Trail(pl.Callback):
    """All weights and statistics after each update."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any) -> None:
        self.states.append(state(pl_module))  # type: ignore[arg-type]


def trained(folder: Path, steps: int, average: WeightAverage, **options: Any) -> tuple[Trail, TranslationTask]:
    """A run whose last checkpoint is written when training ends."""
    task, trail = small_task(BATCH_NORM), Trail()
    saves = ModelCheckpoint(folder, every_n_train_steps=1000, save_last=True)
    fit(
        small_trainer(folder, trail, average, saves, max_steps=steps, enable_checkpointing=True),
        task,
        [BATCH] * 20,
        **options,
    )
    return trail, task


def assert_states_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=name)


def mean_of(states: list[dict[str, Tensor]], decay: float, every: int = 1) -> dict[str, Tensor]:
    first, *rest = states[::every]
    for later in rest:
        first = {name: decay * mean + (1 - decay) * later[name] for name, mean in first.items()}
    return first


@pytest.mark.parametrize("every", [1, 2])
def test_the_model_ends_with_the_mean(tmp_path: Path, every: int) -> None:
    trail, task = trained(tmp_path, 5, WeightAverage(0.75, every))
    assert_states_equal(state(task), mean_of(trail.states, 0.75, every), 1e-6)


def test_a_run_that_goes_on_after_its_end_goes_on_with_the_weights(tmp_path: Path) -> None:
    whole, task = trained(tmp_path / "whole", 8, WeightAverage(0.75))
    half, _ = trained(tmp_path / "half", 4, WeightAverage(0.75))
    saved = checkpoint.read(tmp_path / "half" / "last.ckpt")
    assert_states_equal(saved["current_model_state"], half.states[-1])
    assert_states_equal(saved["state_dict"], mean_of(half.states, 0.75), 1e-6)
    rest, resumed = trained(tmp_path / "rest", 8, WeightAverage(0.75), ckpt_path=tmp_path / "half" / "last.ckpt")
    assert_states_equal(rest.states[-1], whole.states[-1])
    assert_states_equal(state(resumed), state(task))


def test_validation_is_of_the_mean_and_training_is_not(tmp_path: Path) -> None:
    """What a validation in the middle of training says is what the checkpoint of that update says by itself."""
    task = small_task()
    saves = ModelCheckpoint(tmp_path, monitor="val/nll", filename="best")
    options = {"limit_val_batches": 1.0, "val_check_interval": 3, "max_steps": 3, "enable_checkpointing": True}
    trainer = small_trainer(tmp_path, WeightAverage(0.75), saves, **options)
    trainer.fit(task, datamodule=Sentences())
    said = curve(tmp_path, "val/nll")[2]
    saved = checkpoint.read(tmp_path / "best.ckpt")
    assert not saved["state_dict"]["model.source_embedding.weight"].equal(
        saved["current_model_state"]["model.source_embedding.weight"]
    )
    alone = TranslationTask.load_from_checkpoint(tmp_path / "best.ckpt")
    (again,) = small_trainer(tmp_path / "again", limit_val_batches=1.0).validate(
        alone, datamodule=Sentences(), verbose=False
    )
    assert again["val/nll"] == pytest.approx(said, rel=1e-6)
    (tested,) = trainer.validate(task, datamodule=Sentences(), ckpt_path=tmp_path / "best.ckpt", verbose=False)
    assert tested["val/nll"] == pytest.approx(said, rel=1e-6), "nor does a checkpoint bring the weights back"
    (after,) = trainer.validate(task, datamodule=Sentences(), verbose=False)
    assert after["val/nll"] == pytest.approx(said, rel=1e-6), "after training the model has the mean"


@pytest.mark.parametrize(
    ("options", "why"), [({"decay": 1.0}, "decay of WeightAverage is 1.0"), ({"every": 0}, "every")]
)
def test_settings_that_will_not_do(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        WeightAverage(**options)
