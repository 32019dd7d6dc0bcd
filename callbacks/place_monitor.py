"""What the callbacks share whose sums belong to one place each: a layer, or a module inside a layer."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from stabilize import stats
from stabilize.callbacks import uncompiled
from stabilize.callbacks.forward_monitor import ForwardMonitor
from stabilize.callbacks.layers import real_positions


class PlaceMonitor(ForwardMonitor):
    """Base of the callbacks that gather sums at each place of the training forward.

    A place that runs several times in a forward counts with its last run.
    """

    absent: ClassVar[str] = "have no place to look at"
    """What is said of the layers of a stack in which no place was found."""
    numbers: ClassVar[int]
    """How many sums a place has."""
    inside: ClassVar[bool] = False
    """True where places lie inside layers: compiled layers then run uncompiled at the updates that are recorded."""

    def __init__(self, every: int, layers: dict[str, str] | None, figures: bool) -> None:
        super().__init__(every, layers, figures)
        self.places: dict[nn.Module, tuple[str, int]] = {}
        """Each place's stack, and the number of its layer from 0."""
        self.real: Tensor | None = None
        """Which positions are real to the layer that runs, where the masks that it was called with tell."""
        self._seen: dict[nn.Module, Any] = {}

    @abstractmethod
    def see(self, place: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        """Return what is to be kept of one call of a place until the forward has ended."""

    @abstractmethod
    def measure(self, seen: Any) -> Tensor:
        """Return the sums `[numbers]` of one call; all calls in a row, which costs half of one here and one there."""

    @abstractmethod
    def report_places(self, trainer: pl.Trainer, sums: dict[nn.Module, Tensor]) -> None:
        """Send what the places' sums `[numbers]` amount to."""

    def find_places(self, layer: nn.Module) -> list[nn.Module]:
        """Return what is watched in a layer."""
        return [layer]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self.places = {
            place: (stack, number)
            for stack, layers in self.stacks.items()
            for number, layer in enumerate(layers)
            for place in self.find_places(layer)
        }
        for stack in self.stacks.keys() - {stack for stack, _ in self.places.values()}:
            rank_zero_warn(f"{type(self).__name__}: the layers of {stack} {self.absent}; nothing is logged for it")

    def look(self) -> None:
        if self.inside and self.places:
            uncompiled.begin(self)
        self.watch(self._see, self.places)
        if self.inside:
            self._watch_masks()

    def gather(self, trainer: pl.Trainer, device: torch.device) -> Tensor:
        for stack in {stack for stack, _ in self.places.values()} - {self.places[place][0] for place in self._seen}:
            self.warn_unseen(stack)
        nothing = torch.zeros(self.numbers, device=device, dtype=stats.wide_dtype(device))
        with torch.no_grad():
            sums = {place: self.measure(seen) for place, seen in self._seen.items()}
        return torch.stack([sums.get(place, nothing) for place in self.places] or [nothing])

    def report(self, trainer: pl.Trainer, sums: Tensor) -> None:
        self.report_places(trainer, dict(zip(self.places, sums, strict=False)))

    def unwatch(self) -> None:
        super().unwatch()
        self._seen, self.real = {}, None

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        uncompiled.end(self)  # not before: activation checkpointing has to compute again what it did in the forward

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        uncompiled.end(self)

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, *arguments)
        uncompiled.end(self)

    def forget(self) -> None:
        super().forget()
        uncompiled.end(self)
        self.places = {}

    def _see(self, place: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if place.training:
            with torch.no_grad():
                self._seen[place] = self.see(place, inputs, keywords, output)

    def _watch_masks(self) -> None:
        """Before each layer that does not tell its parts which positions are real, see what it is told itself."""
        watched = {layer for stack in self.stacks.values() for layer in stack if not hasattr(layer, "observe")}

        def look(layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if layer in watched:
                self.real = real_positions(layer, inputs, keywords)

        self._handles += [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in watched]
