"""What a study is to run: a grid over keys of `fit`, one run a point."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stabilize.errors import UserError

LEARNING_RATE = "model.optimizer.init_args.lr"
UPDATES = "trainer.max_steps"
BATCH = "data.init_args.batch_tokens"

Answer = Literal["strategies", "frontier", "warmup", "epsilon", "batch_norm", "claims"]
"""Names of the rules by which results become sentences; those of `claims` judge claims."""


@dataclass
class Study:
    """What a study file says.

    Args:
        question: what it is to answer.
        configs: of every run, in this order; paths as seen from where the command is given.
        strategies: names of configs/strategies, or paths, one laid over the configs in each run. A name may have a
            word of its own behind a plus, `post_ln+warmup`: the same strategy again, with other keys in `special`.
        seeds: `seed_everything` of the runs.
        depths: layers of the encoder, and of the decoder; none: as the configs say.
        learning_rates: of the optimiser, each with every seed; of these, the table shows each strategy at its best.
        grid: further keys of `fit`, each with its values.
        settings: keys of `fit` with one value for all runs.
        special: by strategy, keys of `fit` for its runs alone.
        tokens: budget of a run, padding included: its updates are these over its data.init_args.batch_tokens, which
            grid, settings or special have to name; none: as many updates as the configs say.
        studies: files of other studies whose runs are runs of this one too.
        answer: the rule by which results become sentences.
        core_minutes: what all runs together take of one core, measured once.
    """

    question: str
    configs: list[str] = field(default_factory=list)
    strategies: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [1])
    depths: list[int] | None = None
    learning_rates: list[float] | None = None
    grid: dict[str, list[Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    special: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens: int | None = None
    studies: list[str] = field(default_factory=list)
    answer: Answer = "strategies"
    core_minutes: float | None = None

    def __post_init__(self) -> None:
        lists: dict[str, list[Any]] = {"seeds": self.seeds, **self.grid}
        if not self.studies:
            lists |= {"configs": self.configs, "strategies": self.strategies}
        for name in ("depths", "learning_rates"):
            if getattr(self, name) is not None:
                lists[name] = getattr(self, name)
        for name, values in lists.items():
            if not values:
                raise UserError(f"{name} is empty; it needs one value at least")
        for name, values in {**lists, "strategies": self.strategies, "studies": self.studies}.items():
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise UserError(f"{name} has {twice[0]} twice")
        for name in self.special:
            if name not in self.strategies:
                raise UserError(f"special has keys for {name}, which is none of the strategies")
        for name in self.strategies:
            if base(name) != name and name not in self.special:
                raise UserError(f"strategies has {name}, but special has no keys for it that set it apart")

    @property
    def keys(self) -> list[str]:
        """The columns that say where a run lies in the grid."""
        depth = [] if self.depths is None else ["depth"]
        rate = [] if self.learning_rates is None else ["learning_rate"]
        return ["strategy", *depth, *rate, *self.grid, "seed"]


def base(strategy: str) -> str:
    """The bundle that a strategy of a study is: its name without the word behind the plus."""
    return strategy if strategy.endswith((".yaml", ".yml")) else strategy.partition("+")[0]


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    name: str
    values: dict[str, str]
    """Where it lies in the grid: strategy, depth, learning rate, further keys, seed."""
    words: tuple[str, ...]
    """Of `stabilize fit`."""


def cells(study: Study, paths: Mapping[str, Path], threads: int = 1) -> list[Cell]:
    """All runs, seed by seed, so that a study that is stopped early has a whole table.

    Args:
        paths: the config of each strategy.
        threads: of each run.

    Raises:
        UserError: two runs would have one name, or a budget in tokens cannot be turned into updates.
    """
    found: dict[str, Cell] = {}
    axes: list[Iterable[tuple[str, Any]]] = [[("seed", seed) for seed in study.seeds]]
    axes += [[("depth", depth) for depth in study.depths]] if study.depths is not None else []
    axes += [[("strategy", strategy) for strategy in study.strategies]]
    axes += [[("learning_rate", rate) for rate in study.learning_rates]] if study.learning_rates is not None else []
    axes += [[(key, value) for value in values] for key, values in study.grid.items()]
    for place in itertools.product(*axes):
        point = dict(place)
        values = {key: _word(point[key]) for key in study.keys}
        words = _words(study, point, paths[point["strategy"]], threads)
        name = "-".join(_short(key, value) for key, value in values.items())
        if name in found:
            raise UserError(f"two runs of the study would be called {name}")
        found[name] = Cell(name, values, words)
    return list(found.values())


def _words(study: Study, point: Mapping[str, Any], path: Path, threads: int) -> tuple[str, ...]:
    keys: dict[str, Any] = {}
    if "depth" in point:
        keys |= {"model.encoder_layers": point["depth"], "model.decoder_layers": point["depth"]}
    keys |= study.settings
    if "learning_rate" in point:
        keys[LEARNING_RATE] = point["learning_rate"]
    keys |= {key: point[key] for key in study.grid} | study.special.get(point["strategy"], {})
    if study.tokens is not None:
        if BATCH not in keys:
            raise UserError(f"tokens is {study.tokens}, but neither grid nor settings nor special has {BATCH}")
        keys.setdefault(UPDATES, max(1, study.tokens // (keys[BATCH] * keys.get("trainer.accumulate_grad_batches", 1))))
    keys |= {"seed_everything": point["seed"], "threads": threads}
    configs = [word for config in (*study.configs, path) for word in ("-c", str(config))]
    return (*configs, *(f"--{key}={_word(value)}" for key, value in keys.items()))


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _short(key: str, value: str) -> str:
    said = Path(value).stem if key == "strategy" else f"{short(key)}={value}"
    return re.sub(r"[^\w.=+]+", "_", said)


def place_of(values: Mapping[str, str]) -> str:
    """Where a point of the grid lies, in words: `post_ln, depth 12`."""
    return ", ".join(value if key == "strategy" else f"{short(key)} {value}" for key, value in values.items())


def short(key: str) -> str:
    """A column's name as it is told: `lr`, `batch_tokens`."""
    return "lr" if key == "learning_rate" else key.rpartition(".")[2]
