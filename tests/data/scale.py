"""One step of the measurement in test_scale.py, in a process of its own: python -m tests.data.scale STEP FOLDER …

It prints what it measured as JSON; seconds are those of a clock on the wall.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from stabilize.data import ParallelText
from stabilize.data.preparation import threads

VOCABULARY = 8000


def make(folder: Path, pairs: int) -> None:
    """Two files of made-up sentences, words by Zipf's law, lengths as in the news: 3 to 90 words, 24 in the mean."""
    random = np.random.default_rng(1)
    letters = np.array([*"eeeeaaiiooutnsrlhdcmpgbfvkwzy"])
    words = [["".join(random.choice(letters, length)) for length in random.integers(2, 11, 30_000)] for _ in range(2)]
    shares = 1 / np.arange(5, 30_005)
    ends = np.cumsum(shares / shares.sum())
    with (folder / "train.en").open("w") as english, (folder / "train.de").open("w") as german:
        for _ in range(0, pairs, 10_000):
            lengths = np.clip(random.gamma(3, 8, 10_000).astype(int), 3, 90)
            for file, language in ((english, words[0]), (german, words[1])):
                here = np.clip(lengths + random.integers(-2, 3, 10_000), 1, None)
                drawn = np.searchsorted(ends, random.random(here.sum()))
                starts = np.cumsum(here) - here
                file.writelines(
                    " ".join([language[word] for word in drawn[start : start + length]]) + "\n"
                    for start, length in zip(starts, here, strict=True)
                )


def corpus(folder: Path, workers: int = 0) -> ParallelText:
    """What a user would write."""
    return ParallelText(
        train=f"{folder}/train.{{lang}}",
        validation_pairs=500,
        vocabulary=VOCABULARY,
        workers=workers,
        cache=f"{folder}/cache",
    )


class Peak(threading.Thread):
    """MiB of its own that this process has at most, asked ten times a second; pages of files are not counted."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.over = own(), threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.1):
            self.most = max(self.most, own())


def own() -> float:
    """MiB of its own that this process has."""
    return status("self", "status", "RssAnon:")


def status(process: str, file: str, key: str) -> float:
    """A number of the kernel's on a process, in MiB."""
    lines = Path(f"/proc/{process}/{file}").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def prepare(folder: Path, step: str) -> dict[str, Any]:
    """One step of preparation: seconds, and memory above that before."""
    data = corpus(folder)
    preparation = data._preparation()
    tokenizer = preparation.tokenizer() if step == "ids" else None
    before, peak, start = own(), Peak(), time.perf_counter()
    if step == "text":
        preparation.text()
    elif step == "tokenizer":
        preparation.tokenizer()
    else:
        assert tokenizer is not None
        preparation.ids(tokenizer)
    seconds = time.perf_counter() - start
    peak.over.set()
    return {"seconds": seconds, "peak": peak.most, "before": before, "with files": maximum()}


def maximum() -> float:
    """MiB that this process had at most so far, pages of files counted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def sentencepiece(folder: Path) -> dict[str, Any]:
    """What SentencePiece alone needs for the same lines, given as lists and with as many threads."""
    preparation = corpus(folder)._preparation()
    tokenizer, seconds = preparation.tokenizer(), 0.0
    for _, *sides in preparation.text().chunks():
        for lines in sides:
            start = time.perf_counter()
            tokenizer._pieces.Encode(lines, num_threads=threads())
            seconds += time.perf_counter() - start
    return {"seconds": seconds}


def opened(folder: Path, workers: int) -> dict[str, Any]:
    """Opening, the first batch, and after two passes the resident memory of this process and its workers."""
    data = corpus(folder, workers)
    start = time.perf_counter()
    data.setup("fit")
    ready = time.perf_counter()
    loader = data.train_dataloader()
    next(iter(loader))
    first = time.perf_counter()
    most = 0.0
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, _ in enumerate(loader):
            if number == len(loader) - 100:
                most = max(most, resident())
    return {
        "open": ready - start,
        "first batch": first - ready,
        "resident": most,
        "batches": len(loader),
        "passes": time.perf_counter() - first,
    }


def resident() -> float:
    """MiB of this process and its children, pages that several share counted once."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return sum(status(process, "smaps_rollup", "Pss:") for process in ("self", *children))


if __name__ == "__main__":
    step, where, *more = sys.argv[1:]
    place = Path(where)
    if step == "make":
        make(place, int(more[0]))
        print("{}")
    elif step == "open":
        print(json.dumps(opened(place, int(more[0]))))
    elif step == "sentencepiece":
        print(json.dumps(sentencepiece(place)))
    else:
        print(json.dumps(prepare(place, step)))
