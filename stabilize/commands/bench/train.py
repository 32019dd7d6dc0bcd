"""`stabilize bench train`: how fast `fit` trains."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning.pytorch as lightning
import torch
import wandb
from lightning.pytorch.profilers import Profiler
from rich.console import Console

from stabilize.commands.bench import memory, record
from stabilize.commands.bench.contenders import BenchTrainer, Contender, carry_out
from stabilize.commands.bench.plain_loop import PlainLoop
from stabilize.commands.bench.rounds import Spread, interleaved
from stabilize.commands.bench.table import beside, operations
from stabilize.commands.bench.work import Tokens, ceiling, dtype_of, training_flops
from stabilize.data import TranslationData
from stabilize.data.batch import Batch
from stabilize.errors import at_least
from stabilize.task import TranslationTask

PARTS = ("data", "forward", "loss", "backward", "optimizer", "rest")
ACTIONS = {
    "train_dataloader_next": "data",
    "batch_to_device": "data",
    "training_step": "loss",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "configure_gradient_clipping": "optimizer",
    "lr_scheduler_step": "optimizer",
}
"""The part that an action of Lightning's trainer belongs to, by the last word of its name; all others, such as those of
callbacks, are the rest. The forward pass is inside the loss, and told apart from it by the model's hooks."""


class Window:
    """Some updates in a row, from the start of one to the start of another: what they took.

    Args:
        warm_up: updates before the first.
        updates: how many.
    """

    def __init__(self, warm_up: int, updates: int) -> None:
        self.first, self.last = warm_up, warm_up + updates
        self.batches: list[Batch] = []
        self.wall = self.cpu = 0.0
        self.opens: Callable[[], None] = lambda: None
        """What to do when the first update begins."""
        self.closes: Callable[[], None] = lambda: None
        """What to do when the last has ended."""
        self.is_open = False

    def before(self, update: int, batch: Batch) -> None:
        """Take note that a batch of an update, counted from 0, is there and will be computed."""
        if update == self.first and not self.is_open:
            self.is_open = True
            self.opens()
            self.wall, self.cpu = time.perf_counter(), time.process_time()
        if update == self.last and self.is_open:
            self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
            self.closes()
            self.is_open = False
        if self.is_open:
            self.batches.append(batch)


