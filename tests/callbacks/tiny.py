"""The smallest task with an encoder and a decoder, its data, and a trainer that writes metrics.csv."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

WIDTH = 4


class Block(nn.Module):
    """x + tanh(W x), which says which positions are real."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))

    def observe(self, inputs: tuple[Any, ...], output: Tensor) -> tuple[Tensor, Tensor]:
        return output, inputs[1]


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, real)
        return x


class TinyTask(pl.LightningModule):
    """The loss is summed over real positions, so that micro-batches add up to the batch."""

    def __init__(self, encoder_layers: int = 3, decoder_layers: int = 2, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.encoder = Stack(encoder_layers)
        self.model.decoder = Stack(decoder_layers)
        self.learning_rate = learning_rate

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, real = batch
        output = self.model.decoder(self.model.encoder(x, real), real)
        return (output.square().sum(-1) * real).sum()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def batches(count: int, size: int = 2, length: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Return seeded batches `([size, length, WIDTH], [size, length])`, the last position of each first row padding."""
    generator = torch.Generator().manual_seed(3)
    real = torch.ones(size, length, dtype=torch.bool)
    real[0, -1] = False
    return [(torch.randn(size, length, WIDTH, generator=generator), real) for _ in range(count)]


def loader(data: list[Any]) -> DataLoader:
    return DataLoader(data, batch_size=None)


def trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """Return a quiet CPU trainer that logs to `folder/metrics.csv`."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": folder,
        "logger": CSVLogger(folder, name="", version=""),
        "callbacks": list(callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(**settings | options)


def records(folder: Path, prefix: str) -> list[dict[str, float]]:
    """Return the rows of metrics.csv that have keys starting with `prefix`, those keys and `step` alone."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    kept = [
        {key: value for key, value in row.items() if key.startswith(prefix)} | {"step": row["step"]} for row in rows
    ]
    return [row for row in kept if len(row) > 1]


def hooks(module: nn.Module) -> int:
    """Return the number of hooks on a module and all modules inside it."""
    return sum(
        len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks) for part in module.modules()
    )
