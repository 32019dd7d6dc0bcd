"""`stabilize fit | validate | test | predict | explain`: LightningCLI with a folder for each run."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import jsonargparse._typehints
import lightning.pytorch as lightning
import torch
import wandb
from jsonargparse import ArgumentError
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from rich.console import Console

from stabilize import plugins
from stabilize.callbacks import GradientRatio, LayerSimilarity, ProgressLines
from stabilize.commands.card import card
from stabilize.commands.mistakes import mistake
from stabilize.commands.results import results
from stabilize.data import ParallelText, SyntheticCorpus, Tokenizer, TranslationData
from stabilize.errors import UserError
from stabilize.task import TranslationTask

RUN_FOLDER = "STABILIZE_RUN_FOLDER"
"""Environment variable by which the process that starts a run names its folder to the other ranks."""

STRICT = {"exit_on_error": False, "allow_abbrev": False}
"""For every parser: an error is raised, and a flag is written out."""


def keep_no_arguments_of_another_class(parser: Any, previous: Any, chosen: Any) -> None:
    """Choosing another class on an axis forgets all arguments of the previous one.

    jsonargparse keeps those whose names the new class has too, be they mere defaults: after `FixedEpsilon(1e-3)`
    another class with a `value` would go on with 1e-3. For a tool that compares strategies that is a trap.
    """
    if previous and "init_args" in previous and previous["class_path"] != chosen["class_path"]:
        previous["init_args"] = type(previous["init_args"])()


class Trainer(lightning.Trainer):
    """Lightning's trainer, with a verb more."""

    def explain(self, model: TranslationTask, datamodule: LightningDataModule | None = None) -> None:
        """Print what a config's stabiliser is and does, without training."""
        vocabulary = getattr(datamodule, "vocabulary", 1)
        parts = (model.sizes, model.stabilizer, model.decoder_stabilizer)
        Console().print(card(*parts, str(self.precision), vocabulary))


class RunConfig(SaveConfigCallback):
    """Writes the resolved config into the run's folder and into the config of the Weights & Biases run."""

    def save_config(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, folder / "config.yaml", skip_none=False, overwrite=False)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_hyperparams({**pl_module.spec(), "signatures": pl_module.evaluation.signatures})


class Command(LightningCLI):
    """The command line of every verb that takes a config."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__(
            TranslationTask,
            TranslationData,
            subclass_mode_data=True,
            trainer_class=Trainer,
            trainer_defaults={"use_distributed_sampler": False, "enable_model_summary": False},
            seed_everything_default=1,
            save_config_callback=RunConfig,
            save_config_kwargs={"save_to_log_dir": False},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs=STRICT | dict.fromkeys(self.subcommands(), STRICT),
            args=arguments,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            verb, *options = args
            raise mistake(self._subcommand_parsers[verb], options, error) from error

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "explain": {"model", "datamodule"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults({"data": {"class_path": "SyntheticCorpus"}})
        parser.add_argument(
            "--test_after_fit", type=bool, default=False, help="test the final weights when fit is done."
        )
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.save_last": True, "checkpoint.filename": "update_{step}"})
        parser.set_defaults({"checkpoint.auto_insert_metric_name": False})
        parser.set_defaults({"checkpoint.monitor": "val/nll"})
        parser.add_lightning_class_args(GradientRatio, "gradient_ratio")
        parser.add_lightning_class_args(LayerSimilarity, "layer_similarity")

    def instantiate_trainer(self, **kwargs: Any) -> lightning.Trainer:
        if self.subcommand == "explain":
            self.save_config_callback = None
            return super().instantiate_trainer(logger=False)
        given = self._get(self.config_init, "trainer")
        folder = run_folder(Path(given.get("default_root_dir") or "runs"))
        kwargs |= {"default_root_dir": str(folder)}
        if given.get("logger") in (None, True):
            kwargs["logger"] = [CSVLogger(folder, name="", version=""), weights_and_biases(folder)]
        if given.get("enable_progress_bar") is None and not sys.stdout.isatty():
            kwargs["enable_progress_bar"] = False
        trainer = super().instantiate_trainer(**kwargs)
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(folder / "checkpoints")
        return trainer

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> lightning.Trainer:
        bar = RichProgressBar() if config.get("enable_progress_bar") is not False else ProgressLines()
        return super()._instantiate_trainer(config, [*callbacks, bar])

    def after_instantiate_classes(self) -> None:
        path = self._get(self.config_init, "ckpt_path")
        if path is not None and Path(path).is_file():
            saved = torch.load(path, map_location="cpu", weights_only=True)
            self.datamodule.given_tokenizer = Tokenizer(saved["tokenizer"])

    def before_fit(self) -> None:
        if self.trainer.is_global_zero:
            self.trainer.explain(self.model, self.datamodule)

    def after_fit(self) -> None:
        fitted = dict(self.trainer.callback_metrics)
        if self._get(self.config_init, "test_after_fit") and not self.trainer.interrupted:
            self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)
        self._report(fitted)

    def after_validate(self) -> None:
        self._report({})

    def after_test(self) -> None:
        self._report({})

    def after_predict(self) -> None:
        self._report({})

    def _report(self, before: dict[str, Any]) -> None:
        if self.trainer.is_global_zero:
            Console().print(results(self.trainer, before | dict(self.trainer.callback_metrics)))


def run_folder(root: Path) -> Path:
    """A new folder below `root`, named by the time; other ranks of the run find it in the environment."""
    if "LOCAL_RANK" in os.environ and RUN_FOLDER in os.environ:
        return Path(os.environ[RUN_FOLDER])
    folder = root / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"the run folder {folder} cannot be made: {error.strerror}; give --trainer.default_root_dir another place"
        ) from error
    os.environ[RUN_FOLDER] = str(folder)
    return folder


def weights_and_biases(folder: Path) -> Logger:
    """A run in `folder`/wandb: online for who is logged in or asks by WANDB_MODE, else offline; never a question."""
    known = "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False)
    mode = os.environ.get("WANDB_MODE", "online") if known else "offline"
    logger = WandbLogger(
        save_dir=folder,
        id=folder.name,
        name=folder.name,
        project=os.environ.get("WANDB_PROJECT", "stabilize"),
        offline=mode == "offline",
        mode=mode,
        settings=wandb.Settings(silent=mode == "offline", console="off"),
    )
    logger._wandb_init.pop("anonymous")  # no longer known to wandb, which warns of it
    return logger


def run(arguments: list[str]) -> int:
    """Carry out a verb of LightningCLI."""
    assert hasattr(jsonargparse._typehints, "discard_init_args_on_class_path_change")
    jsonargparse._typehints.discard_init_args_on_class_path_change = keep_no_arguments_of_another_class
    for group in plugins.GROUPS:
        plugins.load(group)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    try:
        Command(arguments)
    finally:
        if wandb.run is not None:
            wandb.finish()
    return 0


__all__ = ["ParallelText", "SyntheticCorpus", "run"]
