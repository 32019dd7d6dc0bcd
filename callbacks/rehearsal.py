"""What an update's forward and backward put out, run once more: where the first number is that is none."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from stabilize import generators, stats
from stabilize.callbacks import uncompiled
from stabilize.callbacks.layers import observe, stream_of
from stabilize.precision import loss_scale

BACKWARD = "gradient by the output"


def block_of(name: str) -> str:
    """The layer that a parameter is reported under: its name up to the first number, else that of its module."""
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return numbered[0] if numbered else name.rpartition(".")[0]


@dataclass
class Rehearsal:
    """What was seen of the batches of an update."""

    first: dict[str, Any] | None = None
    """Where the first number is that is not finite: `batch`, which of them, counted from 0, `module`, and `what` of it,
    its output or the gradient by its output."""
    activation_rms: dict[str, float] = field(default_factory=dict)
    """Root mean square of each layer's output in the last of them, or in that one."""

    @classmethod
    def of(
        cls,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        window: Sequence[tuple[Any, int, dict[str, Any] | None]],
    ) -> Rehearsal:
        """Run `training_step` and its backward again, with the same random numbers; no gradient is left behind.

        Args:
            window: batch, its number, and the random generators before it, of each batch of the update; those without
                generators were before a resume and are gone.
        """
        found = cls()
        with _in_silence(pl_module), ExitStack() as after:
            after.callback(generators.restore, generators.state())
            uncompiled.begin(found)
            after.callback(uncompiled.end, found)
            for number, (batch, batch_idx, before) in enumerate(window):
                if before is None:
                    continue
                generators.restore(before)
                seen = _Seen(pl_module)
                try:
                    seen.run(trainer, pl_module, batch, batch_idx)
                finally:
                    seen.leave()
                if found.first is None:  # go on all the same: other ranks may wait for this one
                    found.activation_rms = seen.sizes
                    found.first = seen.first and {"batch": number, **seen.first}
        return found


class _Seen:
    """Hooks on every module, and what they saw of one batch."""

    def __init__(self, pl_module: pl.LightningModule) -> None:
        self._finite: list[tuple[tuple[str, str], Tensor]] = []
        self._squares: dict[str, Tensor] = {}
        self._handles = [
            module.register_forward_hook(self._hook(name), with_kwargs=True)
            for name, module in pl_module.named_modules()
            if name
        ]

    def run(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Forward and backward of a batch."""
        arguments = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)
        with torch.enable_grad():
            with trainer.precision_plugin.train_step_context():
                output = pl_module.training_step(*arguments.values())
            loss = output["loss"] if isinstance(output, dict) else output
            if isinstance(loss, Tensor) and loss.requires_grad:
                parameters = [p for p in pl_module.parameters() if p.requires_grad]
                torch.autograd.grad(loss * loss_scale(trainer), parameters, allow_unused=True)

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def first(self) -> dict[str, str] | None:
        """Module and what of it, where the first number is not finite."""
        if not self._finite:
            return None
        finite = torch.stack([flag for _, flag in self._finite]).tolist()
        places = (place for (place, _), good in zip(self._finite, finite, strict=True) if not good)
        return next(({"module": module, "what": what} for module, what in places), None)

    @property
    def sizes(self) -> dict[str, float]:
        """Root mean square by layer."""
        return {name: size.item() for name, size in self._squares.items()}

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            if self._left(name):
                return
            tensors = [tensor for tensor in stream_of(output) if tensor.is_floating_point()]
            for tensor in tensors:
                self._note(name, "output", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._note(name, BACKWARD, gradient))
            if tensors and block_of(f"{name}.") == name and re.search(r"\d$", name):
                self._squares[name] = stats.activation_rms(*observe(module, inputs, keywords, output))

        return look

    def _left(self, name: str) -> bool:
        """Whether the backward has begun, in which checkpointed layers run again."""
        return any(what == BACKWARD for (_, what), _ in self._finite[-1:])

    def _note(self, name: str, what: str, tensor: Tensor) -> None:
        self._finite.append(((name, what), tensor.detach().isfinite().all()))


@contextmanager
def _in_silence(pl_module: pl.LightningModule) -> Iterator[None]:
    """What `training_step` logs now was logged before."""
    pl_module.log = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del pl_module.log
