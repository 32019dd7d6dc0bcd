"""What all callbacks that measure each layer share: when, which layers, and where the numbers go."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from matplotlib.figure import Figure
from torch import nn
from torch.utils.hooks import RemovableHandle

from stabilize.callbacks.figures import publish
from stabilize.callbacks.history import History
from stabilize.callbacks.layers import find_layers
from stabilize.callbacks.monitor import Monitor, step_of

OURS = {"encoder": "model.encoder.layers.*", "decoder": "model.decoder.layers.*"}
FIRST_DRAWN = 16  # records before the first picture; each later one waits for twice as many, so that they are few
SCALARS = 24  # layers with a curve of their own, at most (and the last); see `LayerMonitor.name_layers`


class LayerMonitor(Monitor, ABC):
    """Base of the callbacks that measure each layer at every n-th update; works with any LightningModule.

    Nothing is measured, hooked or copied to the host at the updates between. Every layer of every record is also kept
    in `history`, which travels in the checkpoint and is drawn into `figures/` of the run folder and Weights & Biases:
    at the 16th record, the 32nd, the 64th and so on, for a run that is killed, and when `fit` ends, also by an
    exception.

    Args:
        every: updates between two records, the n-th being the first; 0 switches the callback off.
        layers: stack name -> pattern over module names, see `find_layers`; none: the two stacks of `TranslationTask`.
        figures: whether to draw.

    Raises:
        UserError: if `every` is negative, or (when `fit` starts) a pattern matches no module.
    """

    def __init__(self, every: int, layers: dict[str, str] | None, figures: bool) -> None:
        super().__init__(every)
        self.layers = OURS if layers is None else layers
        self.figures = figures
        self.stacks: dict[str, list[nn.Module]] = {}
        self.history: dict[str, History] = {}
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def picture(self, kind: str, history: History, title: str) -> Figure:
        """Return the picture of the history called `kind/stack`."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.every:
            self.stacks = find_layers(pl_module, self.layers)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.unwatch()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.unwatch()  # `on_train_batch_start` may have ended the epoch, after which no batch ends

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._finish(trainer)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "history": {name: history.state_dict() for name, history in self.history.items()}
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.history = {name: History.from_state_dict(state) for name, state in state_dict["history"].items()}

    def watch(
        self,
        hook: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None],
        modules: Iterable[nn.Module] | None = None,
    ) -> None:
        """Call `hook(module, inputs, keywords, output)` after the forward of each module, or layer, until `unwatch`."""
        watched = [layer for stack in self.stacks.values() for layer in stack] if modules is None else modules
        watched = dict.fromkeys(watched)

        # A function, because a deep copy of the model would copy a bound method's object, which is the callback.
        def call(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            if module in watched:  # a copy of the model has copies of the hooks
                hook(module, inputs, keywords, output)

        self.unwatch()  # where the last batch was begun and never ended
        self._handles = [module.register_forward_hook(call, with_kwargs=True) for module in watched]

    @property
    def watching(self) -> bool:
        """Whether there are hooks."""
        return bool(self._handles)

    def unwatch(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forget(self) -> None:
        """Let go of the model and of everything gathered for an update that will not be finished."""
        self.unwatch()
        self.stacks = {}

    def warn_unseen(self, stack: str) -> None:
        """Say that nothing is known of a stack."""
        rank_zero_warn(
            f"{type(self).__name__}: no layer of {stack} ran in training_step where a hook sees it (a model compiled "
            "as a whole hides its layers); nothing is logged for it"
        )

    def record(self, trainer: pl.Trainer, name: str, row: list[float]) -> None:
        """Add a row of all layers to the history called `name`."""
        self.history.setdefault(name, History()).append(step_of(trainer) + 1, row)

    def name_layers(self, name: str, stack: str, row: list[float]) -> dict[str, float]:
        """Return `{name}/{stack}/layer_001` ... for the numbers of a row that exist.

        Of a stack above 24 layers every ceil(layers / 24)-th has a key, beside the first and last of the row: at most
        25 keys however deep the stack is.
        """
        spacing = math.ceil(len(self.stacks[stack]) / SCALARS)
        shown = sorted({*range(0, len(row), spacing), len(row) - 1})
        return {f"{name}/{stack}/layer_{i + 1:03d}": row[i] for i in shown if math.isfinite(row[i])}

    def log_row(self, trainer: pl.Trainer, name: str, stack: str, row: list[float]) -> dict[str, float]:
        """Record a row and return its keys; nothing of a row without a number."""
        if not any(map(math.isfinite, row)):
            return {}
        self.record(trainer, f"{name}/{stack}", row)
        return self.name_layers(name, stack, row)

    def send(self, trainer: pl.Trainer, metrics: dict[str, float], step: int | None = None) -> None:
        super().send(trainer, metrics, step)
        records = max((history.offered for history in self.history.values()), default=0)
        if metrics and records >= FIRST_DRAWN and records.bit_count() == 1:
            self._draw_where_asked(trainer)

    def draw(self, trainer: pl.Trainer) -> None:
        """Publish the pictures of everything in `history`."""
        for name, history in self.history.items():
            kind, stack = name.split("/")
            publish(trainer, f"{kind}_{stack}", self.picture(kind, history, f"{kind.replace('_', ' ')}, {stack}"))

    def _finish(self, trainer: pl.Trainer) -> None:
        self.forget()
        self._draw_where_asked(trainer)

    def _draw_where_asked(self, trainer: pl.Trainer) -> None:
        if self.figures and self.history and trainer.is_global_zero:
            self.draw(trainer)
