"""`stabilize bench diagnostics`: what each callback of a run costs."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as lightning
import torch
import wandb
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stabilize.callbacks.layer_monitor import LayerMonitor
from stabilize.callbacks.monitor import Monitor
from stabilize.commands.bench import record
from stabilize.commands.bench.contenders import BenchTrainer, Contender, carry_out
from stabilize.commands.bench.rounds import interleaved
from stabilize.data import TranslationData
from stabilize.errors import UserError, at_least
from stabilize.task import TranslationTask

NEVER = 2**62
"""An interval in which no update is due: what a callback costs at the updates between its records."""
DRAWS = 2000
"""Of the bootstrap."""


TURN = 10
"""Rounds of one fit, after which another config has its turn."""


class Cost(NamedTuple):
    """Share of an update's CPU time, the median over rounds, and the 95 % interval of its bootstrap."""

    median: float
    low: float
    high: float
    rounds: Sequence[float]

    def __str__(self) -> str:
        return f"{self.median:.2%} ({self.low:.2%} to {self.high:.2%})"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict()


class Rounds(lightning.Callback):
    """Trains on, and from update to update switches diagnostics on and off.

    A round has one update of each kind, in an order of its own: without any, and for each monitor and for all together
    one that is recorded and one between two records. The first round warms up and is not counted.

    Args:
        monitors: by name.
        rounds: to count.
    """

    def __init__(self, monitors: dict[str, Monitor], rounds: int) -> None:
        self.monitors = monitors
        switched: dict[str, list[str]] = {name: [name] for name in monitors}
        switched["all"] = [name for name, monitor in monitors.items() if monitor.every]
        self.intervals = {name: monitor.every for name, monitor in monitors.items()}
        self.kinds: dict[tuple[str, int], list[str]] = {("none", NEVER): []}
        self.kinds |= {(name, every): ones for name, ones in switched.items() for every in (1, NEVER)}
        self.seconds: dict[tuple[str, int], list[float]] = {kind: [] for kind in self.kinds}
        self.updates = len(self.kinds) * (rounds + 1) + 1
        self._order = self._shuffled(rounds + 1)
        self._current: tuple[str, int] | None = None
        self._start = 0.0
        for monitor in monitors.values():
            monitor.every = monitor.every or 1  # which finds its layers when fit starts

    def _shuffled(self, rounds: int) -> Iterator[tuple[str, int]]:
        generator = random.Random(1)
        for _ in range(rounds):
            yield from generator.sample([*self.kinds], len(self.kinds))

    def on_train_batch_start(self, *_: Any) -> None:
        if self._current is not None:
            self.seconds[self._current].append(time.process_time() - self._start)
        self._current = next(self._order, None)
        if self._current is not None:
            for name, monitor in self.monitors.items():
                monitor.every = self._current[1] if name in self.kinds[self._current] else 0
        self._start = time.process_time()

    def add(self, other: Rounds) -> None:
        """Count the rounds of another fit of the same config too."""
        for kind, seconds in self.seconds.items():
            seconds += other.seconds[kind][1:]

    def shares(self, kind: tuple[str, int]) -> Tensor:
        """By how much an update of a kind takes longer than the one of its round without diagnostics: `[rounds]`."""
        with_it, without = (torch.tensor(self.seconds[which][1:]) for which in (kind, ("none", NEVER)))
        return with_it / without - 1

    def at_every_update(self, name: str) -> Cost:
        """What a monitor, or all, cost where each update is recorded."""
        return _cost(self.shares((name, 1)))

    def at_intervals(self, name: str) -> Cost | None:
        """What a monitor, or all, cost where every n-th update is recorded as the config says; none where none is."""
        parts = [name] if name in self.intervals else self.kinds["all", 1]
        if not all(self.intervals[part] for part in parts):
            return None
        records = [(self.shares((part, 1)) - self.shares((part, NEVER))) / self.intervals[part] for part in parts]
        return _cost(self.shares((name, NEVER)) + torch.stack(records).sum(0))


def _cost(shares: Tensor) -> Cost:
    generator = torch.Generator().manual_seed(1)
    drawn = shares[torch.randint(len(shares), (DRAWS, len(shares)), generator=generator)].quantile(0.5, dim=1)
    low, high = drawn.quantile(torch.tensor([0.025, 0.975])).tolist()
    return Cost(shares.quantile(0.5).item(), low, high, shares.tolist())


