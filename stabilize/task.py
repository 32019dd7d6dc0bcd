"""Translation as a LightningModule: loss, optimiser, schedule, evaluation loop."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from stabilize import generators, sharding, stats
from stabilize.checkpoint import check_model, check_optimizer, settings, sha256
from stabilize.data.batch import Batch
from stabilize.data.cleaning import is_blank
from stabilize.data.module import Split
from stabilize.data.tokenizer import Tokenizer
from stabilize.decoding import BeamSearch
from stabilize.errors import UserError, at_least
from stabilize.evaluation import Evaluated, Evaluation
from stabilize.gradients import Gradients
from stabilize.loss import projected_cross_entropy
from stabilize.metrics import ScoreName, corpus_scores
from stabilize.model import EncoderDecoder, Sizes
from stabilize.precision import is_fused, unscale
from stabilize.strategies import Clipping, NoClipping, Part, Stabilizer
from stabilize.tokens import PAD

LOSS_UNIT = 1024.0
"""Losses are divided by this many tokens at once, so that gradients keep within a half-precision format's range until
the tokens of the whole update are known."""


class TranslationTask(LightningModule):
    """Trains an encoder-decoder to translate, and evaluates it with beam search and sacreBLEU.

    The same update for the same data, however it is cut: losses are summed, and the gradients of an update divided once
    by its target tokens, over accumulated batches and ranks.

    Args:
        stabilizer: what keeps the stacks stable, on seven axes.
        decoder_stabilizer: of the decoder alone, its warm-up included; none: the same.
        label_smoothing: share of the target weight that is spread over the vocabulary.
        optimizer: of the parameters; its learning rate is the one at the schedule's factor 1. Vectors, gains and
            biases are left out of weight decay.
        clipping: what bounds the gradient of an update.
        z_loss: weight of the squared logarithm of the softmax's denominator in the loss; PaLM uses 1e-4.
        search: for `test` and `predict`.
        validation_search: for the checks during training.
        scores: of `test`: `bleu`, `chrf`, `chrf++`, `ter`, which takes longer than all others.
        validation_scores: of the checks during training; an empty list: these translate nothing, which takes time.
        bleu_tokenizer: sacreBLEU's name of what splits words for BLEU: `13a`, `zh`, `intl`, `char`, ...
        samples: translations shown in the sample table.
        compile_layers: run each layer through torch.compile, all layers sharing their graphs; for GPUs.
        checkpoint_layers: keep only each layer's input for the backward pass, and compute the rest again.
        sizes: the model's shape, see `stabilize.model.Sizes`.
    """

    def __init__(
        self,
        stabilizer: Stabilizer,
        decoder_stabilizer: Stabilizer | None = None,
        label_smoothing: float = 0.1,
        optimizer: OptimizerCallable = lambda parameters: Adam(parameters, lr=1e-3, betas=(0.9, 0.98), eps=1e-9),
        clipping: Clipping = NoClipping(),  # noqa: B008  a template, never changed
        z_loss: float = 0.0,
        search: BeamSearch = BeamSearch(),  # noqa: B008
        validation_search: BeamSearch = BeamSearch(beam=1),  # noqa: B008
        scores: Sequence[ScoreName] = ("bleu", "chrf", "chrf++", "ter"),
        validation_scores: Sequence[ScoreName] = ("bleu", "chrf"),
        bleu_tokenizer: str = "13a",
        samples: int = 5,
        compile_layers: bool = False,
        checkpoint_layers: bool = False,
        **sizes: Any,
    ) -> None:
        super().__init__()
        at_least("model", label_smoothing=(label_smoothing, 0), z_loss=(z_loss, 0), samples=(samples, 0))
        if label_smoothing >= 1:
            raise UserError(f"model.label_smoothing is {label_smoothing}; a share below 1 would do")
        self.sizes = Sizes(**sizes)
        self.stabilizer = stabilizer
        self.decoder_stabilizer = decoder_stabilizer
        self.label_smoothing = label_smoothing
        self.optimizer = optimizer
        self.clipping = copy.deepcopy(clipping)
        self.z_loss = z_loss
        self.search = search
        self.validation_search = validation_search
        self.samples = samples
        self.compile_layers = compile_layers
        self.checkpoint_layers = checkpoint_layers
        self.tokenizer: Tokenizer
        self.model: EncoderDecoder
        passes: dict[str, Sequence[ScoreName]] = {"val": validation_scores, "test": scores, "predict": ()}
        evaluations = {name: Evaluation(corpus_scores(wanted, bleu_tokenizer)) for name, wanted in passes.items()}
        self.evaluations = cast("dict[str, Evaluation]", nn.ModuleDict(evaluations))
        self.evaluated: dict[str, Evaluated] = {}
        """What the last pass of each kind found."""
        self.saved_as: str | None = None
        """The checkpoint that has the weights as they are, where the trainer was given none."""
        self.update_loss = torch.zeros(())
        """Of the last update, per target token, over all ranks."""
        self.gradients = Gradients([])
        """Of the update being made."""
        self._prepared = False
        """Whether the weights are past their first batch, here or in the run that they were loaded from."""
        self._tally = _Tally()
        self._optimizers_before: list[dict[str, Any]] = []
        self._generators_before: list[dict[str, Any]] = []
        self._window_before: dict[str, Any] | None = None
        self._plan_before: int | None = None
        """Updates that the run was to have from which this one goes on."""
        self._weights_before: dict[str, Tensor] | None = None
        self._tokens_seen = 0
        self._since_log = [0.0, 0.0, 0.0]
        """Loss, nll and tokens between a checkpoint and the log before it."""

    # ------------------------------------------------------------------ building

    def configure_model(self) -> None:
        """Build the model, now that vocabulary and precision are known."""
        if not hasattr(self, "model"):
            if not hasattr(self, "tokenizer"):
                self.tokenizer = self.trainer.datamodule.tokenizer
            self._build(str(self.trainer.precision) if self._trainer is not None else "32-true")
        if self._trainer is not None:
            sharding.share_out(self.model, self.trainer.strategy)

    def _build(self, precision: str) -> None:
        self.precision = precision
        self.model = EncoderDecoder(
            self.tokenizer.vocabulary, self.sizes, self.stabilizer, self.decoder_stabilizer, precision
        )
        for layer in self.model.layers:
            layer.compiled, layer.checkpointed = self.compile_layers, self.checkpoint_layers
        if self._weights_before is not None:
            self.load_state_dict(self._weights_before)
            self._weights_before = None

    def setup(self, stage: str) -> None:
        """Refuse text that is too long for learned positions, before any work is done."""
        longest = getattr(self.trainer.datamodule, "longest_line", 0)
        if self.sizes.positions == "learned" and longest > self.sizes.maximum_length:
            raise UserError(
                f"model.maximum_length is {self.sizes.maximum_length}, but the text has a line of {longest} tokens; "
                f"model.maximum_length: {longest} or model.positions: sinusoidal would do"
            )

    def make_optimizer(self, parameters: Any) -> Optimizer:
        """The optimiser of parameters or groups of them.

        Raises:
            UserError: its arguments will not do.
        """
        try:
            return self.optimizer(parameters)
        except Exception as error:  # of any package; torch's own words name the argument
            raise UserError(f"model.optimizer cannot be made: {error}") from error

    def _try(self, optimizer: Optimizer) -> None:
        """Let another optimiser of this kind make an update of a weight of the same kind.

        Raises:
            UserError: it cannot, which torch would say at the first update.
        """
        weight = nn.Parameter(torch.zeros_like(optimizer.param_groups[0]["params"][0]))
        weight.grad = torch.zeros_like(weight)
        trial = self.make_optimizer([weight])
        try:
            trial.step()
        except Exception as error:  # of any package
            raise UserError(f"model.optimizer {type(optimizer).__name__} makes no update: {error}") from error

    def _check_epsilon(self, optimizer: Optimizer) -> None:
        """Warn of an epsilon of the optimiser that is zero in the precision of its weights."""
        for group in optimizer.param_groups:
            epsilon, dtype = group.get("eps"), group["params"][0].dtype
            if isinstance(epsilon, float) and epsilon and not torch.tensor(epsilon, dtype=dtype):
                near = torch.finfo(dtype).tiny
                warnings.warn(
                    f"model.optimizer.eps is {epsilon:g}, which is 0 in {dtype}: weights whose gradient is zero become "
                    f"NaN; {near:.0e} or more, or trainer.precision 16-mixed, would do",
                    stacklevel=2,
                )
                return

    def configure_optimizers(self) -> Any:
        groups, factors = self._parameter_groups()
        optimizer = self.make_optimizer(groups)
        self._try(optimizer)
        self._check_epsilon(optimizer)
        for before in self._optimizers_before:
            check_optimizer(before, settings(optimizer))
        if self.trainer.gradient_clip_val is not None and not isinstance(self.clipping, NoClipping):
            raise UserError(
                f"trainer.gradient_clip_val is {self.trainer.gradient_clip_val} and model.clipping is "
                f"{type(self.clipping).__name__}; use one of them"
            )
        clipping_by = self.trainer.gradient_clip_algorithm
        if clipping_by is not None and self.trainer.gradient_clip_val is None:
            raise UserError(
                f"trainer.gradient_clip_algorithm is {clipping_by.value}, which belongs to trainer.gradient_clip_val, "
                f"and there is none; model.clipping, {type(self.clipping).__name__}, takes no heed of it"
            )
        if self.trainer.gradient_clip_val and self.trainer.precision.endswith("-mixed") and is_fused(optimizer):
            raise UserError(  # else Lightning says so at the first update
                f"trainer.gradient_clip_val is {self.trainer.gradient_clip_val}, which Lightning refuses for a fused "
                f"{type(optimizer).__name__} in {self.trainer.precision}; model.clipping: GlobalNorm, or fused: false "
                "of the optimizer, would do"
            )
        schedule = LambdaLR(optimizer, [_from_one(factor) for factor in factors])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "lr"}}

    def _parameter_groups(self) -> tuple[list[dict[str, Any]], list[Callable[[int], float]]]:
        """Parameters by schedule and by whether weight decay is for them, and each group's schedule."""
        spared = {id(p) for part in self.model.modules() if isinstance(part, Part) for p in part.parameters()}
        everything = [p for p in self.model.parameters() if p.requires_grad]
        shares = [(self.stabilizer, everything)]
        if self.decoder_stabilizer is not None:
            source_side = (self.model.source_embedding, self.model.encoder)
            first = {id(p) for part in source_side for p in part.parameters()}
            shares = [
                (self.stabilizer, [p for p in everything if id(p) in first]),
                (self.decoder_stabilizer, [p for p in everything if id(p) not in first]),
            ]
        groups: list[dict[str, Any]] = []
        factors: list[Callable[[int], float]] = []
        planned = self._plan
        for stabilizer, parameters in shares:
            plain = [p for p in parameters if p.ndim < 2 or id(p) in spared]
            decayed = [p for p in parameters if p.ndim >= 2 and id(p) not in spared]
            factor = stabilizer.warmup.at(self.sizes.width, planned).factor
            self._tell_plan(stabilizer, factor)
            for group in ({"params": decayed}, {"params": plain, "weight_decay": 0.0}):
                if group["params"]:
                    groups.append(dict(group))
                    factors.append(factor)
        return groups, factors

    @property
    def _plan(self) -> int | None:
        """Updates after which a schedule may end: those of the run's beginning, or the rate would jump where it goes
        on with others."""
        return self._plan_before or (self.trainer.max_steps if self.trainer.max_steps > 0 else None)

    def _tell_plan(self, stabilizer: Stabilizer, factor: Callable[[int], float]) -> None:
        """Warn of a schedule that will not end with this run."""
        here, name = self.trainer.max_steps, type(stabilizer.warmup).__name__
        if here < 2:
            return
        kept, new = (stabilizer.warmup.at(self.sizes.width, plan) for plan in (self._plan, here))
        if vars(kept) != vars(new):
            warnings.warn(
                f"trainer.max_steps is {self._plan} in the checkpoint and {here} here; the learning rate of {name} "
                "keeps the end it began with, and a new one begins with --weights",
                stacklevel=2,
            )
        elif factor(here - 1) == 0:
            over = bisect.bisect_left(range(1, here), True, key=lambda update: factor(update) == 0) + 1
            warnings.warn(
                f"the learning rate of {name} is 0 from update {over:,} on, and trainer.max_steps is {here}; "
                f"model.stabilizer.warmup.total: {here} would do",
                stacklevel=2,
            )

    # ------------------------------------------------------------------ training

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor, int]:
        """Summed loss, summed nll, and number of target tokens of a batch."""
        labels = batch.target[:, 1:]
        real = labels != PAD
        # An end token is read by none: cutting off the last column spares only the longest sentence from it.
        hidden = self.model(batch.source, batch.target[:, :-1].masked_fill(~real, PAD))
        places = real.flatten().nonzero().squeeze(1) if batch.real is None else batch.real
        hidden, labels = hidden.flatten(0, 1).index_select(0, places), labels.flatten().index_select(0, places)
        loss, nll = projected_cross_entropy(
            hidden, *self.model.output_matrix(), labels, self.label_smoothing, self.z_loss
        )
        return loss, nll, len(labels)

    def on_train_start(self) -> None:
        if self.compile_layers and self.trainer.is_global_zero:
            slower = "; on a CPU layers train faster as they are" if self.device.type == "cpu" else ""
            told = "the first updates compile layers, which takes minutes; later runs find most of it in torch's cache"
            print(told + slower, flush=True)
        if len(self._generators_before) == self.trainer.world_size:  # else other processes draw other numbers
            generators.restore(self._generators_before[self.global_rank])
        self._generators_before = []
        self._tally.restart()
        if self.trainer.is_global_zero:  # it is the sum of all ranks
            self._tally.take(self._since_log)
        self._since_log = [0.0, 0.0, 0.0]
        if getattr(self.trainer.train_dataloader, "starts_over", False):
            self._count_anew()
        if self._window_before is not None:
            self._enter(self._window_before)
            self._window_before = None
        self._moved = [
            part
            for part in self.model.modules()
            if isinstance(part, Part) and type(part).after_update is not Part.after_update
        ]

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if not self._prepared and self.trainer.global_step == 0:
            for part in self.model.modules():
                if isinstance(part, Part):
                    part.prepare(self.model, batch)
        self._prepared = True

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, nll, tokens = self.loss(batch)
        self._tally.add(loss.detach(), nll, tokens)
        # Lightning divides what is returned here by the number of accumulated batches.
        return loss * (self.trainer.accumulate_grad_batches / LOSS_UNIT)

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self._watch_gradients(optimizer)

    def _watch_gradients(self, optimizer: Optimizer) -> None:
        self.gradients = Gradients.of(optimizer, self.model.classifier)

    def on_after_backward(self) -> None:
        """After the update's last batch, divide its gradients by its tokens; callbacks then see the true ones.

        An update without tokens has no gradients, so that not even momentum moves a weight; it is counted all the same.
        """
        if self.trainer.fit_loop._should_accumulate():
            return
        ranks, mine = self.trainer.world_size, self._tally.window[1]
        loss, tokens = self._over_ranks(self._tally.close(self.device)).unbind()
        self.update_loss = loss / tokens.clamp_min(1)
        if not mine and not tokens:  # who has some need not wait for the device to tell
            self.zero_grad()
            return
        # Where ranks share the work, DDP has averaged what was to be summed.
        scale = LOSS_UNIT / mine if ranks == 1 else (LOSS_UNIT * ranks / tokens).float()
        torch._foreach_mul_(self.gradients.here, scale)
        unscale(self.trainer, self.trainer.optimizers[0])

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if not self._logs_this_update:
            return
        loss, nll, tokens = self._over_ranks(self._tally.since_log(self.device)).tolist()
        self._tokens_seen += int(tokens)
        if tokens:
            loss, nll = loss / tokens, nll / tokens
            self.log_dict({"train/loss": loss, "train/nll": nll}, prog_bar=True)
            self.log("train/perplexity", math.exp(min(nll, 700.0)))
        else:
            self._log_none_of("train/loss", "train/nll", "train/perplexity")
        self.log_dict(
            {
                "train/tokens": float(self._tokens_seen),
                "train/tokens_per_second": tokens / self._tally.restart(),
                "lr": optimizer.param_groups[0]["lr"],
            }
        )

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if isinstance(self.clipping, NoClipping):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            self.clipping.clip(self.gradients)
        if not self.gradients.there:
            self._log_none_of("gradient_norm/total_clipped")
        elif self._logs_this_update:
            self.log("gradient_norm/total_clipped", stats.whole(get_total_norm(self.gradients.there)))

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        def closure() -> Any:
            loss = optimizer_closure() if optimizer_closure is not None else None
            # None tells Lightning's gradient scaler, which has no use for an update without gradients, to pass it over.
            return loss if self.gradients.there else None

        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        if not self.gradients.there:
            return
        update = self.trainer.global_step + 1  # Lightning counts it when this hook is done
        for part in self._moved:
            part.after_update(update)

    def drop_update(self) -> None:
        """Let the update that is being made change nothing: no weight, no running statistics, no logged loss."""
        self.zero_grad()
        self._tally.drop()
        for part in self._moved:
            part.drop_update()

    def _log_none_of(self, *names: str) -> None:
        """Leave numbers out of the record of this update, where Lightning would put their last values again."""
        for metric in (self.trainer._results or {}).values():
            if metric.meta.name in names:
                metric.reset()

    @property
    def _logs_this_update(self) -> bool:
        every = self.trainer.log_every_n_steps
        return bool(every) and (self.trainer.global_step + 1) % every == 0

    def _over_ranks(self, sums: Tensor) -> Tensor:
        """The sums of all ranks added up."""
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums

    def _sum_of_ranks(self, gradient: Tensor) -> Tensor:
        """What the gradients of all ranks add up to; of shards there is the mean."""
        if stats.is_sharded(gradient):
            return gradient.full_tensor() * self.trainer.world_size
        return self._over_ranks(gradient.clone())

    def _of_ranks(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What each rank has."""
        all_have = [mine] * self.trainer.world_size
        if self.trainer.world_size > 1:
            torch.distributed.all_gather_object(all_have, mine)
        return all_have

    # ------------------------------------------------------------------ evaluation

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val", self.validation_search)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test", self.search)

    def predict_step(self, batch: Batch, batch_idx: int) -> list[str]:
        """The translations of a batch, in its order; all of them are written to a file at the end."""
        return self._translate(batch, "predict", self.search)

    def _evaluate(self, batch: Batch, name: str, search: BeamSearch) -> None:
        none = torch.zeros((), device=self.device)
        loss, nll, tokens = self.loss(batch) if len(batch.source) else (none, none, 0)  # see TokenBatches
        per_token = {f"{name}/loss": loss / max(tokens, 1), f"{name}/nll": nll / max(tokens, 1)}
        # Of what the ranks have, Lightning takes the mean in whole numbers.
        weight = tokens * self.trainer.world_size
        self.log_dict(per_token, on_step=False, on_epoch=True, batch_size=weight, sync_dist=True)
        if name != "val" or self._validation_translates:
            self._translate(batch, name, search)

    def _translate(self, batch: Batch, name: str, search: BeamSearch) -> list[str]:
        """Detokenised translations of a batch; a blank line stays blank."""
        found = search(self.model, batch.source)
        said = [not is_blank(source) for source in batch.source_text]
        translations = [self.tokenizer.decode(one.ids) if some else "" for one, some in zip(found, said, strict=True)]
        truncated = [one.truncated and some for one, some in zip(found, said, strict=True)]
        self.evaluations[name].add(batch, translations, truncated)
        return translations

    def on_validation_start(self) -> None:
        self._tally.pause()
        sharding.gather(self)

    def on_test_start(self) -> None:
        sharding.gather(self)

    def on_predict_start(self) -> None:
        sharding.gather(self)

    def on_validation_end(self) -> None:
        self._tally.go_on()

    def on_validation_epoch_end(self) -> None:
        sharding.let_go(self)
        if not self._validation_translates:
            return
        found = self._finish("val", "validation")
        if self.trainer.sanity_checking:
            return
        columns = ["source", "reference", "translation"]
        samples = [line.sample() for line in list(found.lines.values())[: self.samples]]
        rows = [[sample[column] for column in columns] for sample in samples]
        for logger in self.trainer.loggers:
            if isinstance(logger, WandbLogger) and rows and self.trainer.is_global_zero:
                logger.log_table("samples", columns=columns, data=rows, step=self._logged_step)

    def on_test_epoch_end(self) -> None:
        self._write("test", self._finish("test", "test"))

    def on_predict_epoch_end(self) -> None:
        self._write("predict", self._finish("predict", "test"))

    @property
    def _validation_translates(self) -> bool:
        return bool(self.evaluations["val"].scores)

    def _finish(self, name: str, split: Split) -> Evaluated:
        """End a pass over a split: log its scores, in a test those of the baselines too, and of how many lines."""
        data = self.trainer.datamodule
        found = self.evaluations[name].finish(data.totals[split] if data is not None else None)
        if name == "test" and data is not None and "bleu" in found.scores:
            baseline = self.evaluations[name].scores["bleu"]
            for kind, translations in data.baseline_translations().items():
                baseline.update(
                    [translations[k] for k in found.lines], [line.references for line in found.lines.values()]
                )
                found.scores[f"bleu_{kind}"] = float(baseline.compute())
                baseline.reset()
        if name != "predict":  # in which nothing is logged
            counts = {"lines": len(found.lines), "empty": found.empty, "truncated": found.truncated}
            numbers = {f"{name}/{key}": float(value) for key, value in (found.scores | counts).items()}
            # All processes have the same numbers; the mean of three would be rounded.
            self.log_dict(numbers, sync_dist=True, reduce_fx="max")
        if not self.trainer.sanity_checking:
            self.evaluated[name] = found
        return found

    def _write(self, name: str, found: Evaluated) -> None:
        if self.trainer.is_global_zero:
            data = self.trainer.datamodule
            weights = self.trainer.ckpt_path or self.saved_as
            origin = {
                "text": data.origin("test") if data is not None else "",
                "text_sha256": data.account["test"]["sha256"] if data is not None else "",
                "search": dataclasses.asdict(self.search),
                "precision": str(self.trainer.precision),
                "checkpoint": str(weights or "weights in memory"),
                "checkpoint_sha256": sha256(Path(weights)) if weights and Path(weights).is_file() else "",
            }
            folder = Path(self.trainer.default_root_dir) / "translations"
            found.write(folder, name, update=self._logged_step, **origin)

    @property
    def _logged_step(self) -> int:
        """Updates so far as Lightning's loggers count them; in evaluation those of the checkpoint."""
        return self.trainer.fit_loop.epoch_loop._batches_that_stepped

    # ------------------------------------------------------------------ checkpoints

    def spec(self) -> dict[str, Any]:
        """All that is needed to build the model again, in plain values."""
        return {
            "stabilizer": self.stabilizer.spec(),
            "decoder_stabilizer": self.decoder_stabilizer.spec() if self.decoder_stabilizer else None,
            **dataclasses.asdict(self.sizes),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["task"] = self.spec()
        checkpoint["tokenizer"] = self.tokenizer.model
        checkpoint["precision"] = self.precision
        checkpoint["optimizers"] = [settings(optimizer) for optimizer in self.trainer.optimizers]  # none in a test
        checkpoint["tokens_seen"] = self._tokens_seen
        checkpoint["since_log"] = self._over_ranks(self._tally.since_log(self.device)).tolist()
        checkpoint["generators"] = self._of_ranks(generators.state())
        checkpoint["planned"] = self._plan
        checkpoint["window"] = self._window() if self.trainer.fit_loop._should_accumulate() else None
        checkpoint["clipping"] = {"class": type(self.clipping).__name__, "state": self.clipping.state()}

    def start_from(self, checkpoint: dict[str, Any]) -> None:
        """Begin a run with a checkpoint's weights and nothing else of it, before the model is built.

        Raises:
            UserError: it is of another model.
        """
        self.check(checkpoint)
        self._weights_before = checkpoint["state_dict"]
        self._prepared = checkpoint["global_step"] > 0

    def check(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model.

        Raises:
            UserError: another stabiliser or shape, each difference by name.
        """
        check_model(checkpoint["task"], self.spec())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on where the checkpoint ended.

        Raises:
            UserError: it is of another model, or its tokenizer is not this run's.
        """
        self.check(checkpoint)
        self._optimizers_before = checkpoint["optimizers"]
        self._generators_before = checkpoint.get("generators", [])  # none before there were
        if checkpoint["tokenizer"] != self.tokenizer.model:
            raise UserError(
                f"the checkpoint's tokenizer ({Tokenizer(checkpoint['tokenizer']).hash}) is not this run's "
                f"({self.tokenizer.hash}): set data.given_tokenizer to the checkpoint's before setup"
            )
        self._tokens_seen = checkpoint["tokens_seen"]
        self._since_log = checkpoint["since_log"]
        self._window_before = checkpoint.get("window")
        self._plan_before = checkpoint.get("planned")
        self._deal_out(checkpoint)
        if checkpoint["clipping"]["class"] == type(self.clipping).__name__:
            self.clipping.restore(checkpoint["clipping"]["state"])
        # Lightning restores its counters to train on, not to evaluate; scores belong to the checkpoint's update too.
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = checkpoint["global_step"]

    def _window(self) -> dict[str, Any]:
        """What an update has gathered that a validation has interrupted, of all ranks."""
        gradients = [None if p.grad is None else self._sum_of_ranks(p.grad) for p in self.parameters()]
        # DDP hands every rank the first one's buffers.
        gathered = [None if buffer.grad is None else buffer.grad.clone() for buffer in self._gathering()]
        return {
            "gradients": gradients,
            "gathered": gathered,
            "sums": self._over_ranks(self._tally.gathered(self.device)).tolist(),
            "before": self._over_ranks(self._tally.before_update(self.device)).tolist(),
        }

    def _gathering(self) -> list[Tensor]:
        """The buffers whose "gradient" is what a norm gathers in the backward passes of an update."""
        return [buffer for buffer in self.buffers() if buffer.requires_grad]

    def _enter(self, window: dict[str, Any]) -> None:
        """Go on in the middle of an update; ranks have equal shares of the gradients, of which DDP takes the mean."""
        for parameter, gradient in zip(self.parameters(), window["gradients"], strict=True):
            mine = None if gradient is None else gradient / self.trainer.world_size
            parameter.grad = None if mine is None else sharding.share(mine.to(parameter.device), parameter)
        for buffer, sums in zip(self._gathering(), window.get("gathered", []), strict=False):  # older: none
            buffer.grad = None if sums is None else sums.to(buffer)
        self._watch_gradients(self.trainer.optimizers[0])
        if self.trainer.is_global_zero:  # the sums of all ranks are added up
            self._tally.enter(window["sums"], window.get("before"))

    def _count_anew(self) -> None:
        """Let Lightning's counters begin the epoch again as the data does, which would else end as much sooner."""
        current = self.trainer.fit_loop.epoch_loop.batch_progress.current
        counts = dataclasses.asdict(current)  # one that is not completed yet is counted after this
        current.load_state_dict({name: count - current.ready for name, count in counts.items()})

    def _deal_out(self, checkpoint: dict[str, Any]) -> None:
        """Let Lightning's counters of batches, each rank's own, count the same data over another number of ranks."""
        before, here = len(checkpoint.get("generators", [])), self.trainer.world_size
        if self.trainer.state.fn != TrainerFn.FITTING or before in (0, here):
            return
        counters = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (counters["total"], counters["current"]):
            counts |= {name: count * before // here for name, count in counts.items()}

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: Any = "cpu", **arguments: Any
    ) -> TranslationTask:
        """The task of a checkpoint, in a fresh process, without its data; `arguments` as for the class."""
        checkpoint = torch.load(checkpoint_path, map_location=map_location, weights_only=True)
        tokenizer = Tokenizer(checkpoint["tokenizer"])
        task = cls.from_spec(checkpoint["task"], tokenizer, checkpoint["precision"], **arguments)
        task.load_state_dict(checkpoint["state_dict"])
        task._prepared = checkpoint["global_step"] > 0
        return task.eval()

    @classmethod
    def from_spec(cls, spec: dict[str, Any], tokenizer: Tokenizer, precision: str, **arguments: Any) -> TranslationTask:
        """The task that `spec` describes, with new weights; `arguments` as for the class."""
        saved = dict(spec)
        for name in ("stabilizer", "decoder_stabilizer"):
            saved[name] = Stabilizer.from_spec(saved[name]) if saved[name] else None
        task = cls(**{**saved, **arguments})
        task.tokenizer = tokenizer
        task._build(precision)
        return task


def _from_one(factor: Callable[[int], float]) -> Callable[[int], float]:
    """A schedule for torch, which counts the updates already made."""
    return lambda done: factor(done + 1)


class _Tally:
    """Sums over the batches of an update, and over all since the last log."""

    def __init__(self) -> None:
        self.losses = torch.zeros(2, dtype=torch.float64)
        """Loss and nll since the last log."""
        self.tokens = 0
        """Tokens since the last log."""
        self.before: tuple[Tensor, int] = (self.losses, 0)
        """Both without the last update."""
        self.window: tuple[Tensor | float, int] = (0.0, 0)
        """Loss and tokens of the update."""
        self.clock = time.monotonic()

    def add(self, loss: Tensor, nll: Tensor, tokens: int) -> None:
        """Take in a batch."""
        if not self.window[1]:
            self.before = self.losses, self.tokens
        losses = torch.stack([loss.double(), nll.double()])
        self.losses = self.losses.to(losses.device) + losses
        self.tokens += tokens
        self.window = self.window[0] + losses[0], self.window[1] + tokens

    def close(self, device: torch.device) -> Tensor:
        """End the update; its loss and tokens `[2]`."""
        gathered, self.window = self.gathered(device), (0.0, 0)
        return gathered

    def gathered(self, device: torch.device) -> Tensor:
        """Loss and tokens `[2]` of an update that has not ended."""
        loss, tokens = self.window
        return torch.stack([torch.as_tensor(loss, dtype=torch.float64, device=device), _count(tokens, device)])

    def drop(self) -> None:
        """Forget the last update."""
        self.losses, self.tokens = self.before
        self.window = 0.0, 0

    def enter(self, gathered: Sequence[float], before: Sequence[float] | None) -> None:
        """Go on with an update that has loss and tokens already; `before` it there were those since the log."""
        loss, tokens = gathered
        self.window = torch.tensor(loss, dtype=torch.float64), int(tokens)
        if before is not None:
            *losses, tokens = before
            self.before = self.losses.new_tensor(losses), int(tokens)

    def since_log(self, device: torch.device) -> Tensor:
        """Loss, nll and tokens `[3]` since the last log."""
        return _three(self.losses, self.tokens, device)

    def before_update(self, device: torch.device) -> Tensor:
        """The same without the update that is being made."""
        return _three(*self.before, device)

    def take(self, since_log: Sequence[float]) -> None:
        """Add loss, nll and tokens from before."""
        *losses, tokens = since_log
        self.losses = self.losses + self.losses.new_tensor(losses)
        self.tokens += int(tokens)

    def restart(self) -> float:
        """Forget all batches; seconds since the last time."""
        self.losses, self.tokens = torch.zeros_like(self.losses), 0
        self.window = 0.0, 0
        before, self.clock = self.clock, time.monotonic()
        return self.clock - before

    def pause(self) -> None:
        """Stop the clock."""
        self.clock -= time.monotonic()

    def go_on(self) -> None:
        """Let the clock run again, as if it had not stopped."""
        self.clock += time.monotonic()


def _three(losses: Tensor, tokens: int, device: torch.device) -> Tensor:
    return torch.cat([losses.to(device), _count(tokens, device)[None]])


def _count(tokens: int, device: torch.device) -> Tensor:
    """A number on a device, which the host does not wait for."""
    return torch.full((), tokens, dtype=torch.float64, device=device)
