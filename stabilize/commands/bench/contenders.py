"""The configs that a benchmark compares, and the parts of a run made of each."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jsonargparse import Namespace
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint

from stabilize.commands.narrator import Narrator
from stabilize.commands.overlays import OverlayCommand, gathered, paths_of
from stabilize.commands.training import Trainer, run, table, wandb_logger
from stabilize.data import TranslationData
from stabilize.errors import UserError
from stabilize.task import TranslationTask

LISTS = ("--against", "--depths")
"""Options that take every word up to the next option."""


class BenchTrainer(Trainer):
    """Lightning's trainer, for one verb more that measures."""

    command: BenchCommand

    def check_device(self) -> None:
        """Refuse what the clocks of this process do not see.

        Raises:
            UserError: the config asks for other than one process on a CPU.
        """
        if self.world_size > 1 or not isinstance(self.accelerator, CPUAccelerator):
            raise UserError("bench counts the CPU time of one process; --trainer.accelerator cpu --trainer.devices 1")


class BenchCommand(OverlayCommand):
    """The command line of a topic of `stabilize bench`."""

    def before_bench(self) -> None:
        self.trainer.command = self
        self.threads = torch.get_num_threads()

    def contenders(self, data: TranslationData, against: Sequence[str] | None) -> list[Contender]:
        """That of the config by itself, which has read its text into `data`, and those with another laid over it.

        Raises:
            UserError: a config that is not there, or with a mistake in it.
        """
        paths = {} if against is None else paths_of(against, "against")
        if self.name in paths:
            raise UserError(f"against has {self.name} itself; a config of another name would do")
        configs = {name: self.with_overlay(path) for name, path in paths.items()}
        own = Contender(self.name, self.config[self.verb], self, data)
        return [own] + [
            Contender(name, config, self, data if config.data == own.config.data else None)
            for name, config in configs.items()
        ]

    def make(self, config: Namespace) -> tuple[TranslationTask, TranslationData, BenchTrainer]:
        """Task, data and trainer of a config, with the same random numbers each time.

        Raises:
            UserError: its parts cannot be combined.
        """
        torch.set_num_threads(self.threads)  # whatever the last config has set
        self.config = Namespace({"subcommand": self.verb, self.verb: config})
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.trainer.command = self
        return self.model, self.datamodule, self.trainer


@dataclass
class Contender:
    """A config that is compared.

    Args:
        name: in tables.
        config: parsed.
        command: which makes of it what is measured.
        data: with the text in it; none: it is read when first asked for.
    """

    name: str
    config: Namespace
    command: BenchCommand
    data: TranslationData | None = None

    def run_in(self, folder: Path) -> tuple[TranslationTask, TranslationData, BenchTrainer]:
        """A task with new weights, not built yet, and a trainer with all that watches and records a `fit`.

        What a run writes goes into `folder`, what it prints nowhere.
        """
        config = self.config.clone()
        config.trainer.default_root_dir = str(folder)
        with contextlib.redirect_stdout(io.StringIO()):  # no terminal, so there is no bar, but lines
            task, data, trainer = self.command.make(config)
        if self.data is None:
            data.setup(None)
            self.data = data
        task.tokenizer = self.data.tokenizer
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint):
                callback.dirpath = str(folder / "checkpoints")
        trainer.loggers = [table(folder), wandb_logger(folder, "offline"), Narrator(folder)]
        return task, self.data, trainer

    def built(self) -> tuple[TranslationTask, TranslationData, BenchTrainer]:
        """A task with its new weights, as the trainer's precision has them; the folder of a run is gone."""
        with tempfile.TemporaryDirectory() as folder:
            task, data, trainer = self.run_in(Path(folder))
        task.trainer = trainer
        with trainer.precision_plugin.module_init_context():
            task.configure_model()
        return trainer.precision_plugin.convert_module(task), data, trainer


def carry_out(trainer: type[BenchTrainer], words: Sequence[str]) -> int:
    """Carry out the topic of `stabilize bench` that a trainer measures."""
    command = type("TopicCommand", (BenchCommand,), {"trainer_with_verb": trainer})
    return run(["bench", *gathered(words, LISTS)], command)
