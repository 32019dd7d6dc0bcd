"""What a batch asks for, against torch's own count and a count by hand; what a piece of work holds in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stabilize import kernels
from stabilize.commands.bench import memory, work
from stabilize.commands.bench.work import Tokens, ceiling, dtype_of, multiply_adds, training_flops
from stabilize.data.batch import Batch
from stabilize.model import EncoderDecoder, Sizes
from stabilize.strategies import Stabilizer
from stabilize.tokens import PAD
from tests.tasks import sentence_batch

VOCABULARY = 50


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_operations_are_those_that_torch_counts(activation: Any) -> None:
    """Forward and backward of sentences of one length, in float64, which has the plain path.

    Weights of attention have dropout, or attention would be one fused kernel, which computes its logits again.
    """
    sizes = Sizes(3, 2, width=16, heads=4, hidden=24, activation=activation, dropout=0.0, attention_dropout=0.1)
    model = EncoderDecoder(VOCABULARY, sizes, Stabilizer()).double()
    source, target = torch.full((5, 7), 9), torch.full((5, 11), 8)
    with FlopCounterMode(display=False) as counted:
        hidden = model(source, target)
        model.project(hidden).sum().backward()
    lengths = torch.full((5,), 7), torch.full((5,), 11)
    assert counted.get_total_flops() == training_flops(sizes, VOCABULARY, *lengths)


def test_multiply_adds_by_hand() -> None:
    """One layer each of width 2 and hidden size 3; a sentence of 2 tokens with a target of 3."""
    sizes = Sizes(1, 1, width=2, heads=1, hidden=3)
    encoder = 2 * (16 + 12) + 2 * (2 * 2) * 2  # four 2 x 2 products and two 2 x 3, then logits and mix
    decoder = 3 * (16 + 8 + 12) + 2 * 8 + 2 * (3 * 3 + 3 * 2) * 2  # key and value of the source once a source token
    logits = 3 * 2 * VOCABULARY
    one = torch.tensor([2]), torch.tensor([3])
    assert multiply_adds(sizes, VOCABULARY, *one) == encoder + decoder + logits
    twice = torch.tensor([2, 2]), torch.tensor([3, 3])
    assert multiply_adds(sizes, VOCABULARY, *twice) == 2 * (encoder + decoder + logits)


def test_padding_is_counted_position_by_position() -> None:
    batches = [sentence_batch(0, 1, 2), sentence_batch(3, 4)]
    tokens = Tokens.of(batches)
    for side, of in (("source", lambda batch: batch.source), ("target", lambda batch: batch.target[:, 1:])):
        rows = [row for batch in batches for row in of(batch).tolist()]
        places = [token for row in rows for token in row]
        assert tokens.padding[side] == pytest.approx(places.count(PAD) / len(places))
        assert getattr(tokens, side).tolist() == [sum(token != PAD for token in row) for row in rows]
    assert 0 < tokens.padding["target"] < 1


def test_a_batch_without_padding_has_none() -> None:
    batch = Batch(torch.full((2, 3), 9), torch.full((2, 5), 9), torch.arange(2))
    assert Tokens.of([batch]).padding == {"source": 0.0, "target": 0.0}


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        ("bf16-mixed", torch.bfloat16),
        ("bf16-true", torch.bfloat16),
        ("16-mixed", torch.float16),
        ("64-true", torch.float64),
    ],
)
def test_products_are_in_the_precision_of_the_run(precision: str, dtype: torch.dtype) -> None:
    assert dtype_of(precision) == dtype


def test_the_ceiling_is_the_fastest_of_both_products(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    now = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(now) / 4)
    monkeypatch.setattr(kernels, "linear", lambda a, b: asked.append((a.dtype, b.shape)))
    assert ceiling(torch.bfloat16, size=8) == 2 * 8**3 / 0.25
    assert set(asked) == {(torch.bfloat16, (8, 8))}


def test_the_ceiling_counts_until_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that takes half a second for a product, of which the host knows when it waits."""
    now = 0.0

    def wait(device: torch.device) -> None:
        nonlocal now
        assert device == torch.device("cpu")
        now += 0.5

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(work, "wait", wait)
    assert ceiling(torch.float32, size=8) == 2 * 8**3 / 0.5


def test_peak_memory_is_what_tensors_hold_at_once() -> None:
    before = torch.zeros(1000)

    def work() -> None:
        nonlocal before
        before = torch.zeros(1)  # from before: neither counted nor taken off
        kept = torch.ones(3000)
        for _ in range(3):
            other = torch.ones(2000)
        del kept, other

    bytes_of_floats = 4 * (3000 + 2 * 2000)  # the old one of a loop goes when the new one is there
    assert bytes_of_floats <= memory.peak(work) <= bytes_of_floats + 200


def test_peak_memory_has_gradients_and_what_is_kept_for_them() -> None:
    def work() -> None:
        weight = torch.ones(100, 100, requires_grad=True)
        x = weight
        for _ in range(5):
            x = x.exp()  # keeps its result
        x.sum().backward()

    matrix = 4 * 100 * 100
    assert 6 * matrix <= memory.peak(work) <= 9 * matrix
