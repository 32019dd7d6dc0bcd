"""CTranslate2's Transformer: LayerNorm or RMSNorm, before or after the branches, gated or not, any positions.

Norms have one epsilon, in the model's config. Tokens in and out are the SentencePiece pieces of `tokenizer.model`; the
end mark of the source is added by CTranslate2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from stabilize.data.tokenizer import Tokenizer
from stabilize.export.fold import fold, remarks
from stabilize.export.plain import Linear, Plain, PlainBranch, PlainStack, read
from stabilize.strategies.norm import StandardNorm
from stabilize.task import TranslationTask
from stabilize.tokens import BEGIN, END, UNKNOWN

TOKENIZER = "tokenizer.model"


def write(task: TranslationTask, folder: Path) -> list[str]:
    """Write the model for `ctranslate2.Translator`, and the tokenizer."""
    plain = read(task.model, task.sizes)
    epsilon = plain.encoder.norms[0].epsilon
    plain = fold(plain, epsilon)
    spec = _spec(plain)
    pieces = task.tokenizer.pieces
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.unk_token, spec.config.eos_token = pieces[UNKNOWN], pieces[END]
    spec.config.bos_token = spec.config.decoder_start_token = pieces[BEGIN]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = epsilon
    spec.validate()
    spec.optimize()
    spec.save(str(folder))
    task.tokenizer.save(folder / TOKENIZER)
    return remarks(plain, epsilon)


def _spec(plain: Plain) -> Any:
    from ctranslate2.specs.common_spec import Activation
    from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec, TransformerSpec

    gated = plain.sizes.activation == "swiglu"
    activation = {"relu": Activation.RELU, "gelu": Activation.GELU, "swiglu": Activation.SWISH}[plain.sizes.activation]
    kinds = (TransformerEncoderSpec, TransformerDecoderSpec)
    encoder, decoder = (
        kind(
            len(stack.layers),
            plain.sizes.heads,
            pre_norm=stack.pre_norm,
            rms_norm=not stack.centred,
            activation=activation,
            ffn_glu=gated,
        )
        for kind, stack in zip(kinds, plain.stacks, strict=True)
    )
    _fill_stack(encoder, encoder.embeddings[0], plain.encoder)
    _fill_stack(decoder, decoder.embeddings, plain.decoder)
    _fill_linear(decoder.projection, plain.projection)
    return TransformerSpec(encoder, decoder)


def _fill_stack(spec: Any, embeddings: Any, stack: PlainStack) -> None:
    embeddings.weight = _array(stack.embedding)
    spec.scale_embeddings = False
    spec.position_encodings.encodings = _array(stack.positions)
    for layer, branches in zip(spec.layer, stack.layers, strict=True):
        *attentions, feed_forward = branches
        for part, branch in zip(("self_attention", "attention"), attentions, strict=False):
            _fill_attention(getattr(layer, part), branch)
        _fill_norm(layer.ffn.layer_norm, feed_forward.norm)
        # Where there is a gate, the activation is the gate's.
        gate = feed_forward.reads.get("gate")
        _fill_linear(layer.ffn.linear_0, gate or feed_forward.reads["input"])
        if gate is not None:
            _fill_linear(layer.ffn.linear_0_noact, feed_forward.reads["input"])
        _fill_linear(layer.ffn.linear_1, feed_forward.output)
    if stack.final is not None:
        _fill_norm(spec.layer_norm, stack.final)


def _fill_attention(spec: Any, branch: PlainBranch) -> None:
    _fill_norm(spec.layer_norm, branch.norm)
    rows = branch.reads | branch.memory
    query, key, value = (rows[name] for name in ("query", "key", "value"))
    inputs = [[query], [key, value]] if branch.memory else [[query, key, value]]
    for linear, parts in zip(spec.linear, [*map(Linear.stacked, inputs), branch.output], strict=True):
        _fill_linear(linear, parts)


def _fill_linear(spec: Any, linear: Linear) -> None:
    spec.weight, spec.bias = _array(linear.weight), _array(linear.bias)


def _fill_norm(spec: Any, norm: StandardNorm) -> None:
    spec.gamma = _array(norm.gain)
    if norm.centred:
        spec.beta = _array(norm.bias)


def _array(x: Tensor) -> Any:
    return x.numpy().astype(np.float32)


def log_probabilities(folder: Path, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
    """As `stabilize.export.log_probabilities`."""
    import ctranslate2

    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32", intra_threads=1)
    pieces = Tokenizer.load(folder / TOKENIZER).pieces
    source, target = ([[pieces[number] for number in ids] for ids in side] for side in (sources, targets))
    return [scored.log_probs for scored in translator.score_batch(source, target)]
