"""The gradients of one update, for the task that makes them and for all who look at them or change them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor
from torch.nn.utils import get_total_norm


class Gradients:
    """Those of a whole update, before they are clipped.

    Args:
        parameters: which have them, or none.
        classifier: the one among them that makes the logits, which some methods leave alone.
    """

    def __init__(self, parameters: Sequence[Tensor], classifier: Tensor | None = None) -> None:
        self.parameters = parameters
        self.classifier = classifier

    @property
    def there(self) -> list[Tensor]:
        """All that are not none."""
        return [p.grad for p in self.parameters if p.grad is not None]

    @cached_property
    def norm(self) -> Tensor:
        """L2 norm of all together, a scalar; taken once, whoever asks."""
        return get_total_norm(self.there)
