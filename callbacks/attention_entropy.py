"""How evenly attention looks, and how large its logits are."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from stabilize import stats
from stabilize.callbacks.attention_logits import logits_of, shows_logits
from stabilize.callbacks.figures import scale_map, share_map
from stabilize.callbacks.history import History
from stabilize.callbacks.layers import roles_of
from stabilize.callbacks.place_monitor import PlaceMonitor


class AttentionEntropy(PlaceMonitor):
    """Log how evenly attention looks: one is at everything alike, zero at one token; a sharp fall is its collapse.

    | key                                             | what                                                           |
    |-------------------------------------------------|----------------------------------------------------------------|
    | `attention_entropy/{stack}/layer_001` ...       | entropy of self-attention over the largest that is possible,   |
    |                                                 | the logarithm of the tokens that a query may look at           |
    | `attention_logit/{stack}/layer_001` ...         | size of its largest logit; weights are one-hot from tens on    |
    | `cross_attention_entropy/{stack}/layer_001` ... | the same of cross-attention                                    |
    | `cross_attention_logit/{stack}/layer_001` ...   | the same of cross-attention                                    |

    Means over heads and real queries of the update, largest logits over all of it. Logits are those that the softmax
    gets, whatever the stabiliser has made of them, computed once more at the updates that are recorded; compiled layers
    run uncompiled then. An attention module says what they are in `observe_logits(inputs)`; those of torch's
    `nn.MultiheadAttention` and of Hugging Face's that have `q_proj` and `k_proj` and nothing between (BART, Marian,
    Whisper and their like) are known too. Of layers with any other nothing is, which is said when `fit` starts. Above
    24 layers a stack has at most 25 keys of a kind; the pictures show all layers.

    Args:
        every: updates between two records; 0 switches the callback off.
        layers: stack name -> pattern over module names; none: the encoder and decoder of `TranslationTask`.
        figures: draw one picture of each kind and stack, layer by update.

    Raises:
        UserError: if `every` is negative, or a pattern matches no module.
    """

    absent = "have no attention whose logits it knows (one with observe_logits, torch's, or one built like BART's)"
    numbers = 5
    inside = True

    def __init__(self, every: int = 0, layers: dict[str, str] | None = None, figures: bool = True) -> None:
        super().__init__(every, layers, figures)

    def find_places(self, layer: nn.Module) -> list[nn.Module]:
        return [part for part in layer.modules() if shows_logits(part)]

    def see(self, place: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        logits, mask = logits_of(place, inputs, keywords, self.real)  # too large to be kept
        largest = stats.largest_logit(logits, mask).nan_to_num(nan=0.0, posinf=math.inf)
        return torch.cat([stats.attention_sums(logits, mask), largest[None]])

    def measure(self, seen: Any) -> Tensor:
        return seen

    def add(self, total: Tensor, new: Tensor) -> Tensor:
        return torch.cat([total[:, :4] + new[:, :4], torch.maximum(total[:, 4:], new[:, 4:])], dim=1)

    def over_ranks(self, trainer: pl.Trainer, total: Tensor) -> Tensor:
        sums = trainer.strategy.reduce(total[:, :4].contiguous(), reduce_op="sum")
        largest = trainer.strategy.reduce(total[:, 4:].contiguous(), reduce_op="max")
        return torch.cat([sums, largest], dim=1)

    def report_places(self, trainer: pl.Trainer, sums: dict[nn.Module, Tensor]) -> None:
        metrics: dict[str, float] = {}
        for stack, layers in self.stacks.items():
            crossing = {
                part for layer in layers for part in roles_of(layer).get("cross_attention", nn.ModuleList()).modules()
            }
            for role in ("attention", "cross_attention"):
                entropies, logits = [math.nan] * len(layers), [math.nan] * len(layers)
                for place, (its_stack, number) in self.places.items():
                    if (its_stack, "cross_attention" if place in crossing else "attention") == (stack, role):
                        _, rows, share, rows_of_two, largest = sums[place].tolist()
                        entropies[number] = share / rows_of_two if rows_of_two else math.nan
                        logits[number] = largest if rows and math.isfinite(share) else math.nan
                metrics |= self.log_row(trainer, f"{role}_entropy", stack, entropies)
                metrics |= self.log_row(trainer, f"{role}_logit", stack, logits)
        self.send(trainer, metrics)

    def picture(self, kind: str, history: History, title: str) -> Figure:
        return share_map(history, title) if kind.endswith("entropy") else scale_map(history, title)
