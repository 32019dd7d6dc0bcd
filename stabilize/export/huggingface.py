"""Transformers' models: Marian is post-norm, Blenderbot pre-norm; both without a norm on the embedding.

Marian computes its sinusoids itself, all sines before all cosines, so that the channels of the stream are put in that
order. Blenderbot has a table of positions. Norms in both are LayerNorm with epsilon 1e-5.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stabilize.data.tokenizer import Tokenizer
from stabilize.errors import UserError
from stabilize.export.fold import fold, remarks
from stabilize.export.plain import ADVICE, Linear, Plain, PlainBranch, PlainStack, read
from stabilize.strategies.norm import StandardNorm
from stabilize.task import TranslationTask
from stabilize.tokens import BEGIN, END, PAD, UNKNOWN

EPSILON = 1e-5
"""Of all norms there."""

LONGEST = 512
"""Tokens of a translation, unless `generate` is told otherwise."""

Weights = dict[str, Tensor]


def write(task: TranslationTask, folder: Path) -> list[str]:
    """Write the model, its tokenizer and settings of `generate`."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    plain = read(task.model, task.sizes)
    marian = chosen(plain) == "Marian"
    plain = fold(plain, EPSILON, fixed_positions=marian)
    said = remarks(plain, EPSILON)
    if marian:
        plain = _sines_first(plain)
    settings = _settings(plain)
    if marian:
        settings["share_encoder_decoder_embeddings"] = settings["tie_word_embeddings"]
        model: Any = transformers.MarianMTModel(transformers.MarianConfig(**settings))
    else:
        settings["encoder_no_repeat_ngram_size"] = 0
        model = transformers.BlenderbotForConditionalGeneration(transformers.BlenderbotConfig(**settings))
    weights = _weights(plain)
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=BEGIN,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
        suppress_tokens=[PAD, UNKNOWN, BEGIN],
        max_length=min(LONGEST, len(plain.decoder.positions)),
        num_beams=5,
        early_stopping="never",
    )
    model.save_pretrained(folder)
    pieces = task.tokenizer.pieces
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast_tokenizer(task.tokenizer),
        pad_token=pieces[PAD],
        unk_token=pieces[UNKNOWN],
        bos_token=pieces[BEGIN],
        eos_token=pieces[END],
        split_special_tokens=True,  # as `encode_special_tokens` below
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=len(plain.encoder.positions),
    ).save_pretrained(folder)
    return said


def chosen(plain: Plain) -> str:
    """The architecture that computes the same: `Marian` or `Blenderbot`.

    Raises:
        UserError: there is none.
    """
    forms = {stack.pre_norm for stack in plain.stacks}
    if not all(stack.centred for stack in plain.stacks):
        why = "with RMSNorm has biases and positions that are added to the embedding"
    elif plain.sizes.activation == "swiglu":
        why = "with positions that are added to the embedding has a gated feed-forward branch, model.activation swiglu"
    elif len(forms) > 1:
        why = "is pre-norm in one stack and post-norm in the other"
    elif forms == {False} and plain.sizes.positions == "learned":
        why = "with learned positions is post-norm and has no norm on the embedding"
    else:
        return "Blenderbot" if forms == {True} else "Marian"
    raise UserError(f"no encoder-decoder of transformers {why}; --to ctranslate2 would do")


def _settings(plain: Plain) -> dict[str, Any]:
    sizes = plain.sizes
    source, target, output = _embeddings(plain)
    return {
        "vocab_size": len(plain.encoder.embedding),
        "d_model": sizes.width,
        "encoder_layers": sizes.encoder_layers,
        "decoder_layers": sizes.decoder_layers,
        "encoder_attention_heads": sizes.heads,
        "decoder_attention_heads": sizes.heads,
        "encoder_ffn_dim": sizes.hidden,
        "decoder_ffn_dim": sizes.hidden,
        "activation_function": sizes.activation,
        "max_position_embeddings": len(plain.encoder.positions),
        "scale_embedding": True,
        "dropout": sizes.dropout,
        "attention_dropout": sizes.attention_dropout,
        "activation_dropout": sizes.activation_dropout,
        "pad_token_id": PAD,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "decoder_start_token_id": BEGIN,
        "forced_eos_token_id": None,
        "tie_word_embeddings": source.equal(target) and target.equal(output),
    }


def _embeddings(plain: Plain) -> tuple[Tensor, Tensor, Tensor]:
    """Source and target embedding before their factor sqrt(width), and the output projection."""
    scale = math.sqrt(plain.sizes.width)
    return (
        (plain.encoder.embedding / scale).float(),
        (plain.decoder.embedding / scale).float(),
        plain.projection.weight.float(),
    )


def _weights(plain: Plain) -> Weights:
    """All that either architecture has, by its names there."""
    source, target, output = _embeddings(plain)
    weights: Weights = {
        "lm_head.weight": output,
        "final_logits_bias": plain.projection.bias[None],
        "model.encoder.embed_tokens.weight": source,
        "model.decoder.embed_tokens.weight": target,
        "model.shared.weight": source,  # what both of them are, or, where they differ, not used
    }
    for name, stack in zip(("model.encoder", "model.decoder"), plain.stacks, strict=True):
        weights |= {f"{name}.embed_positions.weight": stack.positions, **_stack(name, stack)}
    return {name: value.float() for name, value in weights.items()}


