"""`stabilize translate`: lines from standard input to lines on standard output, in order, as they come."""

from __future__ import annotations

import os
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch.nn.utils.rnn import pad_sequence

from stabilize import checkpoint, kernels
from stabilize.commands.weights import load
from stabilize.commands.words import Parser, settings_of
from stabilize.data.cleaning import BIT, clean, is_blank
from stabilize.data.sampler import TokenBatches
from stabilize.decoding import BeamSearch, Hypothesis
from stabilize.errors import UserError, at_least
from stabilize.task import TranslationTask
from stabilize.tokens import END, PAD

ABOUT = """Translate lines from standard input with a checkpoint, which is all that is needed. Line k of the output is
the translation of line k, a blank line for a blank one. Lines come out as soon as they are ready; what is said goes to
standard error. A line ends at a line feed and nowhere else."""

LONGEST = 2**18
"""Bytes of a line that are kept; so many are more tokens than a model is good for."""

FAULTS = {
    "cut": "cut, of which only the first {longest:,} tokens were read",
    "not UTF-8": "not UTF-8, where U+FFFD stands for what cannot be read",
}
"""Of source lines, and how they are told."""

TOLD = 5
"""Lines with the same fault that are told one by one; of the others there is a number at the end."""

PAUSE = 30.0
"""Seconds between two reports on progress, where standard error is no terminal."""


def lines_of(descriptor: int, most: int) -> Iterator[list[bytes]]:
    """Lines without their line feed: at once all that have arrived, at least one and at most so many.

    The last need not have a line feed. Of a line that is longer than `LONGEST` bytes only these are kept.

    Raises:
        UserError: it cannot be read, as a folder cannot.
    """
    ready: list[bytes] = []
    open_line, at_end = bytearray(), False
    while True:
        while not at_end and len(ready) < most and (not ready or select.select([descriptor], [], [], 0)[0]):
            try:
                arrived = os.read(descriptor, 2**16)
            except OSError as error:
                raise UserError(
                    f"translate: standard input cannot be read: {error.strerror}; stabilize translate ... < in > out "
                    "would do"
                ) from error
            at_end = not arrived
            first, *others = arrived.split(b"\n")
            open_line += first[: LONGEST - len(open_line)]
            for line in others:
                ready.append(bytes(open_line))
                open_line = bytearray(line[:LONGEST])
        if at_end and open_line:
            ready.append(bytes(open_line))
            open_line.clear()
        if not ready:
            return
        yield ready[:most]
        del ready[:most]