def monitors_of(trainer: BenchTrainer) -> dict[str, Monitor]:
    """The diagnostics of a trainer, by name.

    Raises:
        UserError: none of them is on.
    """
    monitors = {type(c).__name__: c for c in trainer.callbacks if isinstance(c, Monitor)}
    if not any(monitor.every for monitor in monitors.values()):
        raise UserError("all diagnostics are off; --gradient_ratio.every 50 would do")
    return monitors


def fit(contender: Contender, rounds: int) -> Rounds:
    """Train from the beginning on one batch, with the loggers of a run in a folder that is deleted at the end.

    Raises:
        UserError: none of the diagnostics is on.
    """
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        task, data, trainer = contender.run_in(Path(place))
        monitors = monitors_of(trainer)
        for monitor in monitors.values():
            if isinstance(monitor, LayerMonitor):
                monitor.figures = False
        counted = Rounds(monitors, rounds)
        trainer.callbacks = [counted, *monitors.values()]
        trainer.fit_loop.epoch_loop.max_steps = counted.updates
        trainer.fit_loop.max_epochs = -1
        trainer.accumulate_grad_batches, trainer.limit_val_batches = 1, 0
        trainer.limit_train_batches = trainer.val_check_interval = 1.0
        try:
            trainer.fit(task, itertools.repeat(next(iter(data.train_dataloader()))), [])
        finally:
            wandb.finish()  # while its folder is there
    counted.monitors.clear()  # whose layers would keep the model
    return counted


def fits(contender: Contender, rounds: int) -> Iterator[Rounds]:
    """One fit after the other, of at most so many rounds as a turn has, until all rounds are made."""
    for made in range(0, rounds, TURN):
        yield fit(contender, min(TURN, rounds - made))


class DiagnosticsBench(BenchTrainer):
    """Lightning's trainer, with the verb that measures diagnostics."""

    def bench(
        self,
        model: TranslationTask,
        datamodule: TranslationData,
        rounds: int = 30,
        against: list[str] | None = None,
        json: Path | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Show what each diagnostic costs: CPU time of the process, updates with it and without it in turn.

        One batch, the first of fit, is an update, again and again, with the loggers of a run in a folder that is
        deleted at the end. What Weights & Biases does in a process of its own is not counted. Costs are shares of the
        same config's updates without diagnostics; configs have ten rounds at a time in turn, as only one fit can go on
        at a time.

        Args:
            rounds: updates of each kind that are compared.
            against: what else to lay over the config, each by itself: paths, or names of configs/strategies.
            json: a file for all numbers.
            ckpt_path: a checkpoint that the config must fit; its weights are not looked at.
            weights_only: here so that a config of `fit` does; nothing else is ever read.
        """
        at_least("bench", rounds=(rounds, 2))
        self.check_device()
        record.check_place(json)
        monitors_of(self)
        datamodule.setup("fit")
        contenders = self.command.contenders(datamodule, against)
        turns = {one.name: functools.partial(next, fits(one, rounds)) for one in contenders}
        with Console().status(f"{rounds} rounds of {len(turns)} configs"):
            found = interleaved(turns, -(-rounds // TURN))
        for first, *others in found.values():
            for other in others:
                first.add(other)
        rows = [row for name, (first, *_) in found.items() for row in _rows(name, first)]
        Console().print(_shown(rows))
        about = {"rounds": rounds, "precision": str(self.precision)}
        record.write(json, "diagnostics", rows, threads=torch.get_num_threads(), **about)


def _rows(name: str, counted: Rounds) -> list[dict[str, Any]]:
    """What is shown of each callback of a config, and of all together."""
    return [
        {
            "name": name,
            "callback": callback,
            "every": counted.intervals.get(callback),
            "at_every_update": counted.at_every_update(callback),
            "at_intervals": counted.at_intervals(callback),
        }
        for callback in [*counted.intervals, "all"]
    ]


def _shown(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table(box=box.SIMPLE, title="CPU time above that of an update without diagnostics, median (95 % interval)")
    for heading in ("", "callback", "recorded at every update", "at its interval"):
        shown.add_column(heading)
    for row in rows:
        interval = "as above" if row["every"] is None else f"every {row['every']}"
        sometimes = "off" if row["at_intervals"] is None else f"{interval}: {row['at_intervals']}"
        shown.add_row(
            row["name"], row["callback"], str(row["at_every_update"]), sometimes, end_section=row["callback"] == "all"
        )
    return shown


measure = functools.partial(carry_out, DiagnosticsBench)
"""Carry out `stabilize bench diagnostics`."""
