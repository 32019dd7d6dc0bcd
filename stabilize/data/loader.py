"""One split, batch by batch, with a place that can be saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from stabilize.data.batch import Batch
from stabilize.data.pairs import TokenizedPairs
from stabilize.data.sampler import TokenBatches


class BatchLoader:
    """The batches of an epoch, from the saved place on.

    It holds torch's DataLoader instead of being one: Lightning rebuilds DataLoaders around samplers of its own
    (processes, prediction), but takes any other iterable as it is. It calls `sampler.set_epoch` at the start of an
    epoch, and keeps `state_dict` in checkpoints. The place counts batches handed out, not those that workers have
    prepared ahead.

    Args:
        pairs: the split.
        sampler: which rows make a batch.
        workers: processes that prepare batches; 0 prepares them in this one.
    """

    def __init__(self, pairs: TokenizedPairs, sampler: TokenBatches, *, workers: int = 0) -> None:
        self.sampler = sampler
        self._pairs = pairs
        self.batch_sampler = None  # Lightning looks whether there is one
        self._resumed = False
        self.starts_over = False
        """Whether a saved place in the middle of an epoch was of no use."""
        self._loader: DataLoader[Batch] = DataLoader(
            pairs,
            batch_size=None,  # the sampler gives whole batches
            sampler=sampler,
            num_workers=workers,
            collate_fn=_unchanged,
            generator=torch.Generator(),  # else each pass draws from the global one, and a resumed run drops out others
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        # A generator, so nothing happens before the first batch: Lightning asks for the iterator before it says
        # which epoch this is. A pass that was left early starts again, unless a saved place was loaded.
        if not self._resumed:
            self.sampler.position = 0
        self._resumed = False
        self._pairs.epoch = self.sampler.epoch  # before workers get their copy
        for batch in self._loader:
            self.sampler.position += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The sampler's place."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next pass at a saved place."""
        self.sampler.load_state_dict(state)
        self.starts_over = state["position"] > 0 and self.sampler.position == 0
        self._resumed = True


def _unchanged(batch: Any) -> Any:
    """What torch shall make of a batch: its default turns tuples of text into lists."""
    return batch