class Translator:
    """Translates lines, on a CPU as many batches at once as there are threads, each in one.

    The small products of a step gain little from a second thread, which a batch of its own keeps busy. What is a single
    batch has all threads. Where one batch is computed at a time, the thread that asks does it.

    Args:
        task: with the model, in evaluation.
        search: for hypotheses.
        autocast: what products are made in; none: as the weights are.
        count: hypotheses of each line.
        batch_tokens: budget of a batch, rows x longest source.
        longest: tokens of a source line that are read, the end included.
        unescape: see `data.cleaning.clean`.

    Attributes:
        lines: how many were read.
        faults: how many had each of `FAULTS`.
        truncated: how many translations came to the length limit before their end.
    """

    def __init__(
        self,
        task: TranslationTask,
        search: BeamSearch,
        autocast: torch.dtype | None = None,
        *,
        count: int = 1,
        batch_tokens: int = 4096,
        longest: int = 1024,
        unescape: bool = False,
    ) -> None:
        self.task, self.search, self.count, self.batch_tokens = task, search, count, batch_tokens
        self.autocast = autocast
        self.unescape = unescape
        self._at_once = torch.get_num_threads() if task.device.type == "cpu" else 1
        self._workers = ThreadPoolExecutor(self._at_once, initializer=_in_one_thread, initargs=(task.device,))
        self.longest = min(longest, task.model.longest or longest)
        self.lines, self.truncated = 0, 0
        self.faults: Counter[str] = Counter()

    def __call__(self, lines: Sequence[bytes]) -> list[list[tuple[str, Hypothesis]]]:
        """The best translations of each line, as text and as hypothesis, best first; of a blank line a blank one."""
        source = [self.tokens(line) for line in lines]
        found = [[("", Hypothesis([], 0.0, False))] for _ in source]
        written = [row for row, tokens in enumerate(source) if tokens]
        lengths = np.array([len(source[row]) for row in written], dtype=np.int64)
        share = -(-len(written) // self._at_once) * int(lengths.max(initial=1))  # about one batch for each thread
        budget = max(1, min(self.batch_tokens, share))
        batches = TokenBatches(lengths, lengths, tokens=budget, shuffle=False, evaluation=True)
        rows_of = [[written[place] for place in batch] for batch in batches]
        each = map if 1 in (len(rows_of), self._at_once) else self._workers.map
        best_of = each(self._best, ([source[row] for row in rows] for rows in rows_of))
        for rows, best in zip(rows_of, best_of, strict=True):
            for row, hypotheses in zip(rows, best, strict=True):
                found[row] = [(self.task.tokenizer.decode(hypothesis.ids), hypothesis) for hypothesis in hypotheses]
                self.truncated += hypotheses[0].truncated
        return found

    def _best(self, source: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        """The best hypotheses of the sentences of a batch."""
        padded = pad_sequence([torch.tensor(tokens) for tokens in source], batch_first=True, padding_value=PAD)
        with torch.autocast(self.task.device.type, self.autocast, enabled=self.autocast is not None):
            return self.search.n_best(self.task.model, padded.to(self.task.device), self.count)

    def close(self) -> None:
        """Begin no further batch."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def tokens(self, line: bytes) -> list[int]:
        """Tokens of a line with the end mark; none of a blank one."""
        self.lines += 1
        text, met = clean(line.decode("utf-8", "surrogateescape"), unescape=self.unescape)
        if met & BIT["invalid_utf8"]:
            self._tell("not UTF-8")
        if is_blank(text):
            return []
        tokens = self.task.tokenizer.encode(text)
        if len(tokens) >= self.longest:
            self._tell("cut")
        return [*tokens[: self.longest - 1], END]

    def _tell(self, fault: str) -> None:
        self.faults[fault] += 1
        if self.faults[fault] <= TOLD:
            say(f"line {self.lines:,} is {FAULTS[fault].format(longest=self.longest - 1)}")

    def __str__(self) -> str:
        """What was done, in words."""
        faults = [f"{number:,} {fault}" for fault, number in self.faults.items()]
        truncated = [f"{self.truncated:,} truncated at the length limit"] if self.truncated else []
        return ", ".join([f"{self.lines:,} lines", *faults, *truncated])


def _in_one_thread(device: torch.device) -> None:
    """Let the thread that asks compute by itself, where the CPU computes."""
    if device.type == "cpu":
        torch.set_num_threads(1)


class Progress:
    """How far the work is, on standard error: a line that changes in a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._status = Console(stderr=True).status("") if sys.stderr.isatty() else None
        if self._status is not None:
            self._status.start()

    def show(self, translator: Translator) -> None:
        """Tell where the work is."""
        now = time.monotonic()
        if self._status is not None:
            self._status.update(self._line(translator, now))
        elif now - self._last > PAUSE:
            self._last = now
            say(self._line(translator, now))

    def close(self, translator: Translator) -> None:
        """Tell what was done."""
        if self._status is not None:
            self._status.stop()
        say(self._line(translator, time.monotonic()))

    def _line(self, translator: Translator, now: float) -> str:
        seconds = now - self._start
        return f"{translator}; {seconds:.0f} s, {translator.lines / max(seconds, 1e-3):,.1f} lines a second"


def say(what: str) -> None:
    """Say something beside the translations."""
    print(what, file=sys.stderr, flush=True)


def written(number: int, found: Sequence[tuple[str, Hypothesis]], *, many: bool, scores: bool) -> str:
    """The output for a line, with its line feed."""
    if many:
        return "".join(f"{number} ||| {text} ||| {hypothesis.score:.6f}\n" for text, hypothesis in found)
    ((text, hypothesis),) = found
    return f"{hypothesis.score:.6f}\t{text}\n" if scores else f"{text}\n"


def device_of(name: str) -> torch.device:
    """The device called so; `auto` is a GPU where there is one.

    Raises:
        UserError: there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.zeros((), device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device is {name}, which is not there; cpu would do ({str(error).splitlines()[0]})") from error


def translate(words: list[str]) -> int:
    """Carry out `stabilize translate`."""
    parser = Parser("translate", ABOUT)
    numbers = {
        "maximum_source": (1024, 2, "tokens of a line that are read"),
        "batch_tokens": (4096, 1, "budget of a batch: lines x longest source"),
        "read_ahead": (512, 1, "lines, if so many have come, that are sorted by length and come out together"),
    }
    parser.add_argument("--checkpoint", required=True, help="a file of runs/RUN/checkpoints; last: the newest of all")
    parser.add_settings(BeamSearch)
    parser.add_argument("--n_best", type=int, help="write so many of each line: number (from 0) ||| text ||| score")
    parser.add_argument("--scores", action="store_true", help="write score, tab, text")
    for name, (default, _, told) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{told} (default: %(default)s)")
    parser.add_argument(
        "--unescape", action="store_true", help="read &apos; and its like as characters, as data.unescape"
    )
    parser.add_argument(
        "--precision",
        choices=("32-true", "bf16-mixed", "bf16-true"),
        default="32-true",
        help="as trainer.precision; bf16-true takes least time and memory (default: %(default)s)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    chosen = parser.parse_args(words)

    at_least("translate", **{name: (getattr(chosen, name), least) for name, (_, least, _) in numbers.items()})
    search = BeamSearch(**settings_of(chosen, BeamSearch))
    count = 1 if chosen.n_best is None else chosen.n_best
    if not 1 <= count <= search.beam:
        raise UserError(f"translate: n_best is {count} and beam {search.beam}; n_best from 1 to {search.beam} would do")
    if sys.stdin is None or sys.stdout is None:
        raise UserError("translate: standard input or output is closed; stabilize translate ... < in > out would do")
    device = device_of(chosen.device)
    runs = Path("runs").glob("*/checkpoints")
    path = checkpoint.newest(runs) if chosen.checkpoint == "last" else Path(chosen.checkpoint)
    if path is None:
        raise UserError("checkpoint is last, but no run in runs has one")

    kernels.keep_freed_memory()
    task = load(path).to(device)
    translator = Translator(
        task.to(torch.bfloat16) if chosen.precision == "bf16-true" else task,
        search,
        torch.bfloat16 if chosen.precision == "bf16-mixed" else None,
        count=count,
        batch_tokens=chosen.batch_tokens,
        longest=chosen.maximum_source,
        unescape=chosen.unescape,
    )
    if sys.stdin.isatty():
        say("type lines; Ctrl-D ends them")
    progress = Progress()
    try:
        with kernels.constant_weights():
            for lines in lines_of(sys.stdin.fileno(), chosen.read_ahead):
                first = translator.lines
                for number, found in enumerate(translator(lines), start=first):
                    output = written(number, found, many=chosen.n_best is not None, scores=chosen.scores)
                    sys.stdout.buffer.write(output.encode("utf-8"))
                sys.stdout.buffer.flush()
                progress.show(translator)
    finally:
        translator.close()
        progress.close(translator)
    return 0
