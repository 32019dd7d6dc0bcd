"""torch's own Transformer, padded and masked as its users do: entropies by hand; padding changes no number."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stabilize import stats
from stabilize.callbacks import (
    ActivationScale,
    AttentionEntropy,
    EpsilonAudit,
    GradientRatio,
    LayerSimilarity,
    UpdateRatio,
)
from stabilize.callbacks.attention_logits import logits_of
from stabilize.callbacks.layers import real_positions
from tests.callbacks.tiny import loader, trainer

WIDTH, HEADS = 8, 2
STACKS = {"encoder": "model.encoder.layers.*", "decoder": "model.decoder.layers.*"}
LENGTHS = {"encoder": (5, 3), "decoder": (2, 4)}
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but")


class Translator(pl.LightningModule):
    """Gives all the masks that nn.Transformer takes."""

    def __init__(self, batch_first: bool = True, additive: bool = False) -> None:
        super().__init__()
        self.batch_first, self.additive = batch_first, additive
        torch.manual_seed(2)
        self.model = nn.Transformer(WIDTH, HEADS, 2, 3, 16, dropout=0.0, batch_first=batch_first)
        for part in self.model.modules():
            if isinstance(part, nn.LayerNorm):
                part.eps = 0.15
            if isinstance(part, nn.MultiheadAttention):
                nn.init.normal_(part.in_proj_bias)
                part.in_proj_weight.data.mul_(2)

    def mask(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf) if self.additive else hidden

    def training_step(self, given: list[Tensor], batch_idx: int) -> Tensor:
        padding = [
            torch.arange(states.size(1)) >= torch.tensor(lengths)[:, None]
            for states, lengths in zip(given, LENGTHS.values(), strict=True)
        ]
        source, target = (states if self.batch_first else states.transpose(0, 1) for states in given)
        later = torch.ones(given[1].size(1), given[1].size(1), dtype=torch.bool).triu(1)
        found = self.model(
            source,
            target,
            tgt_mask=self.mask(later),
            src_key_padding_mask=self.mask(padding[0]),
            tgt_key_padding_mask=self.mask(padding[1]),
            memory_key_padding_mask=self.mask(padding[0]),
        )
        found = found if self.batch_first else found.transpose(0, 1)
        return found[~padding[1]].cumsum(-1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sentences(columns: int = 0) -> list[Tensor]:
    """Source and target states, with more columns of padding, which are full of nonsense."""
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(2, max(lengths), WIDTH, generator=generator) for lengths in LENGTHS.values()]
    return [nn.functional.pad(states, (0, 0, 0, columns), value=9.0) for states in given]


GradientOfOutputs = functools.partial(GradientRatio, activations=True)


def measured(
    folder: Path, task: Translator, given: list[Tensor], *kinds: Any, layers: dict[str, str] = STACKS
) -> dict[str, float]:
    monitors: list[Any] = [kind(every=1, layers=layers, figures=False) for kind in kinds]
    trainer(folder, *monitors, max_steps=1, logger=False).fit(task, loader([given]))
    return {key: value for monitor in monitors for key, value in monitor.latest.items()}


def by_hand(task: Translator, given: list[Tensor]) -> dict[str, float]:
    """Share of the largest entropy and largest logit, sentence by sentence, head by head, query by query."""
    inputs: dict[nn.Module, Any] = {}
    places = {
        f"{kind}_{{}}/{stack}/layer_{number:03d}": (getattr(layer, name), of_query, of_key)
        for kind, stack, name, of_query, of_key in (
            ("attention", "encoder", "self_attn", "encoder", "encoder"),
            ("attention", "decoder", "self_attn", "decoder", "decoder"),
            ("cross_attention", "decoder", "multihead_attn", "decoder", "encoder"),
        )
        for number, layer in enumerate(getattr(task.model, stack).layers, 1)
    }
    handles = [
        part.register_forward_pre_hook(lambda part, states: inputs.update({part: states}))
        for part, *_ in places.values()
    ]
    task.train()
    task.training_step(given, 0)
    for handle in handles:
        handle.remove()
    found = {}
    for key, (part, of_query, of_key) in places.items():
        query, source = (states if task.batch_first else states.transpose(0, 1) for states in inputs[part][:2])
        shares, largest = [], 0.0
        for row in range(2):
            for head in range(HEADS):
                own = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
                (wq, wk, _), (bq, bk, _) = part.in_proj_weight.chunk(3), part.in_proj_bias.chunk(3)
                for position in range(LENGTHS[of_query][row]):
                    seen = position + 1 if key.startswith("attention") and of_key == "decoder" else LENGTHS[of_key][row]
                    q = wq[own] @ query[row, position] + bq[own]
                    logits = torch.stack([q @ (wk[own] @ source[row, at] + bk[own]) for at in range(seen)]) / 2.0
                    largest = max(largest, logits.abs().max().item())
                    weights = logits.softmax(0)
                    if seen > 1:
                        shares.append(-(weights * weights.log()).sum().item() / math.log(seen))
        found[key.format("entropy")], found[key.format("logit")] = sum(shares) / len(shares), largest
    return found


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_entropy_of_torchs_attention(tmp_path: Path, batch_first: bool, additive: bool) -> None:
    task, given = Translator(batch_first, additive), sentences()
    expected = by_hand(task, given)
    assert len(expected) == 2 * (2 + 3 + 3)
    assert measured(tmp_path, task, given, AttentionEntropy) == pytest.approx(expected, rel=1e-4)


def test_attention_by_itself() -> None:
    """With heads' own masks, keys of another width, and no batch: the weights that torch says it used."""
    part = nn.MultiheadAttention(WIDTH, HEADS, bias=False, kdim=6, vdim=6, batch_first=True)
    query, key, bias = torch.randn(3, 4, WIDTH), torch.randn(3, 5, 6), torch.randn(3 * HEADS, 4, 5)
    _, weights = part(query, key, key, attn_mask=bias, average_attn_weights=False)
    logits, seen = logits_of(part, (query, key, key), {"attn_mask": bias}, None)
    assert seen.all()
    torch.testing.assert_close(logits.softmax(-1), weights)
    _, weights = part(query[0], key[0], key[0], average_attn_weights=False)
    logits, seen = logits_of(part, (query[0], key[0], key[0]), {}, None)
    torch.testing.assert_close(logits.softmax(-1)[0], weights)
    entropy = torch.special.entr(weights).sum(-1).mean().item()
    assert stats.attention_entropy(logits, seen).item() == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("batch_first", [False, True])