def _stack(name: str, stack: PlainStack) -> Weights:
    weights = _norm(f"{name}.layer_norm", stack.final) if stack.final else {}
    for number, branches in enumerate(stack.layers):
        *attentions, feed_forward = branches
        layer = f"{name}.layers.{number}"
        for part, branch in zip(("self_attn", "encoder_attn"), attentions, strict=False):
            weights |= _attention(f"{layer}.{part}", branch) | _norm(f"{layer}.{part}_layer_norm", branch.norm)
        weights |= _linear(f"{layer}.fc1", feed_forward.reads["input"]) | _linear(f"{layer}.fc2", feed_forward.output)
        weights |= _norm(f"{layer}.final_layer_norm", feed_forward.norm)
    return weights


def _attention(name: str, branch: PlainBranch) -> Weights:
    parts = {**branch.reads, **branch.memory}
    named = {"q_proj": parts["query"], "k_proj": parts["key"], "v_proj": parts["value"], "out_proj": branch.output}
    return {key: value for part, linear in named.items() for key, value in _linear(f"{name}.{part}", linear).items()}


def _linear(name: str, linear: Linear) -> Weights:
    return {f"{name}.weight": linear.weight, f"{name}.bias": linear.bias}


def _norm(name: str, norm: StandardNorm) -> Weights:
    return {f"{name}.weight": norm.gain, f"{name}.bias": norm.bias}


def _sines_first(plain: Plain) -> Plain:
    """The same Transformer with the stream's channels in the order of Marian's sinusoids."""
    order = torch.arange(plain.sizes.width)
    order = torch.cat([order[0::2], order[1::2]])

    def reads(linear: Linear) -> Linear:
        return replace(linear, weight=linear.weight[:, order])

    def branch(given: PlainBranch) -> PlainBranch:
        return replace(
            given,
            norm=given.norm._replace(gain=given.norm.gain[order], bias=given.norm.bias[order]),
            reads={name: reads(linear) for name, linear in given.reads.items()},
            memory={name: reads(linear) for name, linear in given.memory.items()},
            output=Linear(given.output.weight[order], given.output.bias[order]),
        )

    encoder, decoder = (
        replace(
            stack,
            embedding=stack.embedding[:, order],
            positions=stack.positions[:, order],
            layers=[[branch(given) for given in layer] for layer in stack.layers],
        )
        for stack in plain.stacks
    )
    return replace(plain, encoder=encoder, decoder=decoder, projection=reads(plain.projection))


def fast_tokenizer(tokenizer: Tokenizer) -> Any:
    """The SentencePiece model as a `tokenizers.Tokenizer` that gives the same ids, the end mark after them.

    Raises:
        UserError: a kind of model that it has not.
    """
    from sentencepiece import sentencepiece_model_pb2 as formats
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as FastTokenizer
    from transformers.tokenization_utils_base import generate_merges

    described = formats.ModelProto.FromString(tokenizer.model)  # type: ignore[attr-defined]
    kinds, rules = described.trainer_spec, described.normalizer_spec
    scores = {piece.piece: piece.score for piece in described.pieces}
    special = {piece.piece for piece in described.pieces if piece.type != piece.NORMAL}
    if kinds.model_type == kinds.BPE:
        vocabulary = {piece: number for number, piece in enumerate(scores)}
        merges = generate_merges(vocabulary, scores, skip_tokens=special)
        model: Any = models.BPE(
            vocabulary,
            merges,
            unk_token=tokenizer.pieces[UNKNOWN],
            fuse_unk=True,
            byte_fallback=kinds.byte_fallback,
        )
    elif kinds.model_type == kinds.UNIGRAM:
        model = models.Unigram(list(scores.items()), unk_id=UNKNOWN, byte_fallback=kinds.byte_fallback)
    else:
        raise UserError(f"the tokenizer is neither BPE nor unigram, which transformers needs; {ADVICE}")
    fast = FastTokenizer(model)
    steps: list[Any] = [normalizers.Precompiled(rules.precompiled_charsmap)] if rules.precompiled_charsmap else []
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend("▁")] if rules.add_dummy_prefix else []
    steps += [normalizers.Replace(" ", "▁")]
    if rules.remove_extra_whitespaces:  # SentencePiece takes the mark itself for a space here
        steps += [normalizers.Replace(Regex(r"▁+\z"), "")]
    fast.normalizer = normalizers.Sequence(steps)
    end = tokenizer.pieces[END]
    fast.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in tokenizer.pieces[: END + 1]]
    )
    fast.encode_special_tokens = True  # "</s>" in a text is four characters
    return fast


@torch.no_grad()
def log_probabilities(folder: Path, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
    """As `stabilize.export.log_probabilities`."""
    import transformers

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    source = pad_sequence([torch.tensor([*ids, END]) for ids in sources], True, PAD)
    target = pad_sequence([torch.tensor([BEGIN, *ids, END]) for ids in targets], True, PAD)
    logits = model(input_ids=source, attention_mask=source != PAD, decoder_input_ids=target[:, :-1]).logits
    chosen = logits.log_softmax(-1).gather(-1, target[:, 1:, None]).squeeze(-1)
    return [row[: len(ids) + 1].tolist() for row, ids in zip(chosen, targets, strict=True)]
