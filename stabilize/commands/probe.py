"""`stabilize probe`: what each layer does before any training, for one config or many strategies and depths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from jsonargparse import Namespace
from rich.console import Console
from torch import Tensor

from stabilize import probe
from stabilize.commands import profiles
from stabilize.commands.overlays import OverlayCommand, gathered, paths_of
from stabilize.commands.profiles import Probed
from stabilize.commands.training import Trainer, folder_name, run
from stabilize.data import TranslationData
from stabilize.data.batch import Batch
from stabilize.errors import UserError
from stabilize.task import TranslationTask
from stabilize.tokens import PAD

LISTS = ("--strategies", "--depths")
"""Options that take every word up to the next option."""

STACKS = ("encoder", "decoder")


class Prober(Trainer):
    """Lightning's trainer, with the verb that looks before training."""

    command: ProbeCommand

    def probe(
        self,
        model: TranslationTask,
        datamodule: TranslationData,
        strategies: list[str] | None = None,
        depths: list[int] | None = None,
        tokens: int = 512,
        out: Path | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Show what each layer does before training: signal, gradient, and a verdict.

        One batch, the first of fit where that is no larger than `tokens`; one forward and one backward; no update. All
        models start at the same random numbers. In float32 on the CPU, whatever the trainer says; of its precision only
        epsilons take note.

        Args:
            strategies: what to lay over the config, each by itself: names of configs/strategies, or paths.
            depths: numbers of layers, of the encoder and the decoder alike, in place of the config's.
            tokens: no batch is larger, padding included, unless a single sentence is.
            out: folder for probe.json and the figures; none: a new one in probes/.
            ckpt_path: a checkpoint that the config must fit; its weights are not looked at.
            weights_only: here so that a config of `fit` does; nothing else is ever read.
        """
        for name, numbers in (("tokens", [tokens]), ("depths", [1] if depths is None else depths)):
            if min(numbers, default=0) < 1:
                given = ", ".join(map(str, numbers)) or "empty"
                raise UserError(f"{name} is {given}; 1 is the least that will do")
        cases = list(self.command.cases(strategies, depths))
        folder = out or Path("probes") / folder_name()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the folder {folder} cannot be made: {error.strerror}; --out names another") from error

        datamodule.batch_tokens = min(datamodule.batch_tokens, tokens)
        datamodule.setup("fit")
        self.datamodule = datamodule  # as Lightning does for fit
        batch = next(iter(datamodule.train_dataloader()))
        console, found = Console(), []
        with console.status("") as status:
            for name, config in cases:
                status.update(f"{name}, {config.model.encoder_layers}+{config.model.decoder_layers} layers")
                found.append(self._look(name, config, batch))
        about = {
            "seed": self.command.config[self.command.verb].seed_everything,
            "precision": str(self.precision),
            "data": datamodule.origin("train"),
            "sentences": len(batch.source),
            "source_tokens": int((batch.source != PAD).sum()),
            "target_tokens": int((batch.target[:, 1:] != PAD).sum()),
            "width": model.sizes.width,
        }
        console.print(profiles.report(found, about))
        files = profiles.write(folder, found, about)
        print(f"wrote {folder}: {', '.join(files)}")
        if all(probed.refused for probed in found):
            raise UserError(found[0].refused)

    def _look(self, name: str, config: Namespace, batch: Batch) -> Probed:
        """Build the model of a config and measure it, as the first update of `fit` would find it."""
        depths = {stack: config.model[f"{stack}_layers"] for stack in STACKS}
        with torch.random.fork_rng(devices=[]):  # the same random numbers for all
            try:
                task = self.command.task_of(config)
                task.compile_layers = task.checkpoint_layers = False  # they change no number
                task.trainer = self
                task.setup("fit")
                task.configure_model()
                task.train()
                task.on_train_batch_start(batch, 0)
            except UserError as refusal:
                return Probed(name, depths, refused=str(refusal))

            def loss() -> Tensor:
                summed, _, tokens = task.loss(batch)
                return summed / tokens

            found = probe.profile({stack: list(getattr(task.model, stack).layers) for stack in STACKS}, loss)
        stabilizers = {"encoder": task.stabilizer, "decoder": task.decoder_stabilizer or task.stabilizer}
        theories = {stack: probe.theory(stabilizers[stack], stack, depths[stack]) for stack in STACKS}
        return Probed(name, depths, found, theories)


class ProbeCommand(OverlayCommand):
    """The command line of `stabilize probe`."""

    trainer_with_verb = Prober

    def before_probe(self) -> None:
        self.trainer.command = self

    def cases(self, strategies: Sequence[str] | None, depths: Sequence[int] | None) -> Iterator[tuple[str, Namespace]]:
        """Name and config of every model to look at: each of the strategies at each of the depths.

        Raises:
            UserError: a strategy that is none, or a mistake in its file.
        """
        overlays: dict[str, Path | None] = {self.name: None} if strategies is None else {**paths_of(strategies)}
        for name, path in overlays.items():
            config = self.with_overlay(path)
            own = (config.model.encoder_layers, config.model.decoder_layers)
            for sizes in dict.fromkeys([own] if depths is None else [(depth, depth) for depth in depths]):
                chosen = config.clone()
                chosen.model.encoder_layers, chosen.model.decoder_layers = sizes
                yield name, chosen


def look(words: list[str]) -> int:
    """Carry out `stabilize probe`."""
    return run(["probe", *gathered(words, LISTS)], ProbeCommand)
