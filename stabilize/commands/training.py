"""`stabilize fit | validate | test | predict | prepare | explain`: LightningCLI with a folder for each run."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any, ClassVar

import jsonargparse._typehints
import lightning.pytorch as lightning
import torch
import wandb
from jsonargparse import Namespace, set_loader
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.callbacks import ProgressBar as BasicProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.strategies.launchers import subprocess_script as launching
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from stabilize import averaging, checkpoint, kernels, plugins, slurm
from stabilize.callbacks import (
    ActivationScale,
    AttentionEntropy,
    Checkpoints,
    EpsilonAudit,
    GradientRatio,
    Interruption,
    LayerSimilarity,
    ProgressBar,
    ProgressLines,
    SpikeGuard,
    UpdateRatio,
)
from stabilize.card import OPTIMIZER, beside
from stabilize.commands import continuing, ranks, strict_yaml
from stabilize.commands.card import card
from stabilize.commands.mistakes import (
    CONFIG,
    cause_in,
    check,
    check_numbers,
    class_being_made,
    class_named,
    made,
    one_line,
    options,
)
from stabilize.commands.narrator import Narrator
from stabilize.commands.results import results
from stabilize.data import ParallelText, SyntheticCorpus, Tokenizer, TranslationData
from stabilize.errors import FULL, TrainingStoppedError, UserError, at_least
from stabilize.task import TranslationTask

RUN_FOLDER = "STABILIZE_RUN_FOLDER"
"""Environment variable by which the process that starts a run names its folder to the other ranks."""

WANDB_MODES = {
    "online": "online",
    "run": "online",
    "shared": "shared",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
"""What the environment variable WANDB_MODE can say, and what it means; W&B itself writes `dryrun` there."""

NOISE = (
    r"Experiment logs directory .* exists and is not empty",  # its own run folder, which other parts fill too
    r".*does not have many workers",  # batches are made faster than a model reads them
    r"The number of training batches .* is smaller than the logging interval",
    r"`ModelCheckpoint\(monitor=.*\)` could not find the monitored key",  # no validation yet; the last weights are kept
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # between Lightning and torch
)
"""Warnings of libraries that tell a user nothing; silenced here and nowhere else."""

THREADS = 1024
"""The most of a process: more cores than a machine has."""

BEGUN = {"config.yaml", "data.json", "tokenizer.model", "wandb"}
"""What a run has in its folder before it does anything."""

RESTORING = "lightning.pytorch.trainer.connectors.checkpoint_connector"
"""The module in which a checkpoint becomes the state of a run."""

LOOKING = ("prepare", "explain", "probe", "bench")
"""Verbs that carry out no run: they need no weights and leave no run folder."""

STRICT = {"exit_on_error": False, "allow_abbrev": False}
"""For every parser: an error is raised, and a flag is written out."""

MONITORS = {
    "spike_guard": SpikeGuard,
    "gradient_ratio": GradientRatio,
    "layer_similarity": LayerSimilarity,
    "activation_scale": ActivationScale,
    "update_ratio": UpdateRatio,
    "epsilon_audit": EpsilonAudit,
    "attention_entropy": AttentionEntropy,
}
"""The callbacks of every run, by their group of keys; the guard is first, whose last numbers belong to the last update,
while the pictures that the others draw at the end come after it."""


def keep_no_arguments_of_another_class(parser: Any, previous: Any, chosen: Any) -> None:
    """Choosing another class on an axis forgets all arguments of the previous one.

    jsonargparse keeps those whose names the new class has too, be they mere defaults: after `FixedEpsilon(1e-3)`
    another class with a `value` would go on with 1e-3. For a tool that compares strategies that is a trap.
    """
    if previous and "init_args" in previous and previous["class_path"] != chosen["class_path"]:
        previous["init_args"] = type(previous["init_args"])()


class Trainer(lightning.Trainer):
    """Lightning's trainer, with two verbs more."""

    def prepare(
        self,
        model: TranslationTask,
        datamodule: TranslationData,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Clean and tokenise the text of a config, as fit does where it has not been done.

        Args:
            ckpt_path: a checkpoint whose tokenizer is used.
            weights_only: here so that a config of `fit` does; nothing else is ever read.
        """
        datamodule.setup("fit")
        print(f"kept in {datamodule.place}")

    def explain(
        self,
        model: TranslationTask,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Print what a config's stabiliser is and does, without training.

        Args:
            ckpt_path: a checkpoint that the config must fit.
            weights_only: here so that a config of `fit` does; nothing else is ever read.
        """
        vocabulary = getattr(datamodule, "vocabulary", 1)
        parts = (model.sizes, model.stabilizer, model.decoder_stabilizer)
        optimizer = checkpoint.settings(model.make_optimizer([nn.Parameter(torch.zeros(()))]))
        others = beside(model.clipping, model.z_loss, optimizer)
        Console().print(card(*parts, str(self.precision), vocabulary, others))


class RunConfig(SaveConfigCallback):
    """Writes the resolved config into the run's folder and into the config of the Weights & Biases run.

    All but the checkpoint that the run took its state from, which is in its summary: whoever gives the config again
    means this run, not the one before it.
    """

    def save_config(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config.clone()
        for key in ("weights_only", "verbose", "return_predictions"):  # some verbs have them, others would refuse them
            if key in config and config[key] == self.parser.get_default(key):
                del config[key]
        taken, config["ckpt_path"] = config["ckpt_path"], None
        self.parser.save(config, folder / "config.yaml", skip_unset=False, skip_validation=True, overwrite=False)
        data = trainer.datamodule
        validation = pl_module.evaluations["val"].signatures(data.references.get("validation"))
        test = pl_module.evaluations["test"].signatures(data.references.get("test"))
        lines = {f"{split}_lines": total for split, total in data.totals.items()}
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_hyperparams({**pl_module.spec(), "signatures": validation, "test_signatures": test, **lines})
            if isinstance(logger, Narrator):
                logger.know(trainer.loggers, validation.get("bleu"), getattr(data, "word_entropy", None), taken)


class Command(LightningCLI):
    """The command line of every verb that takes a config."""

    trainer_with_verb: ClassVar[type[lightning.Trainer]] = Trainer
    """Its methods are the verbs."""

    def __init__(self, arguments: list[str]) -> None:
        self.verb, self.words = arguments[0], arguments
        self.goes_on_as: str | None = None
        """The name of the run whose state this one goes on from."""
        super().__init__(
            TranslationTask,
            TranslationData,
            subclass_mode_data=True,
            trainer_class=self.trainer_with_verb,
            trainer_defaults={"use_distributed_sampler": False, "enable_model_summary": False},
            seed_everything_default=1,
            save_config_callback=RunConfig,
            save_config_kwargs={"save_to_log_dir": False},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={**STRICT, self.verb: STRICT},
            args=arguments,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        for option, name in options(args[1:]):
            if option.endswith(".help") and name and not name.startswith("-"):
                key = option[2:].removesuffix(".help")
                chosen = class_named(self._subcommand_parsers[self.verb], key, name)
                print(f"{inspect.getdoc(chosen)}\n\n" if chosen else "", end="")
        self.config = self.parsed(args)

    def parsed(self, words: list[str]) -> Namespace:
        """What a command line says, one of this verb.

        Raises:
            UserError: a mistake in it, or in a file that it names.
        """
        if not any(word in ("-h", "--help") or word.partition("=")[0].endswith(".help") for word in words):
            check(self._subcommand_parsers[self.verb], words[1:])
        try:
            config = self.parser.parse_args(words)
        except Exception as error:  # whatever parsing stumbles over is in the words, or in a file that they name
            check(self._subcommand_parsers[self.verb], words[1:])
            raise UserError(one_line(error)) from error
        check_numbers(config[self.verb].as_dict())
        return config

    def task_of(self, config: Namespace) -> TranslationTask:
        """The task that a parsed config of this verb describes.

        Raises:
            UserError: its parts cannot be combined.
        """
        with in_the_users_words():
            return self._subcommand_parsers[self.verb].instantiate_classes(config)["model"]

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The verb that was given alone: to build the parsers of all takes most of a second."""
        verbs = {**LightningCLI.subcommands(), **{verb: {"model", "datamodule"} for verb in LOOKING}}
        return {self.verb: verbs[self.verb]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults({"data": {"class_path": "SyntheticCorpus"}})
        parser.set_defaults({"model.optimizer": OPTIMIZER})
        parser.add_argument(
            "--test_after_fit", type=bool, default=False, help="test the final weights when fit is done."
        )
        parser.add_class_arguments(averaging.Which, "test_average")
        parser.add_argument(
            "--threads",
            type=int | None,
            default=None,
            help="of this process on the CPU; null: as OMP_NUM_THREADS or the number of cores has it. Sums are another "
            "in their last bits with another number.",
        )
        parser.add_argument(
            "--weights",
            type=str | None,
            default=None,
            help="fine-tune: start a new run from the weights of this checkpoint, with everything else, such as "
            "counters, optimizer, schedule and order of the data, at its beginning. Where ckpt_path goes on from a "
            "state, that state counts.",
        )
        parser.add_lightning_class_args(Checkpoints, "checkpoint")
        parser.set_defaults({"checkpoint.filename": "update_{step}"})
        parser.set_defaults({"checkpoint.auto_insert_metric_name": False})
        parser.set_defaults({"checkpoint.monitor": "val/nll"})
        for key, monitor in MONITORS.items():
            parser.add_lightning_class_args(monitor, key)

    def before_instantiate_classes(self) -> None:
        threads = self._get(self.config, "threads")
        if threads is not None:
            if not 1 <= threads <= THREADS:
                raise UserError(f"threads is {threads}; from 1 to {THREADS:,} would do")
            torch.set_num_threads(threads)

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            raise UserError(f"seed_everything is {self._get(self.config, 'seed_everything')}: {error}") from error

    def instantiate_classes(self) -> None:
        with in_the_users_words():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> lightning.Trainer:
        at_least("trainer", accumulate_grad_batches=(self._get(self.config, "trainer")["accumulate_grad_batches"], 1))
        self._check_checkpoint()
        if self.subcommand in LOOKING:
            self.save_config_callback = None
            return super().instantiate_trainer(logger=False)
        given = self._get(self.config_init, "trainer")
        folder = run_folder(self._runs)
        kwargs |= {"default_root_dir": str(folder)}
        name = self.goes_on_as or os.environ.get("WANDB_RUN_ID") or folder.name
        if given.get("logger") in (None, True) and not given.get("barebones"):
            kwargs["logger"] = [table(folder), weights_and_biases(folder, name)]
        trainer = super().instantiate_trainer(**kwargs)
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint):
                if callback.dirpath is None:
                    callback.dirpath = str(folder / "checkpoints")
                else:
                    make_folder(Path(callback.dirpath), "checkpoint.dirpath")
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = checkpoint.DurableFiles()
        if trainer.loggers:
            trainer.loggers = [*trainer.loggers, Narrator(folder, self.subcommand == "fit")]
        if not given.get("barebones"):
            self.continuity = continuing.Continuity(name, self.words, self._settings)
            trainer.callbacks.insert(0, self.continuity)
        return trainer

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> lightning.Trainer:
        given = config.get("callbacks") or []
        given = given if isinstance(given, list) else [given]
        ours = {type(callback) for callback in callbacks} - {ModelCheckpoint}
        twice = [type(callback).__name__ for callback in given if type(callback) in ours]
        if twice:
            raise UserError(
                f"trainer.callbacks has a {twice[0]}, but every run has one; its settings are a group of keys"
            )
        if config.get("enable_checkpointing") is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, ModelCheckpoint)]
        # After all that look at an update, whose state is saved too; before those that print, which may fail.
        callbacks = [*callbacks, Interruption()]
        own_bar = any(isinstance(callback, BasicProgressBar) for callback in given)
        if config.get("enable_progress_bar") is None and not own_bar:
            config = {**config, "enable_progress_bar": sys.stdout.isatty()}
        if config.get("enable_progress_bar") is False:
            callbacks = [*callbacks, ProgressLines()]
        elif not own_bar:
            callbacks = [*callbacks, ProgressBar()]
        if config.get("barebones"):  # Lightning's way to time the bare loop
            config, callbacks = {**config, "enable_progress_bar": None}, []

        def make(settings: dict[str, Any]) -> lightning.Trainer:
            return super(Command, self)._instantiate_trainer({**settings, "callbacks": list(given)}, callbacks)

        return made("trainer", lightning.Trainer, make, config)

    def _parse_ckpt_path(self) -> None:
        """Lightning would let a checkpoint's arguments win over the command line; here they have to agree."""

    def _check_checkpoint(self) -> None:
        """Refuse a checkpoint of another model, or none, before a run folder is made and text is read."""
        fits = self.subcommand == "fit"
        path, weights = self._chosen_checkpoint(), self._get(self.config_init, "weights")
        if path is not None:
            saved = checkpoint.read(path)
            self.model.check(saved)
            if fits and not checkpoint.is_whole_state(saved):
                raise UserError(f"ckpt_path is {path}, which has weights alone; --weights {path} would do")
            self.goes_on_as = saved.get("run", {}).get("name") if fits else None
            most = self._get(self.config_init, "trainer").get("max_steps")
            if fits and 0 < most <= saved["global_step"] and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
                done = f"{path} is of update {saved['global_step']:,}, and trainer.max_steps is {most}"
                print(f"there is nothing left to train: {done}", flush=True)
        elif fits and weights is not None:
            saved = checkpoint.read(Path(weights), "weights")
            self.model.start_from(saved)
            if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
                print(
                    f"fine-tunes the weights of {weights}, update {saved['global_step']:,}: counters, optimiser, "
                    "schedule, order of the data and best scores are reset",
                    flush=True,
                )
        elif not fits and self.subcommand not in LOOKING:
            raise UserError(f"{self.subcommand} needs weights: --ckpt_path{checkpoint.such_as(self._runs)}")
        else:
            return
        try:
            self.model.tokenizer = self.datamodule.given_tokenizer = Tokenizer(saved["tokenizer"])
        except UserError as error:
            key, value = ("weights", weights) if path is None else ("ckpt_path", path)
            raise UserError(f"{key} is {value}: {error}") from error

    def _chosen_checkpoint(self) -> Path | None:
        """The checkpoint to go on from, its name in place of `last` and `auto`."""
        place = self._get(self.config, "checkpoint").get("dirpath")
        path = continuing.start(
            continuing.Asked(
                checkpoint=self._get(self.config_init, "ckpt_path"),
                folder=self._runs,
                beside=Path(place) if place else None,
                configs=configs(self.words),
                settings=self._settings,
                words=self.words if self.subcommand == "fit" else None,
            )
        )
        for config in (self.config, self.config_init):  # what is kept with the run, and what it is made of
            config[self.subcommand].ckpt_path = None if path is None else str(path)
        return path

    @property
    def _runs(self) -> Path:
        """The folder of all runs."""
        return Path(self._get(self.config_init, "trainer").get("default_root_dir") or "runs")

    @property
    def _settings(self) -> dict[str, Any]:
        """What decides the weights, in plain values."""
        parser, config = self._parser(self.subcommand), self.config[self.subcommand]
        return continuing.decisive(json.loads(parser.dump(config, format="json", skip_validation=True)))

    def before_fit(self) -> None:
        self._check_average(self._get(self.config_init, "test_average"))
        if self.trainer.is_global_zero:
            self.trainer.explain(self.model, self.datamodule)
        if self._get(self.config_init, "test_after_fit"):
            self.datamodule.setup("fit")
            if not self.datamodule.has("test"):
                raise UserError("test_after_fit is true, but data gives no test text; --test_after_fit false would do")

    def after_fit(self) -> None:
        fitted = dict(self.trainer.callback_metrics)
        try:
            if self._get(self.config_init, "test_after_fit") and not self.trainer.interrupted:
                saves = self.trainer.checkpoint_callback
                self.model.saved_as = saves.now(self.trainer) if isinstance(saves, Checkpoints) else None
                tested = self._average(self._get(self.config_init, "test_average"))
                self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=tested, verbose=False)
        finally:
            self._report(fitted)

    def _check_average(self, which: averaging.Which) -> None:
        """Refuse an average that nothing is done with, or of checkpoints that will not be there."""
        if not which.count:
            return
        if not self._get(self.config_init, "test_after_fit"):
            raise UserError(f"test_average is {which}, but test_after_fit is false; --test_after_fit true would do")
        saves = self.trainer.checkpoint_callback
        if not isinstance(saves, Checkpoints):
            raise UserError(f"test_average is {which}, but trainer.enable_checkpointing is false; true would do")
        kept = getattr(saves, which.kept_by)
        if 0 <= kept < which.count:
            raise UserError(
                f"test_average is {which}, but checkpoint.{which.kept_by} is {kept}; "
                f"--checkpoint.{which.kept_by} {which.count} would do"
            )

    def _average(self, which: averaging.Which) -> Path | None:
        """The checkpoint that the test after fit takes: an average where one is asked for; none: the final weights.

        It is of fewer where there are fewer. Training is done by now: what cannot be averaged ends nothing.
        """
        place = None
        if which.count and self.trainer.is_global_zero:
            try:
                chosen = averaging.choose(self._states(which), which)
                made = which.of(len(chosen))
                place = Path(self.trainer.default_root_dir) / f"average_{str(made).replace(' ', '_')}.ckpt"
                averaging.write(chosen, made, place)
                fewer = "" if made == which else f" (test_average asks for {which.count})"
                print(f"tests the average of {len(chosen)} checkpoints{fewer}, {place}", flush=True)
            except UserError as error:
                place = None
                print(f"tests the final weights: {error}", flush=True)
        return self.trainer.strategy.broadcast(place)

    def _states(self, which: averaging.Which) -> list[averaging.Saved]:
        """What can be averaged: the states of this run, and of those before it up to where it went on from them.

        Others may lie beside them, where runs share `checkpoint.dirpath`.

        Raises:
            UserError: there is none, or one is damaged.
        """
        saves, line = self.trainer.checkpoint_callback, self.continuity.line
        if which.best:
            paths = [path for path in map(Path, saves.best_k_models) if path.is_file()]
            if not paths:
                raise UserError(f"no checkpoint is ranked by {saves.monitor}")
            return averaging.found(paths)
        ends = {Path(self.trainer.default_root_dir).name: math.inf} | {one["folder"]: one["update"] for one in line}
        places = dict.fromkeys(Path(place) for place in (saves.dirpath, *(one["checkpoints"] for one in line)))
        everything = averaging.found([place for place in places if place.is_dir()])
        states = {one.update: one for one in everything if one.update <= ends.get(one.run, -1)}
        if not states:
            raise UserError(f"{saves.dirpath} has no checkpoint of this run")
        return list(states.values())

    def after_validate(self) -> None:
        self._report({})

    def after_test(self) -> None:
        self._report({})

    def after_predict(self) -> None:
        self._report({})

    def _report(self, before: dict[str, Any]) -> None:
        if self.trainer.is_global_zero:
            Console().print(results(self.trainer, before | dict(self.trainer.callback_metrics)))


@contextlib.contextmanager
def in_the_users_words() -> Iterator[None]:
    """What goes wrong while classes are made becomes a UserError."""
    try:
        yield
    except Exception as error:
        told = cause_in(error)
        if told is not None:
            raise told from None
        refusal = refusal_of(error)
        if refusal is not None:
            raise UserError(refusal) from error
        name = class_being_made(error) or "what the config says"
        known = isinstance(error, ValueError | TypeError | MisconfigurationException)
        raise UserError(f"{name} cannot be made: {(one_line if known else plugins.describe)(error)}") from error


def run_folder(root: Path) -> Path:
    """A new folder below `root`, named by the time; other ranks of the run find it in the environment."""
    # Under torchrun nobody names it, and the first rank alone writes.
    if rank_zero_only.rank > 0:  # type: ignore[attr-defined]
        return Path(os.environ.get(RUN_FOLDER, root))
    folder = root / folder_name()
    make_folder(folder, "trainer.default_root_dir")
    os.environ[RUN_FOLDER] = str(folder)
    return folder


def make_folder(folder: Path, key: str) -> None:
    """Make a folder that a key asks for, and see that one can write there.

    Raises:
        UserError: one cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"something")
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be used: {error.strerror}; {key} names another place") from error


@contextlib.contextmanager
def no_folder_of_a_refusal() -> Iterator[None]:
    """Remove the folder of a run that was refused before it did anything."""
    before = os.environ.get(RUN_FOLDER)
    try:
        yield
    except UserError:
        made = os.environ.get(RUN_FOLDER)
        if made and made != before and {path.name for path in Path(made).glob("*")} <= BEGUN:
            shutil.rmtree(made, ignore_errors=True)
        raise


def folder_name() -> str:
    """A name by the time and the SLURM job, which no other folder has."""
    job = continuing.of_job(slurm.job())
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{job}{secrets.token_hex(2)}"


def table(folder: Path) -> Logger:
    """Every metric by update, in `folder`/metrics.csv, up to date after each record."""
    return CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)


def weights_and_biases(folder: Path, name: str) -> Logger:
    """A run in `folder`/wandb: online for who is logged in or asks by WANDB_MODE, else offline; never a question."""
    asked = os.environ.get("WANDB_MODE") or None
    if asked is not None and asked not in WANDB_MODES:
        raise UserError(f"the environment variable WANDB_MODE is {asked}; {', '.join(WANDB_MODES)} would do")
    mode = WANDB_MODES[asked or wandb.setup().settings.mode]  # `wandb offline` and `wandb disabled` leave it in a file
    if mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
        if asked:
            raise UserError(f"WANDB_MODE is {asked}, but nobody is logged in; wandb login, or offline, would do")
        mode = "offline"
    return wandb_logger(folder, mode, name)


def wandb_logger(folder: Path, mode: str, name: str | None = None) -> Logger:
    """A run in `folder`/wandb, in one of the modes of Weights & Biases; `name`: of the run, if not the folder's."""
    logger = WandbLogger(
        save_dir=folder,
        id=name or folder.name,
        name=os.environ.get("WANDB_NAME") or name or folder.name,
        project=os.environ.get("WANDB_PROJECT", "stabilize"),
        offline=mode == "offline",
        mode=mode,
        settings=wandb.Settings(silent=mode == "offline", console="off"),
    )
    logger._wandb_init.pop("anonymous")  # no longer known to wandb, which warns of it
    return logger


def configs(arguments: list[str]) -> list[Path]:
    """The files of a command line."""
    return [Path(value) for option, value in options(arguments[1:]) if option in CONFIG]


def plugin_folders(arguments: list[str]) -> list[Path]:
    """Where a class that YAML names by its full path may lie: the current folder, and beside each config."""
    return [Path.cwd(), *(config.resolve().parent for config in configs(arguments))]


def run(arguments: list[str], command: type[Command] = Command) -> int:
    """Carry out a verb of LightningCLI."""
    if not hasattr(jsonargparse._typehints, "discard_init_args_on_class_path_change"):
        wanted = next(line for line in requires("stabilize-nmt") or [] if line.startswith("jsonargparse"))
        raise UserError(f"jsonargparse {version('jsonargparse')} is not known to work; pip install '{wanted}'")
    jsonargparse._typehints.discard_init_args_on_class_path_change = keep_no_arguments_of_another_class
    set_loader("yaml", strict_yaml.load)
    kernels.keep_freed_memory()
    sys.path += [str(folder) for folder in plugin_folders(arguments) if str(folder) not in sys.path]
    for group in plugins.GROUPS:
        plugins.load(group)
    for message in NOISE:
        warnings.filterwarnings("ignore", message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with no_folder_of_a_refusal():
        return carry_out(command, arguments)


def carry_out(command: type[Command], arguments: list[str]) -> int:
    """Run a command to its end, however it ends.

    Raises:
        UserError: what a library, the machine, a plug-in or another process of the run refused.
        TrainingStoppedError: the spike guard ended the run; of several processes the first one says so.
    """
    watch, is_first = ranks.Watch(), rank_zero_only.rank == 0  # type: ignore[attr-defined]
    launching._launch_process_observer = watch.others
    if not is_first:
        watch.first()
    try:
        command(arguments)
    except SIGTERMException as end:
        return end.code if isinstance(end.code, int) else 128 + signal.SIGTERM
    except ProcessRaisedException as error:  # of ddp_spawn, whose processes hand on their traceback as text
        for kind in (UserError, TrainingStoppedError):
            _, name, told = str(error).strip().rpartition(f"{kind.__module__}.{kind.__name__}: ")
            if name:
                raise kind(told) from None
        raise
    except ProcessExitedException as end:  # of ddp_spawn and ddp_fork: with a code, or by a signal that ends at once
        if end.exit_code > 0:
            return end.exit_code
        raise UserError(ranks.LOST) from end
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # how Lightning leaves after Ctrl-C
            raise KeyboardInterrupt from end
        raise
    except TrainingStoppedError:
        if is_first:
            raise
    except UserError:
        raise
    except Exception as error:
        others = plugins.Modules(plugin_folders(arguments))
        if culprit := others.culprit(error):
            error.add_note(f"the plug-in {culprit}")
            raise
        refusal = refusal_of(error) or refusal_of_lightning(error)
        if refusal is None:
            if others.imported():
                error.add_note(f"the cause may be in a plug-in: {', '.join(others.imported())}")
            raise
        raise UserError(refusal) from error
    finally:
        watch.over()
        if wandb.run is not None:
            wandb.finish()
    return 0


def refusal_of_lightning(error: BaseException) -> str | None:
    """What Lightning says of settings that do not go together, or of a checkpoint, which it reads in its own order."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    if any(
        name == RESTORING and "restore" in frame.f_code.co_name for name, frame in zip(modules, frames, strict=True)
    ):
        return f"the checkpoint is damaged, or of another version of stabilize: {plugins.describe(error)}"
    raised_there = modules[-1].startswith("lightning.") and isinstance(error, ValueError | TypeError)
    if raised_there or isinstance(error, MisconfigurationException):
        return f"the config cannot be carried out: {one_line(error)}"
    return None


def refusal_of(error: BaseException) -> str | None:
    """What the machine, an account or another process refuses, where that is behind an error."""
    if isinstance(error, wandb.Error):
        return f"Weights & Biases refuses, {one_line(error)}; WANDB_MODE=offline, or disabled, would do without it"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"the memory does not suffice, {one_line(error)}; a smaller model, or data.batch_tokens, would do"
    if isinstance(error, OSError) and error.errno in FULL:
        place = f" ({error.filename})" if error.filename else ""
        runs = Path(os.environ.get(RUN_FOLDER, "runs/none")).parent
        return f"{error.strerror}{place}; checkpoints of before are whole{checkpoint.such_as(runs)}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be used: {error.strerror}; what is in the run folder is kept"
    if isinstance(error, RuntimeError) and ranks.is_loss_of_another(error):
        return ranks.LOST
    return None


__all__ = ["ParallelText", "SyntheticCorpus", "run"]
