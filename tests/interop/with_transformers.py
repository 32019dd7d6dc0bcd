"""RMSNorm, post-norm layers and capped logits, against T5, BART and Gemma 2 of transformers; monitors on BART."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration, Gemma2Config
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.t5.modeling_t5 import T5LayerNorm

from stabilize.callbacks import (
    ActivationScale,
    AttentionEntropy,
    EpsilonAudit,
    GradientRatio,
    LayerSimilarity,
    SpikeGuard,
    UpdateRatio,
)
from stabilize.model import Layer, Sizes
from stabilize.model.layer import Context
from stabilize.strategies import PostNorm, RMSNorm, SoftCap, Stabilizer
from tests.callbacks.tiny import hooks, loader, trainer
from tests.interop.weights import HEADS, HIDDEN, WIDTH, give, give_attention, ours, without
from tests.models import PAD, assert_equal, disturb, sentences


def added(mask: Tensor) -> Tensor:
    """A mask as their attention adds it to the logits."""
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_rms_norm_equals_t5s(scale: float) -> None:
    site = Sizes(1, 1, WIDTH, HEADS, HIDDEN).site("encoder", 1, "feed_forward")
    mine, theirs = RMSNorm().at(site, epsilon=1e-6), T5LayerNorm(WIDTH, eps=1e-6)
    disturb(mine)
    give(theirs, weight=mine.gain)
    x = scale * torch.randn(3, 4, WIDTH)
    assert_equal(mine(x), theirs(x), 1e-5)


def give_bart(target: nn.Module, source: Layer) -> None:
    *attentions, feed_forward = source.branches
    for name, branch in zip(("self_attn", "encoder_attn"), attentions, strict=False):
        theirs = getattr(target, name)
        give_attention(branch.function, theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.out_proj)
        norm = branch.slots["norm"]
        give(getattr(target, f"{name}_layer_norm"), weight=norm.gain, bias=norm.bias)
    give(target.fc1, weight=feed_forward.function.input.weight, bias=feed_forward.function.input.bias)
    give(target.fc2, weight=feed_forward.function.output.weight, bias=feed_forward.function.output.bias)
    norm = feed_forward.slots["norm"]
    give(target.final_layer_norm, weight=norm.gain, bias=norm.bias)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_post_norm_equals_barts(activation: str) -> None:
    model = ours(Stabilizer(PostNorm()), activation=activation)
    config = BartConfig(
        d_model=WIDTH,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN,
        activation_function=activation,
        attn_implementation="eager",
    )
    source, target = sentences(3, 7), sentences(3, 5)
    source[1, 4:] = PAD
    memory, hidden = model.encode(source), model(source, target)

    expected, to_source = model.source_embedding(source), added(memory.mask)
    for layer in model.encoder.layers:
        theirs = BartEncoderLayer(config).eval()
        give_bart(theirs, layer)
        expected = theirs(expected, to_source.expand(3, 1, 7, 7))
    real = source != PAD
    assert_equal(memory.states[real], expected[real], 1e-5)

    encoded, expected = expected, model.target_embedding(target)
    backward = added(torch.ones(5, 5, dtype=torch.bool).tril()).expand(3, 1, 5, 5)
    for number, layer in enumerate(model.decoder.layers):
        theirs = BartDecoderLayer(config, layer_idx=number).eval()
        give_bart(theirs, layer)
        expected = theirs(
            expected,
            attention_mask=backward,
            encoder_hidden_states=encoded,
            encoder_attention_mask=to_source.expand(3, 1, 5, 7),
        )
        expected = expected[0] if isinstance(expected, tuple) else expected
    assert_equal(hidden, expected, 1e-5)


@pytest.mark.parametrize("cap", [50.0, 0.5])
def test_capped_logits_equal_gemmas(cap: float) -> None:
    model = ours(Stabilizer(attention=SoftCap(cap)))
    attention = model.decoder.layers[0].branches[0].function
    without([attention.query_value_key.bias, attention.output.bias])
    config = Gemma2Config(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=WIDTH // HEADS,
        query_pre_attn_scalar=WIDTH // HEADS,
        attn_logit_softcapping=cap,
        num_hidden_layers=1,
        attn_implementation="eager",
    )
    theirs = Gemma2Attention(config, layer_idx=0).eval()
    give_attention(attention, theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj)
    x, mask = 5 * torch.randn(3, 6, WIDTH), torch.ones(6, 6, dtype=torch.bool).tril()
    unturned = torch.ones(3, 6, WIDTH // HEADS), torch.zeros(3, 6, WIDTH // HEADS)  # cosines and sines of no rotation
    found, _ = attention(x, Context(torch.ones(3, 6, dtype=torch.bool), mask), None)
    expected, _ = theirs(x, position_embeddings=unturned, attention_mask=added(mask).expand(3, 1, 6, 6))
    assert_equal(found, expected, 1e-5)


class Bart(pl.LightningModule):
    """A small BART, as anybody would train it."""

    def __init__(self, attention: str = "eager") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = BartForConditionalGeneration(
            BartConfig(
                vocab_size=30,
                d_model=WIDTH,
                encoder_layers=2,
                decoder_layers=3,
                encoder_attention_heads=HEADS,
                decoder_attention_heads=HEADS,
                encoder_ffn_dim=HIDDEN,
                decoder_ffn_dim=HIDDEN,
                attn_implementation=attention,
                use_cache=False,
                dropout=0.0,
                attention_dropout=0.0,
            )
        )

    def forward(self, tokens: Tensor, **options: Any) -> Any:
        real = tokens != 1
        masks = {"attention_mask": real.long(), "decoder_attention_mask": real.long()}
        return self.model(input_ids=tokens, labels=tokens.masked_fill(~real, -100), **masks, **options)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self(tokens).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(folder: Path, task: Bart, tokens: Tensor) -> dict[str, float]:
    """What all monitors say of one update."""
    layers = {stack: f"model.model.{stack}.layers.*" for stack in ("encoder", "decoder")}
    kinds = (LayerSimilarity, ActivationScale, UpdateRatio, EpsilonAudit, AttentionEntropy)
    monitors: list[Any] = [kind(every=1, layers=layers, figures=False) for kind in kinds]
    monitors += [
        GradientRatio(every=1, activations=True, roles=True, layers=layers, figures=False),
        SpikeGuard(every=1),
    ]
    trainer(folder, *monitors, max_steps=1).fit(task, loader([tokens]))
    assert hooks(task) == 0
    return {key: value for monitor in monitors for key, value in monitor.latest.items()}


def entropies(weights: tuple[Tensor, ...], key: str, real: Tensor, causal: bool) -> dict[str, float]:
    """Share of the largest entropy of the weights that transformers says it used."""
    keys = torch.arange(1, real.size(1) + 1).expand(real.shape) if causal else real.sum(1, keepdim=True)
    found = {}
    for number, layer in enumerate(weights, 1):
        share = torch.special.entr(layer).sum(-1).mean(1) / keys.expand(real.shape).log()
        found[f"{key}/layer_{number:03d}"] = share[real & (keys > 1)].mean().item()
    return found


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_monitors_watch_bart(tmp_path: Path, attention: str) -> None:
    tokens = torch.randint(5, 30, (3, 6))
    tokens[1, 4:] = 1
    real = tokens != 1
    seen = Bart()(tokens, output_attentions=True)
    expected = {
        **entropies(seen.encoder_attentions, "attention_entropy/encoder", real, False),
        **entropies(seen.decoder_attentions, "attention_entropy/decoder", real, True),
        **entropies(seen.cross_attentions, "cross_attention_entropy/decoder", real, False),
    }
    got = numbers(tmp_path / "plain", Bart(attention), tokens)
    assert {key: value for key, value in got.items() if "entropy" in key} == pytest.approx(expected, rel=1e-4)
    for stack, depth in (("encoder", 2), ("decoder", 3)):
        for kind in ("activation_rms", "update_ratio", "epsilon_audit", "gradient_norm_self_attention"):
            assert {f"{kind}/{stack}/layer_{number:03d}" for number in range(1, depth + 1)} <= set(got)
        for kind in ("gradient_ratio", "activation_gradient_ratio", "gradient_ratio_feed_forward"):
            assert got[f"{kind}/{stack}/first_to_last"] > 0
        assert got[f"activation_rms/{stack}/layer_001"] == pytest.approx(1.0, rel=1e-3), "BART is post-norm"
        assert f"layer_similarity/{stack}/mean" in got
    assert "gradient_norm_cross_attention/decoder/layer_001" in got
    padded = numbers(tmp_path / "padded", Bart(attention), nn.functional.pad(tokens, (0, 5), value=1))
    assert padded == pytest.approx(got, rel=1e-3, abs=1e-5)
