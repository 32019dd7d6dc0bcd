"""A translation task that is poisoned at known updates, and what its guard wrote down."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from stabilize.callbacks import SpikeGuard
from stabilize.data.batch import Batch
from stabilize.errors import TrainingStoppedError
from stabilize.task import TranslationTask
from tests.tasks import fit, sentence_batch, small_task, small_trainer

ADAM = functools.partial(torch.optim.Adam, lr=3e-3)

POISONED = "decoder.layers.0.branches.2.function"
"""The module that it comes from."""


OF_THE_TASK = ("stabilizer", "optimizer", "clipping", "dropout", "checkpoint_layers", "compile_layers")
"""Options of `train` that are not the trainer's."""


class Infinite(torch.autograd.Function):
    """The same, but for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + math.inf


class Poison(pl.Callback):
    """Makes an update bad, in all of its batches or in one.

    Args:
        updates: which, counted from 1, and how: `nan` comes out of one module, `infinite` out of its backward; `wild`
            is random targets and fifty times the learning rate.
        module: the end of that module's name.
        batch: of the update's; none: all.
        rank: the only process; none: all.
    """

    def __init__(
        self, updates: Mapping[int, str], module: str = POISONED, batch: int | None = None, rank: int | None = None
    ) -> None:
        self.updates = updates
        self.module = module
        self.batch = batch
        self.rank = rank
        self.how: dict[int, str] = {}
        """The poison of each source that has some, also where it is run again."""
        self.now: str | None = None
        self.seen: list[list[int]] = []
        """Sentences of each bad batch."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (module,) = (part for name, part in pl_module.named_modules() if name.endswith(self.module))
        pl_module.model.register_forward_pre_hook(self._choose)
        module.register_forward_hook(self._hook)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        here = self.batch in (None, batch_idx % trainer.accumulate_grad_batches)
        mine = self.rank in (None, trainer.global_rank)
        poison = self.updates.get(trainer.global_step + 1) if here and mine else None
        self.how = {} if batch_idx % trainer.accumulate_grad_batches == 0 else self.how
        if poison is not None:
            self.how[id(batch.source)] = poison
            self.seen.append(batch.index.tolist())
        if poison == "wild":
            batch.target[:, 1:] = torch.randint_like(batch.target[:, 1:], 4, 60)
            for group in trainer.optimizers[0].param_groups:  # until the schedule's next step
                group["lr"] *= 50.0

    def _choose(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.now = self.how.get(id(inputs[0]))

    def _hook(self, module: nn.Module, _: Any, output: Any) -> Any:
        if self.now not in ("nan", "infinite"):
            return None
        first, *rest = output if isinstance(output, tuple) else (output,)
        bad = first * math.nan if self.now == "nan" else Infinite.apply(first)
        return (bad, *rest) if isinstance(output, tuple) else bad


class Trail(pl.Callback):
    """Everything that an update may move, after each: weights, buffers, the optimiser's state."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.states.append(state_of(trainer, pl_module))


def state_of(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    """Copies by name."""
    moments = {
        f"{number}.{name}": value.clone()
        for number, state in enumerate(trainer.optimizers[0].state.values())
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    return {name: value.clone() for name, value in pl_module.state_dict().items()} | moments


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """To the last bit."""
    return one.keys() == other.keys() and all(value.equal(other[name]) for name, value in one.items())


def batches(count: int) -> list[Batch]:
    """Different ones, of one to three sentences."""
    return [sentence_batch(*range(k % 4, k % 4 + 1 + k % 3)) for k in range(count)]


def train(
    folder: Path, given: Sequence[Batch], guard: SpikeGuard, *others: pl.Callback, **options: Any
) -> tuple[dict[str, Any], TranslationTask, str]:
    """Train on batches in order; what it came to, the task, and why it was stopped, if it was."""
    made = {name: options.pop(name) for name in OF_THE_TASK if name in options}
    task = small_task(**{"optimizer": ADAM} | made)
    ckpt_path = options.pop("ckpt_path", None)
    accumulate = options.get("accumulate_grad_batches", 1)
    trainer = small_trainer(folder, guard, *others, **{"max_steps": len(given) // accumulate} | options)
    try:
        fit(trainer, task, given, ckpt_path=ckpt_path)
    except TrainingStoppedError as end:
        return state_of(trainer, task), task, str(end)
    return state_of(trainer, task), task, ""


def events(folder: Path) -> list[dict[str, Any]]:
    """The lines of events.jsonl, read as strictly as JSON is."""
    path = folder / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line, parse_constant=_no_json) for line in lines]


def _no_json(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


class Ending(pl.Callback):
    """Writes the weights that each rank ends with."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.save(pl_module.state_dict(), Path(trainer.default_root_dir) / f"rank_{trainer.global_rank}.pt")
