"""By how much mixed precision has scaled what a callback sees."""

from __future__ import annotations

import lightning.pytorch as pl
from torch.optim import Optimizer


def loss_scale(trainer: pl.Trainer) -> float:
    """Return what the loss is multiplied by before its backward: one, except where float16 gradients are scaled."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else scaler.get_scale()


def gradient_scale(trainer: pl.Trainer, optimizer: Optimizer) -> float:
    """Return by how much gradients are too large before the optimiser's step: fused ones unscale inside it."""
    unscales_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
    return loss_scale(trainer) if unscales_itself else 1.0
