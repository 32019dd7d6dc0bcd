"""How much each layer changes what it is given."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from stabilize import stats
from stabilize.callbacks.figures import publish, similarity_map, similarity_matrix
from stabilize.callbacks.layer_monitor import LayerMonitor
from stabilize.callbacks.layers import observe
from stabilize.errors import UserError

KINDS = {"layer_similarity": False, "layer_similarity_centered": True}  # name -> whether the mean is taken out


class LayerSimilarity(LayerMonitor):
    """Log the cosine between the outputs of neighbouring layers: near one is a layer that changes next to nothing.

    | key                                               | what                                                         |
    |---------------------------------------------------|--------------------------------------------------------------|
    | `layer_similarity/{stack}/layer_001` ...          | mean cosine of the outputs of layers 001 and 002 over tokens |
    | `layer_similarity/{stack}/mean`                   | mean of these over all pairs of neighbours                   |
    | `layer_similarity_centered/{stack}/layer_001` ... | the same after taking out the mean over the tokens           |
    | `layer_similarity_centered/{stack}/mean`          | mean of these over all pairs of neighbours                   |

    The plain cosine is inflated by what all tokens share; the centred one is not. Both are taken in the training
    forward over real tokens only, where the layer says which are (`layer.observe(inputs, output)`), else over all
    positions of the first tensor that it returns. Above 24 layers a stack has at most 25 `layer_` keys of a kind.

    One record an update: cosines are summed over the window's micro-batches and over ranks and divided once by the
    number of tokens; the mean that centring takes out is that of one micro-batch on one rank. A layer that runs several
    times in a forward counts with its last run. States are held only until backward begins.

    Args:
        every: updates between two records; 0 switches the callback off.
        layers: stack name -> pattern over module names; none: the encoder and decoder of `TranslationTask`.
        figures: draw `layer_similarity_{stack}.png`, layer by update, and `similarity_matrix_{stack}.png`, every pair
            of layers at the last record; the centred ones too.

    Raises:
        UserError: if `every` is negative, or a pattern matches no module.
    """

    def __init__(self, every: int = 50, layers: dict[str, str] | None = None, figures: bool = True) -> None:
        super().__init__(every, layers, figures)
        self.matrices: dict[str, list[list[float]]] = {}
        self._observed: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}
        self._sums: Tensor | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.is_due(trainer):
            self.watch(self._observe)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self.watching:
            sums = self._measure(pl_module.device)
            self._sums = sums if self._sums is None else self._sums + sums
        self.unwatch()  # before backward, in which activation checkpointing runs layers again

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if not self.is_due(trainer) or self._sums is None:
            return  # without sums at a due update, `training_step` returned None
        sums, self._sums = trainer.strategy.reduce(self._sums, reduce_op="sum").cpu(), None  # the one transfer
        parts = iter(sums.split([2 * len(layers) ** 2 for layers in self.stacks.values() for _ in KINDS]))
        metrics: dict[str, float] = {}
        for stack, layers in self.stacks.items():
            for name in KINDS:
                matrix = stats.similarity_matrix(next(parts).view(2, len(layers), len(layers)))
                self.matrices[f"{name}/{stack}"] = matrix.tolist()
                metrics |= self._neighbours(trainer, name, stack, matrix.diagonal(1).tolist())
        self.send(trainer, metrics)

    def unwatch(self) -> None:
        super().unwatch()
        self._observed = {}

    def forget(self) -> None:
        super().forget()
        self._sums = None

    def draw(self, trainer: pl.Trainer) -> None:
        for key, history in self.history.items():
            name, stack = key.split("/")
            kind = name.replace("_", " ")
            publish(trainer, f"{name}_{stack}", similarity_map(history, f"{kind} with the next layer, {stack}"))
            matrix = similarity_matrix(self.matrices[key], f"{kind}, {stack}, update {history.updates[-1]}")
            publish(trainer, f"{name.replace('layer_similarity', 'similarity_matrix')}_{stack}", matrix)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"matrices": dict(self.matrices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.matrices = dict(state_dict["matrices"])

    def _observe(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if layer.training:
            with torch.no_grad():
                states, real = observe(layer, inputs, output)
            self._observed[layer] = states.detach(), real

    def _measure(self, device: torch.device) -> Tensor:
        """Return the sums of every stack and kind in one row, so that ranks need one reduction."""
        sums = []
        for stack, layers in self.stacks.items():
            seen = [self._observed[layer] for layer in layers if layer in self._observed]
            if not seen:
                rank_zero_warn(
                    f"LayerSimilarity: no layer of {stack} ran in training_step where a hook sees it (a model compiled "
                    "as a whole hides its layers); nothing is logged for it"
                )
                sums += [torch.zeros(2 * len(layers) ** 2, device=device, dtype=stats.wide_dtype(device))] * len(KINDS)
                continue
            (example, real), *_ = seen
            unseen = torch.zeros_like(example), None  # counts at no position
            states = [self._observed.get(layer, unseen)[0] for layer in layers]
            try:
                sums += [stats.similarity_sums(states, real, centered).flatten() for centered in KINDS.values()]
            except ValueError as error:
                raise UserError(f"layers.{stack}: {error}; name layers whose outputs have one shape") from error
        return torch.cat(sums)

    def _neighbours(self, trainer: pl.Trainer, name: str, stack: str, row: list[float]) -> dict[str, float]:
        existing = [value for value in row if math.isfinite(value)]
        if not existing:
            return {}
        self.record(trainer, f"{name}/{stack}", row)
        return self.name_layers(name, stack, row) | {f"{name}/{stack}/mean": fmean(existing)}
