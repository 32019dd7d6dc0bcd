"""`stabilize bench decode`: what is counted, and what is shown."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilize import kernels
from stabilize.cli import main
from stabilize.commands.bench.decode import Translated, Turn, _rows
from stabilize.commands.bench.work import multiply_adds
from stabilize.decoding import BeamSearch
from stabilize.model import EncoderDecoder
from tests.tasks import ENGLISH, Sentences, small_task, tokenizer


def test_each_config_has_both_searches(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "same.yaml").write_text("model: {samples: 1}\n")
    words = ["--rounds", "2", "--sentences", "2", "--json", "found.json", "--model.search.maximum_ratio", "0.5"]
    words += ["--against", "same.yaml", "post_ln", "--model.search.beam", "3"]
    assert main(["bench", "decode", "-c", "tiny.yaml", *words]) == 0
    shown = capsys.readouterr().out
    assert "new weights: most translations end at the length limit" in shown
    assert {"useful GFLOP/s", "peak memory, MiB"} <= {line.strip().split("   ")[0] for line in shown.splitlines()}
    found = json.loads((here / "found.json").read_text())
    assert found["sentences"] == 2
    rows = {row["name"]: row for row in found["rows"]}
    assert [*rows] == [f"{name}, beam {beam}" for name in ("tiny", "same", "post_ln") for beam in (1, 3)]
    for name, row in rows.items():
        assert row["tokens_per_second"]["median"] > row["sentences_per_second"]["median"] > 0
        first = rows[f"tiny, {name.partition(', ')[2]}"]["sentences_per_second"]["rounds"]
        by_round = [mine / its for mine, its in zip(row["sentences_per_second"]["rounds"], first, strict=True)]
        assert row["ratio"]["rounds"] == pytest.approx(by_round)
        assert row["share_of_ceiling"] == pytest.approx(row["flops_per_second"]["median"] / found["ceiling"])
    assert rows["tiny, beam 3"]["peak_memory"] >= rows["tiny, beam 1"]["peak_memory"] > 0
    assert rows["same, beam 1"]["same_texts"] == rows["same, beam 3"]["same_texts"] == 1.0
    assert sorted(path.name for path in here.iterdir()) == ["found.json", "same.yaml", "tiny.yaml"]


def test_a_greedy_config_has_one_row_and_a_checkpoint_its_weights(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", "--checkpoint.dirpath", "kept"]
    assert main(["fit", "-c", "tiny.yaml", *fitted]) == 0
    saved = sorted((here / "kept").glob("*.ckpt"))[0]
    searched = []
    search, constant = BeamSearch.n_best, kernels.constant_weights

    def watched(self: BeamSearch, model: EncoderDecoder, *arguments: Any) -> Any:
        searched.append(model)
        return search(self, model, *arguments)

    @contextlib.contextmanager
    def once() -> Iterator[None]:
        assert not searched  # all rounds are inside
        with constant():
            yield

    monkeypatch.setattr(BeamSearch, "n_best", watched)
    monkeypatch.setattr(kernels, "constant_weights", once)
    words = ["--rounds", "2", "--ckpt_path", str(saved), "--model.search.beam", "1"]
    assert main(["bench", "decode", "-c", "tiny.yaml", *words]) == 0
    assert len(searched) == 1 + 2 + 1  # to warm up, two rounds, memory
    shown = capsys.readouterr().out
    assert "beam 1" in shown
    assert "new weights" not in shown
    state = torch.load(saved, weights_only=True)["state_dict"]
    assert all(torch.equal(state[f"model.{name}"], weight) for name, weight in searched[-1].named_parameters())


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("precision", "half"), [("32-true", None), ("bf16-mixed", torch.bfloat16)])
@pytest.mark.usefixtures("two_threads")
def test_a_turn_finds_what_the_search_finds_in_the_batches_of_the_evaluation(
    precision: str, half: torch.dtype | None
) -> None:
    """Line by line in the order of the text, a blank line between them, in two threads, which end with it."""
    task, data = small_task().eval(), Sentences(evaluation_batch_tokens=20)
    data.setup("test")
    search = BeamSearch(beam=3, maximum_ratio=0.5)
    lines = [line.encode() for line in ENGLISH]
    turn = Turn(task, search, data, precision, [*lines[:4], b" ", *lines[4:]])
    before = {*threading.enumerate()}
    found = turn()
    workers = {*threading.enumerate()} - before
    assert len(workers) == 2
    turn.close()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()

    expected = {}
    for batch in data.test_dataloader():
        with torch.autocast("cpu", half, enabled=half is not None):
            expected |= dict(zip(batch.index.tolist(), search(task.model, batch.source), strict=True))
    texts = [tokenizer().decode(expected[line].ids) for line in range(len(lines))]
    assert [*found.texts] == [*texts[:4], "", *texts[4:]]
    ends = [len(expected[line].ids) + (not expected[line].truncated) for line in range(len(lines))]
    assert (found.tokens, found.truncated) == (sum(ends), sum(one.truncated for one in expected.values()))
    sources = [len(tokenizer().encode(line)) + 1 for line in ENGLISH]
    lengths = torch.tensor(sources), torch.tensor(ends)
    assert found.flops == 2 * multiply_adds(task.sizes, tokenizer().vocabulary, *lengths)


@pytest.mark.usefixtures("two_threads")
def test_the_peak_is_that_of_one_thread_which_is_seen() -> None:
    """Six lines in a batch hold at least the keys and values that the decoder's layer reads of the source."""
    task, peaks = small_task().eval(), {}
    for tokens in (1, 8192):
        data = Sentences(evaluation_batch_tokens=tokens)
        turn = Turn(task, BeamSearch(beam=2), data, "32-true", [line.encode() for line in ENGLISH])
        with kernels.constant_weights():
            turn()
            turn.close()
            peaks[tokens] = turn.peak()
        assert torch.get_num_threads() == 2
    longest = max(len(tokenizer().encode(line)) + 1 for line in ENGLISH)
    assert peaks[8192] > 2 * 4 * len(ENGLISH) * longest * task.sizes.width
    assert peaks[8192] > 2 * peaks[1]


def test_rows_add_up() -> None:
    """Two sentences in one and two seconds; the other config takes twice as long and says one of them otherwise."""
    one = [Translated(1.0, 2.0, 10, 600, 1, ("a", "b")), Translated(2.0, 2.0, 10, 600, 1, ("a", "b"))]
    other = [Translated(2.0, 2.0, 12, 800, 0, ("a", "c")), Translated(4.0, 2.0, 12, 800, 0, ("a", "c"))]
    searches = {"one": "beam 1", "other": "beam 1"}
    first, second = _rows({"one": one, "other": other}, searches, 900.0, {"one": 5, "other": 7})
    assert first["sentences_per_second"].rounds == [2.0, 1.0]
    assert first["tokens_per_second"].rounds == [10.0, 5.0]
    assert first["flops_per_second"].rounds == [600.0, 300.0]
    assert (first["share_of_ceiling"], first["peak_memory"], second["peak_memory"]) == (0.5, 5, 7)
    assert (first["tokens_per_sentence"], first["truncated"], first["same_texts"]) == (5.0, 0.5, 1.0)
    assert second["ratio"].rounds == [0.5, 0.5]
    assert (second["truncated"], second["same_texts"]) == (0.0, 0.5)
