"""What is as deep as the project means to go."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from torch.optim import Adam

from stabilize.callbacks import GradientRatio, LayerSimilarity
from stabilize.strategies import DeepNormInit, DeepNormResidual, NoWarmup, PostNorm, PreNorm, Stabilizer
from tests.tasks import curve, fit, sentence_batch, small_task, small_trainer

DEEP = {
    "pre_norm": Stabilizer(PreNorm(), warmup=NoWarmup()),
    "deep_norm": Stabilizer(PostNorm(), DeepNormResidual(), initialization=DeepNormInit(), warmup=NoWarmup()),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", DEEP)
def test_a_hundred_layers_a_stack_train(name: str, tmp_path: Path) -> None:
    """In bfloat16, with dropout, watched, each layer computed again in the backward pass."""
    shape = {"encoder_layers": 100, "decoder_layers": 100, "width": 64, "heads": 4, "hidden": 256, "dropout": 0.1}
    optimizer = functools.partial(Adam, lr=3e-4)
    task = small_task(DEEP[name], optimizer=optimizer, checkpoint_layers=True, **shape)
    monitors = GradientRatio(every=5, activations=True, figures=False), LayerSimilarity(every=5, figures=False)
    trainer = small_trainer(tmp_path, *monitors, max_steps=20, precision="bf16-mixed")
    fit(trainer, task, [sentence_batch(0, 1, 2, 3)] * 20)
    losses = list(curve(tmp_path, "train/nll").values())
    assert losses[-1] < 0.8 * losses[0]
    assert 0.1 < monitors[0].latest["gradient_ratio/decoder/first_to_last"] < 10
