"""`stabilize bench depth`: what a layer costs, from shallow models to deep ones."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from stabilize.commands.bench import memory, record
from stabilize.commands.bench.contenders import BenchTrainer, Contender, carry_out
from stabilize.commands.bench.plain_loop import PlainLoop
from stabilize.commands.bench.rounds import Spread, interleaved
from stabilize.data import TranslationData
from stabilize.data.batch import Batch
from stabilize.errors import at_least
from stabilize.task import TranslationTask

DEPTHS = (6, 12, 25, 50, 100)
SHALLOWEST = 1
"""Layers of each stack of the model that the others are set against: what it takes is for all that is no layer, and
for two layers."""


class Layered(NamedTuple):
    """What a contender took at one depth, of the encoder and of the decoder."""

    seconds: Spread
    """Of an update."""
    peak: int
    """Bytes."""


@dataclasses.dataclass(frozen=True)
class Growth:
    """What a contender takes by depth, with SHALLOWEST among them."""

    by_depth: dict[int, Layered]

    def seconds_per_layer(self, depth: int) -> Spread:
        """Of an update, in each round: by how much it takes longer than the shallowest, over the layers it has more."""
        pairs = zip(self.by_depth[depth].seconds.rounds, self.by_depth[SHALLOWEST].seconds.rounds, strict=True)
        return Spread([(deep - shallow) / _more(depth) for deep, shallow in pairs])

    def bytes_per_layer(self, depth: int) -> float:
        """The same of the peak of memory."""
        return (self.by_depth[depth].peak - self.by_depth[SHALLOWEST].peak) / _more(depth)

    @property
    def depths(self) -> list[int]:
        """All but the shallowest."""
        return [depth for depth in self.by_depth if depth != SHALLOWEST]

    @property
    def deviations(self) -> dict[str, float]:
        """By how much the time and the memory of a layer are off their medians over depths, at the worst depth."""
        seconds = [self.seconds_per_layer(depth).median for depth in self.depths]
        return {"time": _deviation(seconds), "memory": _deviation([*map(self.bytes_per_layer, self.depths)])}


def _more(depth: int) -> int:
    return 2 * (depth - SHALLOWEST)


def _deviation(numbers: Sequence[float]) -> float:
    middle = statistics.median(numbers)
    return max(abs(number / middle - 1) for number in numbers)


class DepthBench(BenchTrainer):
    """Lightning's trainer, with the verb that measures depth."""

    def bench(
        self,
        model: TranslationTask,
        datamodule: TranslationData,
        depths: list[int] | None = None,
        rounds: int = 5,
        updates: int = 2,
        against: list[str] | None = None,
        json: Path | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Show what an update takes, time and peak memory, by the number of layers, and whether both grow evenly.

        A plain loop makes updates of one batch, the first of fit. A layer's share is what a model takes more than one
        of 1+1 layers, over the layers that it has more. The models of all depths are in memory together, but only one
        at a time works; memory is measured of each by itself.

        Args:
            depths: numbers of layers, of the encoder and the decoder alike; none: 6, 12, 25, 50 and 100.
            rounds: in which everything compared has its turn.
            updates: that are timed in a turn.
            against: what else to lay over the config, each by itself: paths, or names of configs/strategies.
            json: a file for all numbers.
            ckpt_path: a checkpoint that the config must fit; its weights are not looked at.
            weights_only: here so that a config of `fit` does; nothing else is ever read.
        """
        chosen = list(dict.fromkeys(DEPTHS if depths is None else depths))
        at_least("bench", rounds=(rounds, 1), updates=(updates, 1), depths=(min(chosen, default=0), SHALLOWEST + 1))
        self.check_device()
        record.check_place(json)
        datamodule.setup("fit")
        batch = next(iter(datamodule.train_dataloader()))
        contenders = {
            (one.name, depth): _at(one, depth, datamodule)
            for one in self.command.contenders(datamodule, against)
            for depth in (SHALLOWEST, *chosen)
        }
        loops: dict[tuple[str, int], PlainLoop] = {}

        def build(key: tuple[str, int]) -> None:
            """Also two updates: in the second the optimiser's moments are there."""
            loops[key] = PlainLoop(contenders[key])
            for _ in range(2):
                loops[key].update([batch])

        with Console().status("memory") as status:
            peaks = {key: memory.peak(functools.partial(build, key)) for key in contenders}
            turns = {f"{name} {depth}": _timer(loop, batch, updates) for (name, depth), loop in loops.items()}
            status.update(f"{rounds + 1} rounds of {len(turns)} x {updates} updates")
            found = {name: Spread(times[1:]) for name, times in interleaved(turns, rounds + 1).items()}  # one warms up
        grown: dict[str, Growth] = {}
        for name, depth in contenders:
            of_depth = Layered(found[f"{name} {depth}"], peaks[name, depth])
            grown.setdefault(name, Growth({})).by_depth[depth] = of_depth
        rows = _rows(grown)
        Console().print(_shown(rows), _summary(grown))
        deviations = {name: growth.deviations for name, growth in grown.items()}
        about = {"rounds": rounds, "updates": updates, "precision": str(self.precision), "deviations": deviations}
        record.write(json, "depth", rows, threads=torch.get_num_threads(), **about)


def _at(contender: Contender, depth: int, data: TranslationData) -> Contender:
    """The contender with other numbers of layers, and the text of all."""
    config = contender.config.clone()
    config.model.encoder_layers = config.model.decoder_layers = depth
    return dataclasses.replace(contender, config=config, data=data)


def _timer(loop: PlainLoop, batch: Batch, updates: int) -> Callable[[], float]:
    """What makes some updates and gives the seconds of one."""

    def time_updates() -> float:
        start = time.perf_counter()
        for _ in range(updates):
            loop.update([batch])
        return (time.perf_counter() - start) / updates

    return time_updates


def _rows(grown: dict[str, Growth]) -> list[dict[str, Any]]:
    """What is shown of each contender at each depth, set against the first."""
    first = next(iter(grown.values()))
    return [
        {
            "name": name,
            "depth": depth,
            "seconds": growth.by_depth[depth].seconds,
            "seconds_per_layer": growth.seconds_per_layer(depth),
            "ratio": growth.by_depth[depth].seconds.over(first.by_depth[depth].seconds),
            "peak_memory": growth.by_depth[depth].peak,
            "memory_per_layer": growth.bytes_per_layer(depth),
            "memory_ratio": growth.by_depth[depth].peak / first.by_depth[depth].peak,
        }
        for name, growth in grown.items()
        for depth in growth.depths
    ]


def _shown(rows: Sequence[dict[str, Any]]) -> Table:
    title = "An update by depth: medians over rounds (least to greatest)"
    shown = Table(box=box.SIMPLE, title=title, title_justify="left")
    for heading in ("", "layers", "ms", "ms a layer", "ratio in a round", "MiB", "MiB a layer", "ratio"):
        shown.add_column(heading)
    for row in rows:
        milliseconds = (Spread([1000 * one for one in row[key].rounds]) for key in ("seconds", "seconds_per_layer"))
        shown.add_row(
            row["name"],
            f"{row['depth']}+{row['depth']}",
            *(spread.shown(",.2f") for spread in milliseconds),
            row["ratio"].shown(".2f"),
            f"{row['peak_memory'] / 2**20:,.1f}",
            f"{row['memory_per_layer'] / 2**20:,.2f}",
            f"{row['memory_ratio']:.2f}",
        )
    return shown


def _summary(grown: dict[str, Growth]) -> Table:
    shown = Table(box=box.SIMPLE)
    for heading in ("greatest deviation of a layer's share from its median over depths", "time", "memory"):
        shown.add_column(heading)
    for name, growth in grown.items():
        shown.add_row(name, *(f"{deviation:.1%}" for deviation in growth.deviations.values()))
    return shown


measure = functools.partial(carry_out, DepthBench)
"""Carry out `stabilize bench depth`."""
