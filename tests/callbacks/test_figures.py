"""Pictures of a run: there, readable by an image library, and passed on to Weights & Biases."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.loggers import WandbLogger
from matplotlib.image import imread
from torch import Tensor

from stabilize.callbacks import GradientRatio, LayerSimilarity, figures
from stabilize.callbacks.history import History
from tests.callbacks.tiny import TinyTask, batches, loader, trainer

KINDS = (
    "activation_gradient_ratio",
    "gradient_ratio",
    "layer_similarity",
    "layer_similarity_centered",
    "similarity_matrix",
    "similarity_matrix_centered",
)


def history(rows: list[list[float]]) -> History:
    made = History()
    for number, row in enumerate(rows, 1):
        made.append(50 * number, row)
    return made


def pictures(folder: Path) -> list[str]:
    paths = sorted((folder / "figures").iterdir())
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert imread(path).std() > 0
    return [path.name for path in paths]


def test_a_run_leaves_a_picture_of_each_kind_and_stack(tmp_path: Path):
    callbacks = [GradientRatio(every=1, activations=True), LayerSimilarity(every=1)]
    trainer(tmp_path, *callbacks, max_steps=3).fit(TinyTask(), loader(batches(3)))
    assert pictures(tmp_path) == sorted(f"{kind}_{stack}.png" for kind in KINDS for stack in ("decoder", "encoder"))


def test_a_run_that_breaks_leaves_what_it_saw(tmp_path: Path):
    class Breaks(TinyTask):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise RuntimeError("stop here")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="stop here"):
        trainer(tmp_path, GradientRatio(every=1), max_steps=3).fit(Breaks(), loader(batches(3)))
    assert pictures(tmp_path) == ["gradient_ratio_decoder.png", "gradient_ratio_encoder.png"]


def test_pictures_go_to_weights_and_biases(tmp_path: Path):
    logger = Mock(spec=WandbLogger)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=7))
    run: Any = SimpleNamespace(default_root_dir=str(tmp_path), loggers=[logger], fit_loop=loop)
    figures.publish(run, "gradient_ratio_encoder", figures.ratio_map(history([[0.1, 1.0]]), "title"))
    path = tmp_path / "figures" / "gradient_ratio_encoder.png"
    logger.log_image.assert_called_once_with(key="figures/gradient_ratio_encoder", images=[str(path)], step=7)


def test_ratios_are_drawn_as_logarithms_around_one():
    figure = figures.ratio_map(history([[1e-6, 0.1], [1e-4, math.nan], [0.0, 10.0]]), "title")
    (image,) = figure.axes[0].images
    np.testing.assert_allclose(image.get_array().filled(np.nan), [[-6, -4, np.nan], [-1, np.nan, 1]])
    assert (image.norm.vmin, image.norm.vmax) == (-6, 6)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["50", "100", "150"]
    assert image.origin == "lower"


@pytest.mark.parametrize("rows", [[[math.nan, math.nan]], [[0.0, 0.0]], [[1.0, 1.0]]])
def test_nothing_to_see_is_no_error(tmp_path: Path, rows: list[list[float]]):
    for draw in (figures.ratio_map, figures.similarity_map):
        draw(history(rows), "title").savefig(tmp_path / "picture.png")
    figures.similarity_matrix(rows, "title").savefig(tmp_path / "picture.png")


def test_a_run_that_is_killed_has_pictures(tmp_path: Path) -> None:
    """They are drawn at the 16th record, the 32nd and so on: few, and at most half as old as the run."""
    drawn: list[int] = []

    class Looks(LayerSimilarity):
        def draw(self, trainer: pl.Trainer) -> None:
            super().draw(trainer)
            drawn.append(trainer.global_step + 1)
            assert (tmp_path / "figures" / "similarity_matrix_encoder.png").is_file()

    class Killed(TinyTask):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 70:
                assert drawn == [16, 32, 64]

    task = Killed(encoder_layers=2, decoder_layers=1)
    trainer(tmp_path, Looks(every=1), max_steps=70).fit(task, loader(batches(1) * 70))
    assert drawn == [16, 32, 64, 71]
