"""What a layer is worth, beside models that are built without it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stabilize.callbacks import SkipCosts
from stabilize.errors import UserError
from tests.tasks import Sentences, rows, sentence_batch, small_task, small_trainer


def nll(task: Any, batch: Any) -> float:
    with torch.no_grad():
        _, summed, tokens = task.loss(batch)
    return float(summed) / tokens


def without(task: Any, stack: str, layer: int) -> Any:
    """A copy of the task whose stack is shorter by a layer."""
    shorter = copy.deepcopy(task)
    part = getattr(shorter.model, stack)
    part.layers = nn.ModuleList(kept for k, kept in enumerate(part.layers) if k != layer)
    return shorter


def test_each_layer_costs_what_the_model_without_it_loses(tmp_path: Path) -> None:
    """On the first sentences alone of a batch that has more."""
    task = small_task(encoder_layers=3, decoder_layers=2)
    data = Sentences(evaluation_batch_tokens=1000)
    measured = SkipCosts(threshold=0.001, sentences=2)
    small_trainer(tmp_path, measured, limit_val_batches=1.0).validate(task, data, verbose=False)
    (found,) = [row for row in rows(tmp_path) if "effective_depth/encoder" in row]
    task.eval()
    (batch,) = data.val_dataloader()
    assert len(batch.index) > 2
    few = sentence_batch(*batch.index[:2].tolist())
    for stack, depth in {"encoder": 3, "decoder": 2}.items():
        costs = [nll(without(task, stack, k), few) - nll(task, few) for k in range(depth)]
        logged = [found[f"skip_cost/{stack}/layer_{k:03d}"] for k in range(1, depth + 1)]
        assert logged == pytest.approx(costs, abs=1e-5)
        assert max(map(abs, costs)) > 1e-3
        assert found[f"effective_depth/{stack}"] == sum(cost > 0.001 for cost in costs)
    assert not any(layer._forward_hooks for layer in task.model.layers)


def test_no_sentence_is_refused() -> None:
    with pytest.raises(UserError, match="sentences of SkipCosts is 0"):
        SkipCosts(sentences=0)
