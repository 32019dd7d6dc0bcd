"""A run whose weights are sharded over two processes (FSDP2), or the same in one: python -m tests.callbacks.sharded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from stabilize.callbacks import GradientRatio, SpikeGuard, UpdateRatio
from tests.callbacks.test_distributed import Halves, Report
from tests.callbacks.tiny import batches, loader, trainer


class Shards(Halves):
    sharded = False

    def configure_model(self) -> None:
        if self.trainer.world_size > 1 and not self.sharded:
            self.sharded = True
            mesh = self.device_mesh["data_parallel"]
            for part in [*self.model.encoder.layers, *self.model.decoder.layers, self.model]:
                fully_shard(part, mesh=mesh)


if __name__ == "__main__":
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(1)
    monitors: list[Any] = [
        GradientRatio(every=2, activations=True),
        UpdateRatio(every=2),
        SpikeGuard(every=2),
        Report(),
    ]
    options: dict[str, Any] = {}
    if ranks > 1:
        strategy = ModelParallelStrategy(ranks, 1, process_group_backend="gloo")
        options = {"devices": ranks, "strategy": strategy, "use_distributed_sampler": False}
    trainer(folder, *monitors, max_steps=2, **options).fit(Shards(), loader(batches(2, size=6)))
