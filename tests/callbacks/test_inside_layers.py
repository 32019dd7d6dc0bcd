"""Epsilon audit and attention entropy of the project's own model against plain loops over positions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilize.callbacks import AttentionEntropy, EpsilonAudit
from stabilize.strategies import (
    AdaNorm,
    DynamicTanh,
    LayerNorm,
    MaskedBatchNorm,
    Norm,
    NoWarmup,
    RMSNorm,
    ScaleNorm,
    Stabilizer,
)
from tests.callbacks.monitors import batch
from tests.models import query_key_value
from tests.tasks import fit, small_task, small_trainer


def measured(folder: Path, monitor: Any, task: Any) -> dict[str, float]:
    fit(small_trainer(folder, monitor, max_steps=1), task, [batch()])
    return monitor.latest


def kept_inputs(modules: list[nn.Module], task: Any) -> list[tuple[Any, ...]]:
    """What each module is given in one forward."""
    seen: dict[nn.Module, tuple[Any, ...]] = {}
    handles = [m.register_forward_hook(lambda m, inputs, output: seen.update({m: inputs})) for m in modules]
    task.train()
    task.loss(batch())
    for handle in handles:
        handle.remove()
    return [seen[module] for module in modules]


NUMBERS = {
    LayerNorm: lambda x: x.var(correction=0),
    RMSNorm: lambda x: x.square().mean(),
    ScaleNorm: lambda x: x.norm(),
    AdaNorm: lambda x: x.std(),
}
"""What the norms keep from being zero, of one position."""


@pytest.mark.parametrize("kind", NUMBERS)
def test_epsilon_audit_is_the_share_of_real_positions_in_the_worst_norm(tmp_path: Path, kind: type[Norm]) -> None:
    task = small_task(Stabilizer(norm=kind(), warmup=NoWarmup()))
    names = ("encoder/layer_001", "decoder/layer_001")
    norms = {
        name: [branch.slots["norm"] for branch in layer.branches]
        for name, layer in zip(names, task.model.layers, strict=True)
    }
    every = [norm for layer in norms.values() for norm in layer]
    first = dict(zip(every, kept_inputs(every, task), strict=True))
    for norm, (x, _) in first.items():  # times ten is the median of what comes in
        norm.epsilon = 0.1 * torch.stack([NUMBERS[kind](position) for position in x.flatten(0, 1)]).median().item()
    inputs = dict(zip(every, kept_inputs(every, task), strict=True))
    expected = {}
    for name, layer in norms.items():
        near = [
            [NUMBERS[kind](position) <= 10 * norm.epsilon for position in inputs[norm][0][inputs[norm][1]]]
            for norm in layer
        ]
        expected[f"epsilon_audit/{name}"] = max(sum(counts).item() / len(counts) for counts in near)
    assert 0.2 < min(expected.values()) <= max(expected.values()) < 1
    assert measured(tmp_path, EpsilonAudit(every=1, figures=False), task) == pytest.approx(expected)


@pytest.mark.parametrize("kind", [DynamicTanh, MaskedBatchNorm])
def test_norms_without_a_number_a_position_have_no_audit(tmp_path: Path, kind: type[Norm]) -> None:
    task = small_task(Stabilizer(norm=kind(), warmup=NoWarmup()))
    assert not measured(tmp_path, EpsilonAudit(every=1, figures=False), task)


def test_a_norm_that_is_given_almost_nothing_is_audited(tmp_path: Path) -> None:
    task = small_task()
    task.model.source_embedding.scale = 1e-6
    task.model.source_embedding.position = nn.Parameter(torch.zeros(64, 16))
    got = measured(tmp_path, EpsilonAudit(every=1, figures=False), task)
    assert got["epsilon_audit/encoder/layer_001"] == 1.0


def entropy_by_hand(attention: Any, inputs: tuple[Any, ...]) -> tuple[float, float]:
    """Mean share of the largest entropy, and the largest logit, head by head and query by query."""
    x, context, _ = inputs
    source = context.memory if attention.crosses else x
    mask = context.memory_mask if attention.crosses else context.mask
    (wq, bq), (wk, bk), _ = query_key_value(attention)
    shares, largest = [], 0.0
    for row in range(len(x)):
        visible = mask.expand(len(x), 1, x.size(1), source.size(1))[row, 0]
        for head in range(attention.heads):
            part = slice(head * 8, head * 8 + 8)
            query, key = (x[row] @ wq.T + bq)[:, part], (source[row] @ wk.T + bk)[:, part]
            for position in context.real[row].nonzero().flatten().tolist():
                logits = (key @ query[position] / math.sqrt(8))[visible[position]]
                largest = max(largest, logits.abs().max().item())
                weights: Tensor = logits.softmax(0)
                if len(weights) > 1:
                    shares.append(-(weights * weights.log()).sum().item() / math.log(len(weights)))
    return sum(shares) / len(shares), largest


def test_entropy_and_largest_logit(tmp_path: Path) -> None:
    task = small_task()
    with torch.no_grad():
        for layer in task.model.layers:
            for branch in layer.branches[:-1]:
                for parameter in branch.function.parameters():
                    parameter.mul_(2)
    encoder, decoder = (layer.branches for layer in task.model.layers)
    places = {
        "attention_{}/encoder/layer_001": encoder[0].function,
        "attention_{}/decoder/layer_001": decoder[0].function,
        "cross_attention_{}/decoder/layer_001": decoder[1].function,
    }
    expected = {}
    inputs = kept_inputs(list(places.values()), task)
    for (key, attention), given in zip(places.items(), inputs, strict=True):
        with torch.no_grad():
            share, largest = entropy_by_hand(attention, given)
        expected |= {key.format("entropy"): share, key.format("logit"): largest}
    assert measured(tmp_path, AttentionEntropy(every=1, figures=False), task) == pytest.approx(expected, rel=1e-4)
