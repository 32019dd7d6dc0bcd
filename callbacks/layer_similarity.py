"""How much each layer changes what it is given."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from stabilize import stats
from stabilize.callbacks.figures import publish, similarity_map, similarity_matrix
from stabilize.callbacks.forward_monitor import ForwardMonitor
from stabilize.callbacks.history import History
from stabilize.callbacks.layers import observe
from stabilize.errors import UserError

KINDS = ("layer_similarity", "layer_similarity_centered")


class LayerSimilarity(ForwardMonitor):
    """Log the cosine between the outputs of neighbouring layers: near one is a layer that changes next to nothing.

    | key                                               | what                                                         |
    |---------------------------------------------------|--------------------------------------------------------------|
    | `layer_similarity/{stack}/layer_001` ...          | mean cosine of the outputs of layers 001 and 002 over tokens |
    | `layer_similarity/{stack}/mean`                   | mean of these over all pairs of neighbours                   |
    | `layer_similarity_centered/{stack}/layer_001` ... | the same after taking out the mean over the tokens           |
    | `layer_similarity_centered/{stack}/mean`          | mean of these over all pairs of neighbours                   |

    The plain cosine is inflated by what all tokens share; the centred one is not. Both are taken in the training
    forward over real tokens only, where the layer says which are (`layer.observe(inputs, output)`) or the masks that it
    is called with do, else over all positions, of the first tensor that it returns. Above 24 layers a stack has at most
    25 `layer_` keys of a kind.

    One record an update: cosines are summed over the window's micro-batches and over ranks and divided once by the
    number of tokens. The mean that centring takes out is that of one micro-batch over all ranks; that of a whole window
    is not known before its states are gone, so that with accumulation the centred cosine is not quite that of
    one large batch. A layer that runs several times in a forward counts with its last run. States are held only until
    backward begins.

    Args:
        every: updates between two records; 0 switches the callback off.
        layers: stack name -> pattern over module names; none: the encoder and decoder of `TranslationTask`.
        figures: draw `layer_similarity_{stack}.png`, layer by update, and `similarity_matrix_{stack}.png`, every pair
            of layers at the last record; the centred ones too.

    Raises:
        UserError: if `every` is negative, or a pattern matches no module.
    """

    def __init__(self, every: int = 50, layers: dict[str, str] | None = None, figures: bool = True) -> None:
        super().__init__(every, layers, figures)
        self.matrices: dict[str, list[list[float]]] = {}
        self._observed: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}

    def look(self) -> None:
        self.watch(self._observe)

    def report(self, trainer: pl.Trainer, sums: Tensor) -> None:
        parts = sums.split([len(KINDS) * 2 * len(layers) ** 2 for layers in self.stacks.values()])
        metrics: dict[str, float] = {}
        for (stack, layers), part in zip(self.stacks.items(), parts, strict=True):
            matrices = stats.similarity_matrix(part.view(len(KINDS), 2, len(layers), len(layers)))
            for name, matrix in zip(KINDS, matrices, strict=True):
                metrics |= self._neighbours(trainer, name, stack, matrix)
        self.send(trainer, metrics)

    def unwatch(self) -> None:
        super().unwatch()
        self._observed = {}

    def picture(self, kind: str, history: History, title: str) -> Figure:
        return similarity_map(history, title)

    def draw(self, trainer: pl.Trainer) -> None:
        super().draw(trainer)
        for key, matrix in self.matrices.items():
            kind, stack = key.replace("layer_similarity", "similarity_matrix").split("/")
            title = f"{kind.replace('_', ' ')}, {stack}, update {self.history[key].latest}"
            publish(trainer, f"{kind}_{stack}", similarity_matrix(matrix, title))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"matrices": dict(self.matrices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.matrices = dict(state_dict["matrices"])

    def _observe(self, layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if layer.training:
            with torch.no_grad():
                states, real = observe(layer, inputs, keywords, output)
            self._observed[layer] = states.detach(), real

    def gather(self, trainer: pl.Trainer, device: torch.device) -> Tensor:
        """Return the sums of every stack and kind in one row, so that ranks need one reduction."""

        def over_ranks(total: Tensor) -> Tensor:
            return self.over_ranks(trainer, total)

        sums = []
        for stack, layers in self.stacks.items():
            seen = [self._observed[layer] for layer in layers if layer in self._observed]
            if not seen:
                self.warn_unseen(stack)
                size = len(KINDS) * 2 * len(layers) ** 2
                sums.append(torch.zeros(size, device=device, dtype=stats.wide_dtype(device)))
                continue
            (example, real), *_ = seen
            unseen = torch.zeros_like(example), None  # counts at no position
            states = [self._observed.get(layer, unseen)[0] for layer in layers]
            try:
                sums.append(stats.similarity_sums(states, real, over_ranks).flatten())
            except ValueError as error:
                raise UserError(f"layers.{stack}: {error}; name layers whose outputs have one shape") from error
        return torch.cat(sums)

    def _neighbours(self, trainer: pl.Trainer, name: str, stack: str, matrix: Tensor) -> dict[str, float]:
        row = matrix.diagonal(1).tolist()
        metrics = self.log_row(trainer, name, stack, row)
        if metrics:  # else there is no pair of layers with a number, so no picture of pairs either
            self.matrices[f"{name}/{stack}"] = matrix.tolist()
            metrics[f"{name}/{stack}/mean"] = fmean(value for value in row if math.isfinite(value))
        return metrics
