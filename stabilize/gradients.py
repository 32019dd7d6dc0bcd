"""The gradients of one update, for the task that makes them and for all who look at them or change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer


class Gradients:
    """Those of one update.

    Args:
        parameters: which have them, or none.
        classifier: the one among them that makes the logits, which some methods leave alone.
    """

    def __init__(self, parameters: Sequence[Tensor], classifier: Tensor | None = None) -> None:
        self.parameters = parameters
        self.classifier = classifier
        self._norm: tuple[list[tuple[int, int]], Tensor] | None = None

    @classmethod
    def of(cls, optimizer: Optimizer, classifier: Tensor | None = None) -> Self:
        """Of what an optimiser has in a row: to walk through the modules takes 5 ms at 12+12 layers."""
        return cls([p for group in optimizer.param_groups for p in group["params"]], classifier)

    @property
    def there(self) -> list[Tensor]:
        """All that are not none."""
        return [p.grad for p in self.parameters if p.grad is not None]

    @property
    def norm(self) -> Tensor:
        """L2 norm of all together, a scalar; taken once, whoever asks, until a gradient changes."""
        gradients = self.there
        stand = [(id(gradient), gradient._version) for gradient in gradients]
        if self._norm is None or self._norm[0] != stand:
            self._norm = stand, get_total_norm(gradients)
        return self._norm[1]
