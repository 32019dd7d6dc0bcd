"""The logits of an attention module, computed once more from what it was called with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stabilize.callbacks.layers import arguments_of, may_look


def shows_logits(part: Any) -> bool:
    """Say whether the logits of a module can be told.

    Those of modules that say them (`observe_logits(inputs)`), of torch's, and of those of Hugging Face that are built
    like BART's: logits are products of `q_proj` and `k_proj`, and nothing (a norm, a rotation, a bias by distance)
    comes between, and each head has keys of its own.
    """
    if hasattr(part, "observe_logits"):
        return True
    if isinstance(part, nn.MultiheadAttention):
        return part.bias_k is None and not part.add_zero_attn
    parts = {name for name, _ in part.named_children()}
    if not {"q_proj", "k_proj"} <= parts <= {"q_proj", "k_proj", "v_proj", "out_proj", "o_proj"}:
        return False
    takes = inspect.signature(part.forward).parameters
    plain = "hidden_states" in takes and not any("position" in name for name in takes)
    shared = part.q_proj.weight.shape != part.k_proj.weight.shape  # keys of several heads
    return plain and not shared and isinstance(getattr(part, "num_heads", None), int)


def logits_of(
    part: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any], real: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the logits of a call `[batch, heads, queries, keys]`, and where real queries may look.

    Args:
        part: shows its logits.
        inputs: of the call.
        keywords: of the call.
        real: which queries are, as the layer's states lie; None is all. Modules that say their logits know better.
    """
    if hasattr(part, "observe_logits"):
        return part.observe_logits(inputs)
    given = arguments_of(part, inputs, keywords)
    if isinstance(part, nn.MultiheadAttention):
        logits, seen = _of_torch(part, given)
        real = real if real is None or part.batch_first or real.dim() == 1 else real.mT
    else:
        logits, seen = _of_hugging_face(part, given)
    if real is not None and real.numel() == logits.size(0) * logits.size(2):
        seen = seen & real.reshape(len(logits), 1, -1, 1)
    return logits, seen


def _heads(x: Tensor, heads: int) -> Tensor:
    """`[batch, length, heads * width]` as `[batch, heads, length, width]`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _of_torch(part: nn.MultiheadAttention, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    states = given["query"], given["key"]
    if states[0].dim() == 2:
        states = states[0][None], states[1][None]
    elif not part.batch_first:
        states = states[0].transpose(0, 1), states[1].transpose(0, 1)
    weights = (part.q_proj_weight, part.k_proj_weight) if part.in_proj_weight is None else part.in_proj_weight.chunk(3)
    biases = (None, None) if part.in_proj_bias is None else part.in_proj_bias.chunk(3)
    query, key = (
        _heads(nn.functional.linear(x, weight, bias), part.num_heads)
        for x, weight, bias in zip(states, weights[:2], biases[:2], strict=True)
    )
    logits = query @ key.mT * part.head_dim**-0.5
    seen = torch.ones_like(logits, dtype=torch.bool)
    if given.get("attn_mask") is not None:
        mask = given["attn_mask"]
        logits, seen = _behind(mask if mask.dim() == 2 else mask.view(-1, *logits.shape[1:]), logits, seen, True)
    if given.get("key_padding_mask") is not None:
        mask = given["key_padding_mask"]
        logits, seen = _behind(mask.reshape(len(logits), 1, 1, -1), logits, seen, True)
    return logits, seen


def _of_hugging_face(part: Any, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    states, source = given["hidden_states"], given.get("key_value_states")
    query = _heads(part.q_proj(states), part.num_heads)
    key = _heads(part.k_proj(states if source is None else source), part.num_heads)
    logits = query @ key.mT * getattr(part, "scaling", query.size(-1) ** -0.5)
    seen, mask = torch.ones_like(logits, dtype=torch.bool), given.get("attention_mask")
    if mask is None:  # then the fused kernels are told in words
        return logits, seen.tril() if source is None and getattr(part, "is_causal", False) else seen
    if mask.dim() == 2:
        return logits, seen & (mask != 0)[:, None, None]
    return _behind(mask, logits, seen, False)


def _behind(mask: Tensor, logits: Tensor, seen: Tensor, true_hides: bool) -> tuple[Tensor, Tensor]:
    """The logits and where they are seen, behind one more mask."""
    return logits if mask.dtype == torch.bool else logits + mask, seen & may_look(mask, true_hides)
