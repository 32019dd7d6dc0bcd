"""By how much mixed precision has scaled losses and gradients."""

from __future__ import annotations

import lightning.pytorch as pl
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


def loss_scale(trainer: pl.Trainer) -> float:
    """Return what the loss is multiplied by before its backward: one, except where float16 gradients are scaled."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else scaler.get_scale()


def gradient_scale(trainer: pl.Trainer, optimizer: Optimizer) -> float:
    """Return by how much gradients are too large before the optimiser's step: fused ones unscale inside it."""
    return loss_scale(trainer) if _will_unscale(trainer, optimizer) else 1.0


def unscale(trainer: pl.Trainer, optimizer: Optimizer) -> None:
    """Divide gradients by their scale, where Lightning leaves that to a fused optimiser's step, after clipping."""
    if _will_unscale(trainer, optimizer):
        trainer.precision_plugin.scaler.unscale_(optimizer)  # which the optimiser is told


def _will_unscale(trainer: pl.Trainer, optimizer: Optimizer) -> bool:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if not fused or scaler is None or not scaler.is_enabled():
        return False
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
