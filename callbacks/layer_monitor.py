"""What all callbacks that measure each layer share: when, which layers, and where the numbers go."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.utils.hooks import RemovableHandle

from stabilize.callbacks.history import History
from stabilize.callbacks.layers import find_layers
from stabilize.errors import UserError

OURS = {"encoder": "model.encoder.layers.*", "decoder": "model.decoder.layers.*"}
SCALARS = 24  # layers with a curve of their own, at most (and the last); see `LayerMonitor.name_layers`


class LayerMonitor(pl.Callback, ABC):
    """Base of the callbacks that measure each layer at every n-th update; works with any LightningModule.

    Nothing is measured, hooked or copied to the host at the updates between. Numbers go straight to the loggers, at the
    step of Lightning's own training metrics (0 for the first update) whatever `log_every_n_steps` is, and never to the
    progress bar. Every layer of every record is also kept in `history`, which travels in the checkpoint and is drawn
    into `figures/` of the run folder and Weights & Biases when `fit` ends, also by an exception.

    Automatic optimisation with one optimiser is assumed.

    Args:
        every: updates between two records, the n-th being the first; 0 switches the callback off.
        layers: stack name -> pattern over module names, see `find_layers`; none: the two stacks of `TranslationTask`.
        figures: whether to draw.

    Raises:
        UserError: if `every` is negative, or (when `fit` starts) a pattern matches no module.
    """

    def __init__(self, every: int, layers: dict[str, str] | None, figures: bool) -> None:
        if every < 0:
            raise UserError(f"every: {every} is no number of updates; give 1 or more, or 0 to switch the callback off")
        self.every = every
        self.layers = OURS if layers is None else layers
        self.figures = figures
        self.stacks: dict[str, list[nn.Module]] = {}
        self.history: dict[str, History] = {}
        self.latest: dict[str, float] = {}
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def draw(self, trainer: pl.Trainer) -> None:
        """Publish the pictures of what was recorded."""

    def summary(self) -> dict[str, float]:
        """Return the headline numbers, metric key -> last value."""
        return {key: value for key, value in self.latest.items() if key.endswith(("/first_to_last", "/mean"))}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.every:
            self.stacks = find_layers(pl_module, self.layers)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.unwatch()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._finish(trainer)

    def state_dict(self) -> dict[str, Any]:
        history = {name: history.state_dict() for name, history in self.history.items()}
        return {"history": history, "latest": dict(self.latest)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = {name: History.from_state_dict(state) for name, state in state_dict["history"].items()}
        self.latest = dict(state_dict["latest"])

    def is_due(self, trainer: pl.Trainer) -> bool:
        """Say whether the update being made is one to record; the same for all micro-batches of its window."""
        return self.every > 0 and (_step(trainer) + 1) % self.every == 0

    def watch(self, hook: Callable[[nn.Module, tuple[Any, ...], Any], None]) -> None:
        """Call `hook(layer, inputs, output)` after each layer's forward, until `unwatch`."""

        def call(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            hook(layer, inputs, output)

        # A function, because a deep copy of the model would copy a bound method's object, which is the callback.
        self._handles = [layer.register_forward_hook(call) for stack in self.stacks.values() for layer in stack]

    @property
    def watching(self) -> bool:
        """Whether there are hooks on the layers."""
        return bool(self._handles)

    def unwatch(self) -> None:
        """Take the hooks off the layers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forget(self) -> None:
        """Let go of the model and of everything gathered for an update that will not be finished."""
        self.unwatch()
        self.stacks = {}

    def record(self, trainer: pl.Trainer, name: str, row: list[float]) -> None:
        """Add a row of all layers to the history called `name`."""
        self.history.setdefault(name, History()).append(_step(trainer) + 1, row)

    def name_layers(self, name: str, stack: str, row: list[float]) -> dict[str, float]:
        """Return `{name}/{stack}/layer_001` ... for the numbers of a row that exist.

        Of a stack above 24 layers every ceil(layers / 24)-th has a key, beside the first and last of the row: at most
        25 keys however deep the stack is.
        """
        spacing = math.ceil(len(self.stacks[stack]) / SCALARS)
        shown = sorted({*range(0, len(row), spacing), len(row) - 1})
        return {f"{name}/{stack}/layer_{i + 1:03d}": row[i] for i in shown if math.isfinite(row[i])}

    def send(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        """Give the numbers of this update to every logger (`log` would be overwritten by Lightning)."""
        self.latest.update(metrics)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=_step(trainer))

    def _finish(self, trainer: pl.Trainer) -> None:
        self.forget()
        if self.figures and self.history and trainer.is_global_zero:
            self.draw(trainer)


def _step(trainer: pl.Trainer) -> int:
    """Return the number of updates made before this one, which is the step loggers know it by."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
