"""The project's own model, whatever its stream is: the logged numbers against retained gradients and plain cosines."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from stabilize.callbacks import GradientRatio, LayerSimilarity
from stabilize.model import EncoderDecoder, Sizes
from stabilize.strategies import B2T, DLCL, HyperConnections, PostNorm, RealFormer, ResiDual, Stabilizer
from tests.callbacks.tiny import loader, records, trainer

VOCABULARY = 11
STABILIZERS = {
    "pre-norm": Stabilizer(),
    "B2T": Stabilizer(placement=B2T()),
    "two streams": Stabilizer(placement=ResiDual()),
    "many streams": Stabilizer(residual=HyperConnections()),
    "a history": Stabilizer(residual=DLCL()),
    "logits handed on": Stabilizer(placement=PostNorm(), attention=RealFormer()),
}


class Translate(pl.LightningModule):
    def __init__(self, stabilizer: Stabilizer) -> None:
        super().__init__()
        sizes = Sizes(encoder_layers=3, decoder_layers=4, width=8, heads=2, hidden=16, dropout=0.0)
        self.model = EncoderDecoder(VOCABULARY, sizes, stabilizer)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        source, target = batch
        logits = self.model.project(self.model(source, target[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def sentences() -> tuple[Tensor, Tensor]:
    """Return source `[3, 6]` and target `[3, 7]`, the first sentence padded."""
    source, target = torch.randint(4, VOCABULARY, (3, 6)), torch.randint(4, VOCABULARY, (3, 7))
    source[0, 3:], target[0, 4:] = 0, 0
    return source, target


def by_hand(task: Translate, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Every layer metric of one update, through hooks that only keep what they see."""
    source, target = batch
    expected: dict[str, float] = {}
    for stack, real in (("encoder", source != 0), ("decoder", target[:, :-1] != 0)):
        layers = getattr(task.model, stack).layers
        streams: list[Any] = []
        states: list[Tensor] = []

        def keep(layer: Any, inputs: Any, output: Any, streams: Any = streams, states: Any = states) -> None:
            streams.append(output[0] if isinstance(output[0], tuple) else (output[0],))
            for tensor in streams[-1]:
                tensor.retain_grad()
            states.append(layer.observe(inputs, output)[0].detach())

        handles = [layer.register_forward_hook(keep) for layer in layers]
        task.zero_grad()
        task.training_step(batch, 0).backward()
        for handle in handles:
            handle.remove()
        parameter_norms = [torch.cat([p.grad.flatten() for p in layer.parameters()]).norm().item() for layer in layers]
        gradients = [[tensor.grad.flatten() for tensor in stream if tensor.grad is not None] for stream in streams]
        norms = [torch.cat(parts).norm().item() for parts in gradients]
        for i in range(len(layers) - 1):
            cosine = nn.functional.cosine_similarity(states[i][real], states[i + 1][real]).mean().item()
            expected[f"layer_similarity/{stack}/layer_{i + 1:03d}"] = cosine
            expected[f"gradient_ratio/{stack}/layer_{i + 1:03d}"] = parameter_norms[i] / parameter_norms[-1]
            expected[f"activation_gradient_ratio/{stack}/layer_{i + 1:03d}"] = norms[i] / norms[-1]
    return expected


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("stabilizer", STABILIZERS.values(), ids=STABILIZERS.keys())
def test_every_stream_is_measured(tmp_path: Path, stabilizer: Stabilizer, checkpointed: bool):
    task, batch = Translate(stabilizer), sentences()
    expected = by_hand(copy.deepcopy(task), batch)
    for layer in task.model.layers:
        layer.checkpointed = checkpointed
    callbacks = [GradientRatio(every=1, activations=True, figures=False), LayerSimilarity(every=1, figures=False)]
    trainer(tmp_path, *callbacks, max_steps=1).fit(task, loader([batch]))
    rows = records(tmp_path, "")
    got = {key: value for row in rows for key, value in row.items()}
    assert {key: got[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