def test_padding_changes_nothing(tmp_path: Path, batch_first: bool) -> None:
    kinds = (LayerSimilarity, ActivationScale, EpsilonAudit, AttentionEntropy)
    expected = measured(tmp_path / "plain", Translator(batch_first), sentences(), *kinds)
    found = measured(tmp_path / "padded", Translator(batch_first), sentences(6), *kinds)
    assert any(0 < value < 1 for key, value in expected.items() if key.startswith("epsilon_audit"))
    assert found == pytest.approx(expected, rel=1e-4)


def test_masks_of_hugging_face_say_what_is_real() -> None:
    class Layer(nn.Module):
        def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return hidden_states

    real = torch.tensor([[True, True, True, True], [True, True, False, False]])
    every, earlier = torch.ones(4, 4, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool).tril()
    masks = [real.long(), real]
    for looks in (every, earlier):
        seen = (looks & real[:, None])[:, None]
        added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        masks += [seen, added, added.half().clamp(min=torch.finfo(torch.float16).min)]
    masks.append(real[:, None, None])
    for mask in masks:
        for inputs, keywords in (((real, mask), {}), ((real,), {"attention_mask": mask})):
            found = real_positions(Layer(), inputs, keywords)
            assert found is not None
            assert torch.equal(found, real), mask
    assert real_positions(Layer(), (real,), {}) is None


class Checkpointed(nn.Module):
    """A layer whose inside is computed again in the backward."""

    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    @property
    def self_attn(self) -> nn.Module:
        return self.layer.self_attn

    def forward(self, *inputs: Tensor, **keywords: Any) -> Tensor:
        return checkpoint(lambda *states: self.layer(*states, **keywords), *inputs, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(tmp_path: Path, reentrant: bool) -> None:
    kinds = (LayerSimilarity, ActivationScale, EpsilonAudit, AttentionEntropy, UpdateRatio, GradientOfOutputs)
    given = [states.requires_grad_() for states in sentences()]  # reentrant: else nothing in the first layer learns
    expected = measured(tmp_path / "plain", Translator(), given, *kinds)
    task = Translator()
    for stack in (task.model.encoder, task.model.decoder):
        stack.layers = nn.ModuleList(Checkpointed(layer, reentrant) for layer in stack.layers)
    inside = {stack: f"{pattern}.layer" for stack, pattern in STACKS.items()}
    assert measured(tmp_path / "again", task, given, *kinds, layers=inside) == pytest.approx(expected, rel=1e-4)
