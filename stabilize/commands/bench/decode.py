"""`stabilize bench decode`: how fast a model translates."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from stabilize import checkpoint, kernels
from stabilize.commands.bench import record
from stabilize.commands.bench.contenders import BenchTrainer, Contender, carry_out
from stabilize.commands.bench.rounds import Spread, interleaved
from stabilize.data import TranslationData
from stabilize.data.batch import Batch
from stabilize.decoding import BeamSearch
from stabilize.errors import UserError, at_least
from stabilize.task import TranslationTask


class Translated(NamedTuple):
    """What a pass over the text took, and what came out."""

    wall: float
    cpu: float
    tokens: int
    """Of the translations, end marks included."""
    truncated: int
    """Translations cut at the length limit."""
    texts: tuple[str, ...]


class Translator:
    """A model that translates the batches of `test` as the verb `translate` does, and takes the time.

    Args:
        contender: the config.
        weights: the state of a checkpoint; none: new weights.
    """

    def __init__(self, contender: Contender, weights: dict[str, Any] | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.task, data, self.trainer = contender.run_in(Path(folder))
        self.batches: list[Batch] = list(data.test_dataloader())
        self.task.trainer = self.trainer
        with self.trainer.precision_plugin.module_init_context():
            self.task.configure_model()
        if weights is not None:
            self.task.load_state_dict(weights)
        self.task = self.trainer.precision_plugin.convert_module(self.task).eval()

    @property
    def searches(self) -> dict[str, BeamSearch]:
        """Greedy, and the config's own where that is another, by name."""
        own = self.task.search
        return {f"beam {search.beam}": search for search in (dataclasses.replace(own, beam=1), own)}

    def translate(self, search: BeamSearch, sentences: int) -> Translated:
        """Translate the first sentences, longest first, from ids to text."""
        texts: list[str] = []
        tokens = truncated = 0
        start, cpu = time.perf_counter(), time.process_time()
        mode, precision = torch.inference_mode(), self.trainer.precision_plugin.forward_context()
        with mode, precision, kernels.constant_weights():
            for batch in self.batches:
                source = batch.source[: sentences - len(texts)]
                found = search(self.task.model, source) if len(source) else []
                texts += [self.task.tokenizer.decode(one.ids) for one in found]
                tokens += sum(len(one.ids) + (not one.truncated) for one in found)
                truncated += sum(one.truncated for one in found)
        took = time.perf_counter() - start, time.process_time() - cpu
        return Translated(*took, tokens, truncated, tuple(texts))


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
        """Show how fast the test text is translated, by greedy search and by the config's own, from ids to text.

        A model without training seldom ends a sentence, and translates up to the length limit: with a checkpoint, the
        figures are those of its use, without one they compare the cost of a step.

        Args:
            rounds: in which everything compared has its turn.
            sentences: of the test text, longest first; none: all.
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
        translators = {one.name: Translator(one, weights) for one in self.command.contenders(datamodule, against)}
        count = min(sentences or datamodule.totals["test"], datamodule.totals["test"])
        turns: dict[str, Callable[[], Translated]] = {}
        for name, one in translators.items():
            for by, search in one.searches.items():
                turns[f"{name}, {by}"] = lambda one=one, search=search: one.translate(search, count)  # type: ignore[misc]
        with Console().status(f"{rounds + 1} rounds of {len(turns)} x {count:,} sentences"):
            found = {name: passes[1:] for name, passes in interleaved(turns, rounds + 1).items()}  # the first warms up
        rows = _rows(found, {f"{name}, {by}": by for name, one in translators.items() for by in one.searches})
        Console().print(_shown(rows, count))
        if ckpt_path is None:
            print("new weights: most translations end at the length limit; --ckpt_path shows those of a trained model")
        about = {
            "rounds": rounds,
            "sentences": count,
            "precision": str(self.precision),
            "checkpoint": ckpt_path and str(ckpt_path),
        }
        record.write(json, "decode", rows, threads=torch.get_num_threads(), **about)


def _rows(found: dict[str, list[Translated]], search_of: dict[str, str]) -> list[dict[str, Any]]:
    """What is shown of each turn, set against the first with the same search."""
    first: dict[str, str] = {}
    rows = []
    for name, passes in found.items():
        other = found[first.setdefault(search_of[name], name)]
        speed, of_first = (Spread([len(one.texts) / one.wall for one in some]) for some in (passes, other))
        pairs = list(zip(passes[0].texts, other[0].texts, strict=True))
        rows.append(
            {
                "name": name,
                "sentences_per_second": speed,
                "ratio": speed.over(of_first),
                "sentences_per_cpu_second": Spread([len(one.texts) / one.cpu for one in passes]),
                "tokens_per_second": Spread([one.tokens / one.wall for one in passes]),
                "tokens_per_sentence": passes[0].tokens / len(pairs),
                "truncated": passes[0].truncated / len(pairs),
                "same_texts": sum(mine == its for mine, its in pairs) / len(pairs),
            }
        )
    return rows


def _shown(rows: Sequence[dict[str, Any]], sentences: int) -> Table:
    title = f"Decoding of {sentences:,} sentences: medians over rounds (least to greatest)"
    shown = Table(box=box.SIMPLE, title=title, title_justify="left")
    for heading in (
        "",
        "sentences/s",
        "ratio in a round",
        "output tokens/s",
        "tokens each",
        "cut at limit",
        "as first",
    ):
        shown.add_column(heading)
    for row in rows:
        shown.add_row(
            row["name"],
            row["sentences_per_second"].shown(",.1f"),
            row["ratio"].shown(".3f"),
            row["tokens_per_second"].shown(",.0f"),
            f"{row['tokens_per_sentence']:.1f}",
            f"{row['truncated']:.1%}",
            f"{row['same_texts']:.1%}",
        )
    return shown


measure = functools.partial(carry_out, DecodeBench)
"""Carry out `stabilize bench decode`."""
