"""Find the layers a pattern names, and read what they put out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stabilize.errors import UserError


def find_layers(module: nn.Module, patterns: dict[str, str]) -> dict[str, list[nn.Module]]:
    """Return the layers of each stack, first to last.

    Args:
        module: usually the LightningModule.
        patterns: stack name -> pattern over the names of `module.named_modules()`; a star stands for one part of a
            name, so "model.encoder.layers.*" is every layer and nothing inside them.

    Raises:
        UserError: if a pattern matches no module; the message lists the module lists that are there.
    """
    stacks = {}
    for stack, pattern in patterns.items():
        expression = re.compile(r"[^.]+".join(re.escape(part) for part in pattern.split("*")))
        stacks[stack] = [layer for name, layer in module.named_modules() if expression.fullmatch(name)]
        if not stacks[stack]:
            lists = [f"{name}.*" for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and part]
            raise UserError(
                f"layers.{stack}: no module of {type(module).__name__} is called {pattern!r}; "
                f"its lists of modules are {', '.join(lists) or 'none'}"
            )
    return stacks


ROLES = {
    "self_attention": ("self_attn",),
    "cross_attention": ("multihead_attn", "encoder_attn"),
    "feed_forward": ("linear1", "linear2", "fc1", "fc2"),
}
"""What the parts of a layer are called in torch and in transformers."""


def roles_of(layer: nn.Module) -> dict[str, nn.Module]:
    """Return a layer's parts by role, with those that it has.

    A layer says so itself in `layer.roles`; of any other the parts that are called as in torch and transformers.
    """
    own = getattr(layer, "roles", None)
    if isinstance(own, dict):
        return own
    children = dict(layer.named_children())
    found = {role: [children[name] for name in names if name in children] for role, names in ROLES.items()}
    return {role: nn.ModuleList(parts) for role, parts in found.items() if parts}


def stream_of(output: Any) -> list[Tensor]:
    """Return the tensors that carry the stream to the next layer: the output, or all in the first item of a tuple.

    The other items (handed-on attention logits, caches, weights) are no part of the stream.
    """
    stream = output[0] if isinstance(output, (tuple, list)) else output
    return [leaf for leaf in tree_leaves(stream) if isinstance(leaf, Tensor)]


def observe(
    layer: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any], output: Any
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's states `[..., width]` and which positions are real, bool `[...]` or None for all of them.

    A layer says so itself in `layer.observe(inputs, output)`; from any other the first tensor of the output is taken,
    and its padding is what it was called with, see `real_positions`.
    """
    own = getattr(layer, "observe", None)
    if callable(own):
        return own(inputs, output)
    states, real = stream_of(output)[0], real_positions(layer, inputs, keywords)
    return states, real if real is not None and real.shape == states.shape[:-1] else None


def arguments_of(module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a module was called with, by name."""
    try:
        return inspect.signature(module.forward).bind_partial(*inputs, **keywords).arguments | dict(keywords)
    except TypeError:  # not what it says it takes
        return dict(keywords)


def may_look(mask: Tensor, true_hides: bool) -> Tensor:
    """Return where a mask lets attention look: bool of either sense, or numbers that are added to the logits."""
    if mask.dtype == torch.bool:
        return ~mask if true_hides else mask
    return mask > torch.finfo(mask.dtype).min / 2


def real_positions(layer: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Tensor | None:
    """Return which positions are real, bool of the shape of the states, where the masks of a call tell.

    Those of torch's layers (`src_key_padding_mask`, `tgt_key_padding_mask`) and of Hugging Face's (`attention_mask`:
    one of `[batch, length]` is not zero at real tokens, of one of `[batch, 1, length, length]` a token is real that may
    look at itself).
    """
    given = arguments_of(layer, inputs, keywords)
    for name in ("src_key_padding_mask", "tgt_key_padding_mask"):
        if isinstance(given.get(name), Tensor):
            real = may_look(given[name], true_hides=True)
            return real.mT if real.dim() > 1 and not _batch_first(layer) else real
    mask = given.get("attention_mask")
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 2:
        return mask != 0
    if mask.dim() != 4:
        return None
    seen = may_look(mask[:, 0], true_hides=False)
    return seen[:, 0] if seen.size(1) == 1 else seen.diagonal(dim1=1, dim2=2)


def _batch_first(layer: nn.Module) -> bool:
    return next((part.batch_first for part in layer.modules() if isinstance(part, nn.MultiheadAttention)), True)
