"""A run whose weights are sharded over two processes (FSDP2): python -m tests.callbacks.sharded FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.callbacks.monitors import MONITORS, Report, Shares, batch, watched_task
from tests.tasks import fit, small_trainer


class Shards(Shares):
    sharded = False

    def configure_model(self) -> None:
        super().configure_model()
        if self._trainer is not None and not self.sharded:
            self.sharded = True
            mesh = self.device_mesh["data_parallel"]
            for part in [*self.model.layers, self.model]:
                fully_shard(part, mesh=mesh)
            assert all(isinstance(parameter, DTensor) for parameter in self.model.parameters())


if __name__ == "__main__":
    strategy = ModelParallelStrategy(2, 1, process_group_backend="gloo")
    monitors = [*(make() for make in MONITORS.values()), Report()]
    trainer = small_trainer(Path(sys.argv[1]), *monitors, max_steps=1, devices=2, strategy=strategy)
    fit(trainer, watched_task(kind=Shards), [batch()])