class Shares(Profiler):
    """The seconds of each of PARTS; a part inside another is not counted there."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        """By part, between the last two calls of `restart` and `finish`."""
        self._spent: dict[str, float] = defaultdict(float)
        self._parts: dict[str, str] = {}
        self._running: list[str] = []
        self._since = 0.0

    def restart(self) -> None:
        """Count from here."""
        self._spent.clear()
        self._since = time.perf_counter()

    def finish(self) -> None:
        """Count up to here."""
        self._pass()
        self.seconds = {part: self._spent[part] for part in PARTS}

    def start(self, action_name: str) -> None:
        self._pass()
        if action_name not in self._parts:
            self._parts[action_name] = ACTIONS.get(action_name.rpartition(".")[2], "rest")
        self._running.append(self._parts[action_name])

    def stop(self, action_name: str) -> None:
        self._pass()
        self._running.pop()

    def _pass(self) -> None:
        now = time.perf_counter()
        self._spent[self._running[-1] if self._running else "rest"] += now - self._since
        self._since = now

    def watch(self, task: TranslationTask) -> None:
        """Tell the forward pass from the loss around it."""
        self._parts["forward"] = "forward"
        task.model.register_forward_pre_hook(lambda *_: self.start("forward"))
        task.model.register_forward_hook(lambda *_: self.stop("forward"))


class Clock(lightning.Callback):
    """Tells a window of the updates that a trainer makes, and the shares of its forward passes."""

    def __init__(self, window: Window, shares: Shares) -> None:
        self.window, self.shares = window, shares

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.shares.watch(cast(TranslationTask, pl_module))

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Batch, batch_idx: int) -> None:
        self.window.before(trainer.global_step, batch)


class Timed(NamedTuple):
    """What some updates took, and what they worked on."""

    wall: float
    cpu: float
    tokens: Tokens
    flops: int
    shares: dict[str, float]
    """Of the wall time, by part; empty where nobody looked."""


def fit(contender: Contender, warm_up: int, updates: int) -> Timed:
    """Train from the beginning as `fit` does, with its callbacks and records but no validation, and time the last
    updates."""
    window, shares = Window(warm_up, updates), Shares()
    window.opens, window.closes = shares.restart, shares.finish
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        task, data, trainer = contender.run_in(Path(folder))
        trainer.callbacks.insert(0, Clock(window, shares))
        trainer.profiler = shares
        trainer.fit_loop.epoch_loop.max_steps = window.last + 1
        trainer.fit_loop.max_epochs = -1
        trainer.limit_train_batches, trainer.limit_val_batches = 1.0, 0
        try:
            trainer.fit(task, datamodule=data)
        finally:
            wandb.finish()  # while its folder is there
    return _timed(task, window, {part: seconds / window.wall for part, seconds in shares.seconds.items()})


def in_plain_loop(contender: Contender, warm_up: int, updates: int) -> Timed:
    """The same updates of the same model in a plain loop of PyTorch: no Lightning, no callbacks, no records."""
    window, loop = Window(warm_up, updates), PlainLoop(contender)
    batches, together = _endless(loop.data), loop.trainer.accumulate_grad_batches
    for update in range(window.last + 1):
        read = []
        for batch in itertools.islice(batches, together):
            window.before(update, batch)
            read.append(batch)
        loop.update(read)
    return _timed(loop.task, window, {})


def _endless(data: TranslationData) -> Iterator[Batch]:
    """The batches of epoch after epoch, as a trainer reads them."""
    loader = data.train_dataloader()
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def _timed(task: TranslationTask, window: Window, shares: dict[str, float]) -> Timed:
    tokens = Tokens.of(window.batches)
    flops = training_flops(task.sizes, task.tokenizer.vocabulary, tokens.source, tokens.target)
    return Timed(window.wall, window.cpu, tokens, flops, shares)


class TrainBench(BenchTrainer):
    """Lightning's trainer, with the verb that measures training."""

    def bench(
        self,
        model: TranslationTask,
        datamodule: TranslationData,
        rounds: int = 5,
        updates: int = 50,
        warm_up: int = 10,
        against: list[str] | None = None,
        bare: bool = False,
        json: Path | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Show how fast fit trains: tokens a second, operations against the machine's products, padding, memory, parts.

        In each round every config is trained from new weights on the same batches, with the callbacks and loggers of a
        run in a folder that is deleted, without validation.

        Args:
            rounds: in which everything compared has its turn.
            updates: that are timed in a round; 50 hold one record of each diagnostic at its default interval.
            warm_up: updates before those, which are not timed.
            against: what else to lay over the config, each by itself: paths, or names of configs/strategies.
            bare: whether to train the config in a plain loop of PyTorch too, without Lightning, callbacks, records.
            json: a file for all numbers.
            ckpt_path: a checkpoint that the config must fit; its weights are not looked at.
            weights_only: here so that a config of `fit` does; nothing else is ever read.
        """
        at_least("bench", rounds=(rounds, 1), updates=(updates, 1), warm_up=(warm_up, 1))
        self.check_device()
        record.check_place(json)
        command, dtype = self.command, dtype_of(str(self.precision))
        datamodule.setup("fit")
        contenders = command.contenders(datamodule, against)
        turns: dict[str, Callable[[], Any]] = {
            one.name: lambda one=one: fit(one, warm_up, updates)  # type: ignore[misc]
            for one in contenders
        }
        if bare:
            turns["bare loop"] = lambda: in_plain_loop(contenders[0], warm_up, updates)
        with Console().status(f"{rounds} rounds of {len(turns) * (warm_up + updates)} updates"):
            found = interleaved({**turns, "": lambda: ceiling(dtype)}, rounds)
            limit = max(found.pop(""))
            peaks = {one.name: memory.peak(lambda one=one: fit(one, 1, 1)) for one in contenders}  # type: ignore[misc]
        rows = [_row(name, timed, found[contenders[0].name], limit, peaks.get(name)) for name, timed in found.items()]
        about = {
            "rounds": rounds,
            "updates": updates,
            "warm_up": warm_up,
            "precision": str(self.precision),
            "ceiling": limit,
        }
        title = "Training: medians over rounds (least to greatest)"
        Console().print(beside(title, rows, _shown(limit, dtype)))
        record.write(json, "train", rows, threads=torch.get_num_threads(), **about)


def _row(name: str, timed: list[Timed], first: list[Timed], limit: float, peak: int | None) -> dict[str, Any]:
    """What is shown of a contender, by name."""
    tokens = timed[0].tokens  # the same batches in each round
    target, wall = int(tokens.target.sum()), Spread([one.wall for one in timed])
    speed = Spread([int(one.tokens.target.sum()) / one.wall for one in timed])
    of_first = Spread([int(one.tokens.target.sum()) / one.wall for one in first])
    flops = Spread([one.flops / one.wall for one in timed])
    return {
        "name": name,
        "tokens_per_second": speed,
        "tokens_per_cpu_second": Spread([target / one.cpu for one in timed]),
        "ratio": speed.over(of_first),
        "seconds": wall,
        "target_tokens": target,
        "source_tokens": int(tokens.source.sum()),
        "flops_per_second": flops,
        "share_of_ceiling": flops.median / limit,
        "padding": tokens.padding,
        "peak_memory": peak,
        "parts": {part: Spread([one.shares[part] for one in timed]).median for part in timed[0].shares},
    }


def _shown(limit: float, dtype: torch.dtype) -> dict[str, Callable[[dict[str, Any]], str]]:
    """The lines of the table, and what each shows of a row."""
    return {
        "target tokens a second": lambda row: row["tokens_per_second"].shown(",.0f"),
        "ratio in a round": lambda row: row["ratio"].shown(".3f"),
        "target tokens a CPU second": lambda row: row["tokens_per_cpu_second"].shown(",.0f"),
        **operations(limit, dtype),
        "padding of source, target": lambda row: ", ".join(f"{share:.2%}" for share in row["padding"].values()),
        "peak memory, MiB": lambda row: "" if row["peak_memory"] is None else f"{row['peak_memory'] / 2**20:,.0f}",
        **{f"share of {part}": functools.partial(_share, part) for part in PARTS},
    }


def _share(part: str, row: dict[str, Any]) -> str:
    return f"{row['parts'][part]:.1%}" if row["parts"] else ""


measure = functools.partial(carry_out, TrainBench)
"""Carry out `stabilize bench train`."""
