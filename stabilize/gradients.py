"""The gradients of one update, for the task that makes them and for all who look at them or change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from stabilize import stats


class Gradients:
    """Those of one update.

    Args:
        parameters: which have them, or none.
        classifier: the one among them that makes the logits, which some methods leave alone.
    """

    def __init__(self, parameters: Sequence[Tensor], classifier: Tensor | None = None) -> None:
        self.parameters = parameters
        self.classifier = classifier
        self._stand: list[tuple[int, int]] = []
        self._norms, self._norm = torch.zeros(0), torch.zeros(())

    @classmethod
    def of(cls, optimizer: Optimizer, classifier: Tensor | None = None) -> Self:
        """Of what an optimiser has in a row: to walk through the modules takes 5 ms at 12+12 layers."""
        return cls([p for group in optimizer.param_groups for p in group["params"]], classifier)

    @classmethod
    def at(cls, module: Any, optimizer: Optimizer) -> Self:
        """Of the update that is being made: the module's own, whose norms clipping asks for too, or the optimiser's."""
        own = getattr(module, "gradients", None)
        return own if isinstance(own, cls) else cls.of(optimizer)

    @property
    def there(self) -> list[Tensor]:
        """All that are not none."""
        return [p.grad for p in self.parameters if p.grad is not None]

    @property
    def here(self) -> list[Tensor]:
        """All that are not none, of each the shard that this process has: to be changed in place."""
        return [stats.local(gradient) for gradient in self.there]

    @property
    def norms(self) -> Tensor:
        """L2 norm of each that is there, `[there]`, in float64 where the device has it."""
        self._measure()
        return self._norms

    @property
    def norm_by_parameter(self) -> dict[Tensor, Tensor]:
        """L2 norm of each that is there, over all shards, where every rank has to ask."""
        having = [p for p in self.parameters if p.grad is not None]
        return dict(zip(having, stats.whole(self.norms).unbind(), strict=True))

    @property
    def norm(self) -> Tensor:
        """L2 norm of all together, a scalar, over all shards, where every rank has to ask."""
        self._measure()
        return self._norm

    def _measure(self) -> None:
        """Take the norms, once, whoever asks, until a gradient changes."""
        gradients = self.there
        stand = [(id(gradient), stats.local(gradient)._version) for gradient in gradients]
        if self._stand != stand:
            self._stand = stand
            self._norms = stats.norm_of_each(gradients) if gradients else torch.zeros(0)
            self._norm = stats.whole(torch.linalg.vector_norm(self._norms)).float()
