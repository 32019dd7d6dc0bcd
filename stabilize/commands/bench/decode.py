"""`stabilize bench decode`: how fast a model translates."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from stabilize import checkpoint, kernels
from stabilize.commands.bench import memory, record
from stabilize.commands.bench.contenders import BenchTrainer, Contender, carry_out
from stabilize.commands.bench.rounds import Spread, interleaved
from stabilize.commands.bench.table import beside, operations
from stabilize.commands.bench.work import ceiling, dtype_of, multiply_adds
from stabilize.commands.translate import Translator
from stabilize.data import TranslationData
from stabilize.decoding import BeamSearch
from stabilize.errors import UserError, at_least
from stabilize.task import TranslationTask


class Translated(NamedTuple):
    """What a pass over the text took, and what came out."""

    wall: float
    cpu: float
    tokens: int
    """Of the translations, end marks included."""
    flops: int
    """Useful operations, see `Turn`."""
    truncated: int
    """Translations cut at the length limit."""
    texts: tuple[str, ...]


class Turn:
    """A pass of the verb `translate` over lines with one model and one search, all lines at once.

    Useful operations are those of the model's matrix products over the tokens of a line and of its best translation;
    the other hypotheses are the price.

    Args:
        task: with the model.
        search: for translations.
        data: whose evaluation gives the size of batches and the longest line.
        precision: of the trainer; where it is mixed, products are made as autocast has it.
        lines: to translate.
    """

    def __init__(
        self, task: TranslationTask, search: BeamSearch, data: TranslationData, precision: str, lines: Sequence[bytes]
    ) -> None:
        self.search, self.lines, self._task = search, lines, task
        self._make = functools.partial(
            Translator,
            task,
            search,
            dtype_of(precision) if precision.endswith("-mixed") else None,
            batch_tokens=data.evaluation_batch_tokens,
            longest=data.evaluation_maximum_length,
            unescape=data.policy.unescape,
        )
        self._translator = self._make()
        self._lengths = [len(self._translator.tokens(line)) for line in lines]

    def __call__(self) -> Translated:
        """Translate the lines."""
        start, cpu = time.perf_counter(), time.process_time()
        found = self._translator(self.lines)
        took = time.perf_counter() - start, time.process_time() - cpu
        texts, best = zip(*(hypotheses[0] for hypotheses in found), strict=True)
        ends = [len(one.ids) + (not one.truncated) for one in best]
        made = [length and end for length, end in zip(self._lengths, ends, strict=True)]  # blank lines are no work
        vocabulary, lengths = self._task.tokenizer.vocabulary, (torch.tensor(self._lengths), torch.tensor(made))
        flops = 2 * multiply_adds(self._task.sizes, vocabulary, *lengths)
        return Translated(*took, sum(made), flops, sum(one.truncated for one in best), texts)

    def peak(self) -> int:
        """Bytes that a pass in one thread, the only one that `memory.peak` sees, holds at most beside the weights."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            alone = self._make()
            return memory.peak(lambda: alone(self.lines))
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        """End the threads."""
        self._translator.close()


def turns_of(contender: Contender, weights: dict[str, Any] | None, lines: Sequence[bytes]) -> dict[str, Turn]:
    """Greedy search, and the config's own where that is another, by name.

    Args:
        contender: the config.
        weights: the state of a checkpoint; none: new weights.
        lines: to translate.
    """
    task, data, trainer = contender.built()
    if weights is not None:
        task.load_state_dict(weights)
    return {
        f"{contender.name}, {_by(search)}": Turn(task.eval(), search, data, str(trainer.precision), lines)
        for search in dict.fromkeys((dataclasses.replace(task.search, beam=1), task.search))
    }


def _by(search: BeamSearch) -> str:
    return f"beam {search.beam}"


