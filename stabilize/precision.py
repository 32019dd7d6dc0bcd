"""By how much mixed precision has scaled losses and gradients."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


def loss_scale(trainer: pl.Trainer) -> Tensor | float:
    """Return what the loss is multiplied by before its backward: one, except where float16 gradients are scaled.

    A tensor on the device then, which the next update changes: to read it would make the host wait.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    scale = None if scaler is None else scaler._get_scale_async()
    return 1.0 if scale is None else scale


def gradient_scale(trainer: pl.Trainer, optimizer: Optimizer) -> Tensor | float:
    """Return by how much gradients are too large before the optimiser's step.

    Fused optimisers unscale inside it, and Lightning leaves gradients as they are where `training_step` returned None
    for the last batch of an update.
    """
    return loss_scale(trainer) if _scaled(trainer, optimizer) else 1.0


def unscale(trainer: pl.Trainer, optimizer: Optimizer) -> None:
    """Divide gradients by their scale, where Lightning leaves that to a fused optimiser's step, after clipping."""
    if is_fused(optimizer) and _scaled(trainer, optimizer):
        trainer.precision_plugin.scaler.unscale_(optimizer)  # which the optimiser is told


def is_fused(optimizer: Optimizer) -> bool:
    """Say whether an optimiser unscales gradients inside its step."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def _scaled(trainer: pl.Trainer, optimizer: Optimizer) -> bool:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return False
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
