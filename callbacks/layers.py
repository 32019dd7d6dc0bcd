"""Find the layers a pattern names, and read what they put out."""

from __future__ import annotations

import re
from typing import Any

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


def observe(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor | None]:
    """Return a layer's states `[..., width]` and which positions are real, bool `[...]` or None for all of them.

    A layer says so itself in `layer.observe(inputs, output)`; from any other the first tensor of the output is taken.
    """
    own = getattr(layer, "observe", None)
    return own(inputs, output) if callable(own) else (stream_of(output)[0], None)