class DecodeBench(BenchTrainer):
    """Lightning's trainer, with the verb that measures decoding."""

    def bench(
        self,
        model: TranslationTask,
        datamodule: TranslationData,
        rounds: int = 5,
        sentences: int | None = None,
        against: list[str] | None = None,
        json: Path | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Show how fast the test text is translated, by greedy search and by the config's own, lines in and text out.

        The translator is that of the verb `translate`, with batches of data.evaluation_batch_tokens and all lines at
        once; what others of `against` translate are the same lines. A model without training seldom ends a sentence,
        and translates up to the length limit: with a checkpoint, the figures are those of its use, without one they
        compare the cost of a step.

        Args:
            rounds: in which everything compared has its turn.
            sentences: the first lines of the test text; none: all.
            against: what else to lay over the config, each by itself: paths, or names of configs/strategies.
            json: a file for all numbers.
            ckpt_path: a checkpoint whose weights translate; none: new weights.
            weights_only: here so that a config of `fit` does; nothing else is ever read.
        """
        at_least("bench", rounds=(rounds, 1), sentences=(1 if sentences is None else sentences, 1))
        self.check_device()
        record.check_place(json)
        datamodule.setup("test")
        if not datamodule.has("test"):
            raise UserError("data gives no test text, which bench decode translates; a config with one would do")
        weights = None if ckpt_path is None else checkpoint.read(Path(ckpt_path))["state_dict"]
        text = itertools.islice(datamodule.read("test"), sentences)
        lines, dtype = [source.encode("utf-8", "surrogateescape") for source, *_ in text], dtype_of(str(self.precision))
        turns: dict[str, Turn] = {}
        for one in self.command.contenders(datamodule, against):
            turns |= turns_of(one, weights, lines)
        with contextlib.ExitStack() as ending:
            for turn in turns.values():
                ending.callback(turn.close)
            ending.enter_context(kernels.constant_weights())
            ending.enter_context(Console().status(f"{rounds + 1} rounds of {len(turns)} x {len(lines):,} sentences"))
            timed: dict[str, Callable[[], Any]] = {**turns, "": lambda: ceiling(dtype)}
            found = {name: passes[1:] for name, passes in interleaved(timed, rounds + 1).items()}  # the first warms up
            limit = max(found.pop(""))
            peaks = {name: turn.peak() for name, turn in turns.items()}
        rows = _rows(found, {name: _by(turn.search) for name, turn in turns.items()}, limit, peaks)
        title = f"Decoding of {len(lines):,} sentences: medians over rounds (least to greatest)"
        Console().print(beside(title, rows, _shown(limit, dtype)))
        if ckpt_path is None:
            print("new weights: most translations end at the length limit; --ckpt_path shows those of a trained model")
        about = {
            "rounds": rounds,
            "sentences": len(lines),
            "precision": str(self.precision),
            "checkpoint": ckpt_path and str(ckpt_path),
            "ceiling": limit,
        }
        record.write(json, "decode", rows, threads=torch.get_num_threads(), **about)


def _rows(
    found: dict[str, list[Translated]], search_of: dict[str, str], limit: float, peaks: dict[str, int]
) -> list[dict[str, Any]]:
    """What is shown of each turn, set against the first with the same search."""
    first: dict[str, str] = {}
    rows = []
    for name, passes in found.items():
        other = found[first.setdefault(search_of[name], name)]
        speed, of_first = (Spread([len(one.texts) / one.wall for one in some]) for some in (passes, other))
        flops = Spread([one.flops / one.wall for one in passes])
        pairs = list(zip(passes[0].texts, other[0].texts, strict=True))
        rows.append(
            {
                "name": name,
                "sentences_per_second": speed,
                "ratio": speed.over(of_first),
                "sentences_per_cpu_second": Spread([len(one.texts) / one.cpu for one in passes]),
                "tokens_per_second": Spread([one.tokens / one.wall for one in passes]),
                "flops_per_second": flops,
                "share_of_ceiling": flops.median / limit,
                "peak_memory": peaks[name],
                "tokens_per_sentence": passes[0].tokens / len(pairs),
                "truncated": passes[0].truncated / len(pairs),
                "same_texts": sum(mine == its for mine, its in pairs) / len(pairs),
            }
        )
    return rows


def _shown(limit: float, dtype: torch.dtype) -> dict[str, Callable[[dict[str, Any]], str]]:
    """The lines of the table, and what each shows of a row."""
    return {
        "sentences a second": lambda row: row["sentences_per_second"].shown(",.1f"),
        "ratio in a round": lambda row: row["ratio"].shown(".3f"),
        "output tokens a second": lambda row: row["tokens_per_second"].shown(",.0f"),
        **operations(limit, dtype),
        "peak memory, MiB": lambda row: f"{row['peak_memory'] / 2**20:,.1f}",
        "tokens each": lambda row: f"{row['tokens_per_sentence']:.1f}",
        "cut at limit": lambda row: f"{row['truncated']:.1%}",
        "as first": lambda row: f"{row['same_texts']:.1%}",
    }


measure = functools.partial(carry_out, DecodeBench)
"""Carry out `stabilize bench decode`."""
