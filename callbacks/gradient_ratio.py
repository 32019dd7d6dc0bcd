"""How much of the gradient reaches each layer."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import Optimizer

from stabilize import stats
from stabilize.callbacks.figures import ratio_map
from stabilize.callbacks.history import History
from stabilize.callbacks.layer_monitor import LayerMonitor
from stabilize.callbacks.layers import roles_of, stream_of
from stabilize.errors import UserError
from stabilize.gradients import Gradients
from stabilize.precision import gradient_scale


class GradientRatio(LayerMonitor):
    """Log each layer's gradient norm over the last layer's: near one is healthy, 1e-6 is a layer that does not learn.

    The gradients are those of the whole update: after unscaling, summed over ranks and accumulation, before clipping.

    | key                                                | what                                                        |
    |----------------------------------------------------|-------------------------------------------------------------|
    | `gradient_norm/{stack}/layer_001` ...              | L2 norm of the gradients of the layer's parameters          |
    | `gradient_norm/total`                              | the same over all parameters                                |
    | `gradient_ratio/{stack}/layer_001` ...             | the layer's norm over the last layer's (all but the last)   |
    | `gradient_ratio/{stack}/first_to_last`             | the headline: layer 001 once more                           |
    | `activation_gradient_ratio/{stack}/layer_001` ...  | the same for the gradient of the loss by the layer's output |
    | `activation_gradient_ratio/{stack}/first_to_last`  | the headline of that                                        |
    | `gradient_norm_{role}/{stack}/layer_001` ...       | norm and ratio of the layers' parts of one role alone:      |
    | `gradient_ratio_{role}/{stack}/layer_001` ...      | `self_attention`, `cross_attention`, `feed_forward`         |

    A number that does not exist has no point: a frozen layer, all ratios of a stack whose last layer has gradient zero,
    everything at an update whose `training_step` returned None. `gradient_norm/total` is logged even when infinite or
    NaN. Above 24 layers a stack has at most 25 keys of a kind; the pictures show all layers.

    The gradient by a layer's output is that of all tensors of its stream together. Squared norms are summed over the
    window's micro-batches and over ranks before the ratio is taken, so that a window counts like one large batch.

    Args:
        every: updates between two records; 0 switches the callback off.
        activations: measure the gradient by the layers' outputs too.
        roles: measure the layers' parts by role too, where a layer says what they are (`layer.roles`), or has parts
            that are called as in torch or transformers.
        layers: stack name -> pattern over module names; none: the encoder and decoder of `TranslationTask`.
        figures: draw `gradient_ratio_{stack}.png`, layer by update, and `activation_gradient_ratio_{stack}.png`.

    Raises:
        UserError: if `every` is negative, a pattern matches no module, or the strategy hides its shards (FSDP1,
            DeepSpeed; FSDP2 does not).
    """

    reads_weights = True

    def __init__(
        self,
        every: int = 50,
        activations: bool = False,
        roles: bool = False,
        layers: dict[str, str] | None = None,
        figures: bool = True,
    ) -> None:
        super().__init__(every, layers, figures)
        self.activations = activations
        self.roles = roles
        self.parts: dict[tuple[str, str], list[nn.Module]] = {}
        """What is measured of the layers of a stack: ("", stack) the layers, ("_role", stack) their parts of a role."""
        self._squares: dict[nn.Module, Tensor] = {}
        self._ran: set[nn.Module] = set()
        self._squares_before: list[Tensor | None] = []

    def state_dict(self) -> dict[str, Any]:
        # None but in the middle of an update.
        squares = [self._squares.get(layer) for layer in self._watched] if self._squares else []
        return super().state_dict() | {"squares": squares}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._squares_before = state_dict.get("squares", [])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self.parts = {("", stack): layers for stack, layers in self.stacks.items()}
        gathered, self._squares_before = self._squares_before, []
        self._squares = {
            layer: square.to(pl_module.device)
            for layer, square in zip(self._watched, gathered, strict=False)
            if square is not None
        }
        self._ran = set(self._squares)
        for stack, layers in self.stacks.items() if self.roles else ():
            found = [roles_of(layer) for layer in layers]
            if not any(found):
                kind = type(layers[0]).__name__
                raise UserError(
                    f"GradientRatio: roles: true, but nothing says what the parts of {kind} are; roles: false"
                )
            for role in dict.fromkeys(role for parts in found for role in parts):
                self.parts[f"_{role}", stack] = [parts.get(role, nn.ModuleList()) for parts in found]

    @property
    def _watched(self) -> list[nn.Module]:
        return [layer for layers in self.stacks.values() for layer in layers]

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.activations and self.is_due(trainer):
            self.watch(self._watch_gradient)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if not self.is_due(trainer):
            return
        (squares, self._squares), (ran, self._ran) = (self._squares, {}), (self._ran, set())
        if all(parameter.grad is None for parameter in pl_module.parameters()):
            return  # `training_step` returned None
        modules = [module for part in self.parts.values() for module in part]
        known = Gradients.at(pl_module, optimizer).norm_by_parameter
        norms = stats.gradient_norms([*modules, pl_module], known) / gradient_scale(trainer, optimizer)
        if self.activations:
            for stack, layers in self.stacks.items():
                if ran.isdisjoint(layers):
                    self.warn_unseen(stack)
            missing = norms.new_full((), math.nan)
            of_outputs = torch.stack([squares.get(layer, missing) for layer in self._watched])
            norms = torch.cat([norms, trainer.strategy.reduce(of_outputs, reduce_op="sum").sqrt()])
        norms = norms.cpu()  # the one transfer to the host

        of_parts, total, of_outputs = norms.tensor_split([len(modules), len(modules) + 1])
        metrics = {"gradient_norm/total": total.item()}
        for (role, stack), row in zip(self.parts, of_parts.split([len(p) for p in self.parts.values()]), strict=True):
            metrics |= self.name_layers(f"gradient_norm{role}", stack, row.tolist())
            metrics |= self._ratios(trainer, f"gradient_ratio{role}", stack, row)
        if self.activations:
            sizes = [len(layers) for layers in self.stacks.values()]
            for stack, row in zip(self.stacks, of_outputs.split(sizes), strict=True):
                metrics |= self._ratios(trainer, "activation_gradient_ratio", stack, row)
        self.send(trainer, metrics)

    def forget(self) -> None:
        super().forget()
        self._squares, self._ran, self.parts = {}, set(), {}

    def picture(self, kind: str, history: History, title: str) -> Figure:
        return ratio_map(history, title)

    def _ratios(self, trainer: pl.Trainer, name: str, stack: str, norms: Tensor) -> dict[str, float]:
        row = stats.gradient_ratio(norms).tolist()
        if not row:
            return {}  # one layer has no other to be compared with
        self.record(trainer, f"{name}/{stack}", row)
        metrics = self.name_layers(name, stack, row)
        if math.isfinite(row[0]):
            metrics[f"{name}/{stack}/first_to_last"] = row[0]
        return metrics

    def _watch_gradient(self, layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        self._ran.add(layer)
        for tensor in stream_of(output):
            if tensor.requires_grad:  # in reentrant checkpointing only the second forward's do
                tensor.register_hook(lambda gradient: self._add_square(layer, gradient))

    def _add_square(self, layer: nn.Module, gradient: Tensor) -> None:
        square = stats.squared_norm(gradient)
        self._squares[layer] = self._squares[layer] + square if layer in self._squares else square
