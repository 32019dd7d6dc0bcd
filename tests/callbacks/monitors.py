"""Every monitor, and a small translation task for them to watch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from stabilize.callbacks import (
    ActivationScale,
    AttentionEntropy,
    EpsilonAudit,
    GradientRatio,
    LayerSimilarity,
    SpikeGuard,
    UpdateRatio,
)
from stabilize.callbacks.monitor import Monitor
from stabilize.data.batch import Batch
from stabilize.strategies import NoWarmup, PostNorm, Stabilizer
from stabilize.task import TranslationTask
from tests.tasks import fit, sentence_batch, small_task, small_trainer

MONITORS: dict[str, Callable[..., Monitor]] = {
    "gradient_ratio": lambda every=1: GradientRatio(every, activations=True, roles=True, figures=False),
    "layer_similarity": lambda every=1: LayerSimilarity(every, figures=False),
    "activation_scale": lambda every=1: ActivationScale(every, figures=False),
    "update_ratio": lambda every=1: UpdateRatio(every, figures=False),
    "epsilon_audit": lambda every=1: EpsilonAudit(every, figures=False),
    "attention_entropy": lambda every=1: AttentionEntropy(every, figures=False),
    "spike_guard": lambda every=1: SpikeGuard(every),
}


def watched_task(**options: Any) -> Any:
    """A task of 2 + 3 post-norm layers, whose epsilon is large enough to have a say here and there."""
    chosen = Stabilizer(PostNorm(), warmup=NoWarmup())
    task = small_task(chosen, **{"encoder_layers": 2, "decoder_layers": 3} | options)
    for part in task.model.modules():
        if hasattr(part, "epsilon"):
            part.epsilon = 0.15
    return task


def watch(folder: Path, task: Any, batches: list[Batch], every: int = 1, **options: Any) -> dict[str, float]:
    """Train with every monitor on; what they last had to say."""
    monitors = [make(every) for make in MONITORS.values()]
    trainer = small_trainer(folder, *monitors, **{"max_steps": len(batches)} | options)
    fit(trainer, task, batches)
    return {key: value for monitor in monitors for key, value in monitor.latest.items()}


def batch() -> Batch:
    """Six sentences."""
    return sentence_batch(0, 1, 2, 3, 4, 5)


def parts() -> list[Batch]:
    """The same in three unequal batches."""
    return [sentence_batch(0), sentence_batch(1, 2, 3), sentence_batch(4, 5)]


def padded(given: Batch, columns: int = 7) -> Batch:
    """The same with more padding."""
    longer: list[Tensor] = [nn.functional.pad(tokens, (0, columns)) for tokens in (given.source, given.target)]
    return Batch(*longer, given.index)


def stance() -> str:
    """What torch.compile does now."""
    return torch._dynamo.eval_frame._stance.stance


class Report(pl.Callback):
    """Writes what the monitors of this rank last had to say."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        latest = [getattr(callback, "latest", {}) for callback in trainer.callbacks]
        path = Path(trainer.default_root_dir) / f"rank_{trainer.global_rank}.json"
        path.write_text(json.dumps({key: value for one in latest for key, value in one.items()}))


class Shares(TranslationTask):
    """Every rank takes sentences of its own: as many batches, of unequal size."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        mine = sentence_batch(0, 1) if self.global_rank == 0 else sentence_batch(2, 3, 4, 5)
        return super().training_step(mine, batch_idx)
