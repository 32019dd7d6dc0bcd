"""Weights, gradients and the optimiser's moments shared out over processes: FSDP2, through Lightning's strategy.

What is written to the disk is what one process writes, so that a run goes on with any number of them, sharded or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor, nn
from torch.distributed import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from stabilize import stats
from stabilize.errors import UserError
from stabilize.model import EncoderDecoder

BYTES_AT_ONCE = 2**25
"""Of buffers that are handed on together."""


class FullySharded(ModelParallelStrategy):
    """Each process has its share of every weight, gradient and moment, and gathers a layer's weights when it runs.

    A checkpoint is one file with whole weights, the same as without shards.

    Args:
        process_group_backend: of torch.distributed; none: nccl on GPUs, gloo on a CPU.
        timeout: how long a process waits for the others.
    """

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__("auto", 1, False, process_group_backend, timeout)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole weights, in the first process; nothing in the others, which help to gather them."""
        assert self.lightning_module is not None
        return self._on_the_first(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole moments, likewise."""
        return self._on_the_first(optimizer.state_dict())

    def _on_the_first(self, state: dict[str, Any]) -> dict[str, Any]:
        def gather(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = stats.whole(value.detach())
            return value.cpu() if self.is_global_zero else None

        gathered = tree_map(gather, state)
        return gathered if self.is_global_zero else {}

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        mine = self.lightning_module.state_dict()
        saved = {name: share(value, mine.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(saved, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            by_number = dict(zip(numbers, weights, strict=True))
            state = {
                number: {name: share(value, by_number[number]) for name, value in moments.items()}
                for number, moments in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


def share(value: Any, like: Any) -> Any:
    """This process's shard of a whole tensor, shared out as another of its shape is; anything else as it is."""
    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def share_out(model: EncoderDecoder, strategy: Strategy) -> None:
    """`shard` a model where the strategy asks for it and it has not been done.

    Raises:
        UserError: by Lightning's own strategy, or there are weights that cannot be shared out.
    """
    if isinstance(model, FSDPModule) or not isinstance(strategy, ModelParallelStrategy):
        return
    if not isinstance(strategy, FullySharded):
        raise UserError(
            f"trainer.strategy is {type(strategy).__name__}, whose checkpoints are no files; "
            "stabilize.sharding.FullySharded would do"
        )
    shard(model, strategy.device_mesh["data_parallel"])


def shard(model: EncoderDecoder, mesh: DeviceMesh) -> None:
    """Share the weights of each layer out over the processes of a mesh of one dimension, and those outside of layers.

    Buffers are those of the first process in each forward in training, and from `gather` on, as with DDP.

    Raises:
        UserError: there are weights that cannot be shared out.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise _refusal(f"{name} is a number without dimension", "one of one element, or ")
    for layer in model.layers:
        if {*layer.link.parameters()} - {*layer.branches.parameters()}:
            raise _refusal(f"{layer.link.label} has weights between layers", "")
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.register_forward_pre_hook(lambda module, _: _take_buffers(module) if module.training else None)


def _take_buffers(module: nn.Module) -> None:
    """Let all processes have the first one's buffers."""
    world = torch.distributed.group.WORLD
    assert world is not None
    if buffers := [buffer.detach() for buffer in module.buffers()]:
        torch.distributed._broadcast_coalesced(world, buffers, BYTES_AT_ONCE, 0)


def _refusal(what: str, would_do: str) -> UserError:
    return UserError(
        f"{what}, which trainer.strategy FullySharded cannot share out; {would_do}trainer.strategy ddp would do"
    )


def gather(module: nn.Module) -> None:
    """Let every process have all weights until `let_go`: a search ends in one of them sooner than in another.

    Does nothing, as `let_go`, to a module that is not sharded.
    """
    with torch.inference_mode(False), torch.no_grad():  # else training would get tensors that know no gradient
        for part in _sharded(module):
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
            if isinstance(part, EncoderDecoder):
                _take_buffers(part)


def let_go(module: nn.Module) -> None:
    """Let every process have its share of the weights again."""
    for part in _sharded(module):
        part.set_reshard_after_forward(not isinstance(part, EncoderDecoder), recurse=False)
        part.reshard()


def _sharded(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
