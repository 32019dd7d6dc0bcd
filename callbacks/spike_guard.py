"""When training jumps, and when it is lost."""

from __future__ import annotations

import copy
import math
from collections import deque
from contextlib import suppress
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from stabilize import generators, stats
from stabilize.callbacks import events
from stabilize.callbacks.monitor import Monitor, step_of
from stabilize.callbacks.rehearsal import Rehearsal, block_of
from stabilize.callbacks.snapshot import Snapshot, slow_down
from stabilize.callbacks.watched_update import WatchedUpdate
from stabilize.errors import TrainingStoppedError, UserError
from stabilize.findings import ABOVE_START, number
from stabilize.gradients import Gradients
from stabilize.precision import gradient_scale, loss_scale, unscale

Policy: TypeAlias = Literal["report", "skip", "rollback", "stop"]
Kind: TypeAlias = Literal["not finite", "overflow", "no lower", "spike"]

CURVES = {"loss": "loss", "gradient_norm": "gradient norm"}
"""What is watched: its name in keys, and in words."""
LATELY = 100
"""Updates: what the loss of lately is the median of, and for how long an alarm of one kind is not repeated."""
FIRST = 10
"""Updates whose highest loss is where training began: a run that goes on from good weights begins low."""
OVERFLOWS = 20
"""Updates in a row that the gradient scaler may pass over: each halves the loss scale, from 65,536 to 0.06."""
PROFILE = 10
"""Updates whose gradient norms, layer by layer, an event has."""
TEXTS = 50
"""Sentences that an event has the text of, for each rank."""
NAMED = 5
"""Sentences that are named on the terminal."""
GRAVITY: tuple[Kind, ...] = ("not finite", "overflow", "no lower", "spike")
CURES = "a longer warm-up, a lower learning rate, or pre-norm, B2T or DeepNorm"


class _Alarm(NamedTuple):
    """What is wrong at an update: its kind, what is seen, and the remedy in the words that follow it."""

    update: int
    kind: Kind
    said: str
    cure: str
    rises: bool = True
    """False of a jump down, which harms nothing."""


class SpikeGuard(Monitor):
    """Watch the loss and the gradient norm of every update; tell, or mend, it when one jumps or training is lost.

    | key                                   | what                                                                   |
    |---------------------------------------|------------------------------------------------------------------------|
    | `stability/spikes`                    | updates so far at which the loss or the gradient norm jumped           |
    | `stability/spike_score/loss`          | share of updates at which the loss jumped: OLMo 2's SpikeScore         |
    | `stability/spike_score/gradient_norm` | the same of the gradient norm                                          |
    | `stability/diverged`                  | 1 while training is lost, else 0                                       |
    | `stability/diverged_at`               | the update since which it is; there only while it is                   |
    | `stability/skipped_updates`           | updates that the gradient scaler (`16-mixed`) or this callback dropped |
    | `stability/rollbacks`                 | how often training was put back; under `rollback` alone                |

    A value jumps where it is at least `deviations` standard deviations off the mean of the `window` before it, or is
    not finite. Training has diverged where the loss or the gradient norm of one of the last hundred updates is not
    finite, or the median loss of all of them is more than 1 (in nats: as much as batches never differ by) above the
    highest of the first ten, as long as it is. The norm is the true one, before clipping; the loss that of the whole
    update over all ranks, per token where the task says so (`update_loss`), else the mean of what `training_step`
    returned. An update that the gradient scaler passes over is no trouble; twenty in a row are.

    Policies. `report` looks at all updates since the last look together at every n-th, in one transfer from the device,
    and says what it finds. The others judge each update before the optimiser's step, from numbers that are the same on
    all ranks: one transfer, and between ranks one more reduction of two numbers, an update. All of them then drop an
    update whose loss or gradient norm rises by a jump or is not finite: no weight, no moment of the optimiser, no
    running statistics, no `after_update` moves, and its values count for none after it. The update is counted all the
    same: the schedule goes on, and the batch is not seen again.

    - `skip`: nothing more. Where a median loss is too high there is no update to drop, and it is only said.
    - `rollback`: weights, optimiser, schedule, loss scale, buffers, state of the clipping and the windows of this
      callback are put back to a snapshot from at least `back` updates ago. The place in the data and the count of
      updates go on, so all batches since are skipped; the learning rate goes on from where the snapshot's was.
    - `stop`: end the run; no checkpoint is written.

    More than `patience` dropped updates in a row (`skip`), or rollbacks to the same snapshot, end the run too.

    Each event is a line of `events.jsonl` in the run folder, a row of the table `events` in Weights & Biases, and a
    sentence on the terminal; `README.md` has its fields. `report` tells a jump each time, and of the rest, as all
    sentences, one of a kind in a hundred updates.

    A module may say how an update is dropped (`drop_update`), else its gradients are set to None and its buffers put
    back; a data module may give the text of sentences (`written`), whose numbers a batch has (`index`).

    Args:
        every: updates between two records; 0 switches the callback off.
        deviations: what counts as a jump.
        window: updates that a value is measured against; with fewer than a tenth of them nothing jumps.
        policy: what to do about it: report, skip, rollback, stop.
        back: updates between two snapshots under `rollback`, of which two are kept, and how far back it goes at least.
        patience: dropped updates in a row, or rollbacks to one snapshot, that do not end the run.
        learning_rate_factor: of each rollback, on all learning rates from then on.

    Raises:
        UserError: if a number is too small, a policy that acts is switched off, or `rollback` meets sharded weights.
        TrainingStoppedError: by `stop`, or where patience has an end.
    """

    reads_weights = True

    def __init__(
        self,
        every: int = 10,
        deviations: float = 7.0,
        window: int = 1000,
        policy: Policy = "report",
        back: int = 50,
        patience: int = 5,
        learning_rate_factor: float = 1.0,
    ) -> None:
        super().__init__(every)
        if every == 0 and policy != "report":
            raise UserError(f"every: 0 switches the guard off, which policy: {policy} needs; every: 10 would do")
        if not deviations > 0:
            raise UserError(f"deviations: {deviations} is no distance; a number above 0, such as 7, would do")
        if window < 10:
            raise UserError(f"window: {window} is too few updates to have a mean; 10 or more, such as 1000, would do")
        if back < 1:
            raise UserError(f"back: {back} is no way back; 1 update or more, such as 50, would do")
        if patience < 0:
            raise UserError(f"patience: {patience} is no count; 0 or more, such as 5, would do")
        if not 0 < learning_rate_factor <= 1:
            raise UserError(
                f"learning_rate_factor: {learning_rate_factor} would not lower it; above 0 and up to 1 would do"
            )
        self.deviations = deviations
        self.window = window
        self.policy = policy
        self.back = back
        self.patience = patience
        self.learning_rate_factor = learning_rate_factor
        self.progress: dict[str, Any] = {
            "recent": {name: [] for name in CURVES},
            "jumps": dict.fromkeys(CURVES, 0),
            "updates": 0,
            "spikes": 0,
            "skipped": 0,
            "rollbacks": 0,
            "overflows": 0,
            "in_a_row": 0,
            "back_to": None,
            "first_losses": [],
            "diverged_at": None,
            "alarms": {},
            "rolled_back_at": 0,
        }
        """Everything that has been judged, in plain values: checkpoints hold it."""
        self._loss: Tensor | float = 0.0
        self._names: dict[Tensor, str] = {}
        self._window: list[Any] = []
        self._buffers: list[Tensor] = []
        self._waiting: list[WatchedUpdate] = []
        self._lately: deque[WatchedUpdate] = deque(maxlen=every + PROFILE)
        self._snapshots: list[Snapshot] = []
        self._put_back = False
        self._ranks = 1
        self._table: list[list[str]] = []
        self._unsent: int | None = None

    @property
    def acts(self) -> bool:
        """Whether an update is judged before it is made."""
        return self.policy != "report"

    def summary(self) -> dict[str, float]:
        """Return the last numbers."""
        return dict(self.latest)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.every:
            self._ranks = trainer.world_size
        if self.policy == "rollback" and isinstance(trainer.strategy, ModelParallelStrategy):
            raise UserError(
                "policy: rollback keeps whole copies of the weights, which ModelParallelStrategy shards; "
                "policy: skip, or strategy: ddp, would do"
            )

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "progress": copy.deepcopy(self.progress),
            "waiting": [(update.number, update.values.tolist()) for update in self._waiting],
            "lately": [update.state() for update in self._lately],
            "snapshots": [dict(vars(snapshot)) for snapshot in self._snapshots],
            "table": self._table,
            "begun": WatchedUpdate.plain(self._window),  # by an update that a validation has cut in two
            "buffers": [buffer.clone() for buffer in self._buffers] if self._window else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.progress |= copy.deepcopy(state_dict["progress"])
        self._table = state_dict.get("table", [])
        mine = self._ranks == 1  # of several ranks the checkpoint has the first one's batches
        self._window = WatchedUpdate.from_plain(state_dict.get("begun", []), mine)
        self._buffers = state_dict.get("buffers", [])
        known = [WatchedUpdate.from_state(state, mine) for state in state_dict.get("lately", [])]
        self._lately.extend(known)
        by_number = {update.number: update for update in known}
        for update, values in state_dict["waiting"]:
            waits = by_number.get(update) or WatchedUpdate(update, torch.zeros(2))
            waits.values = torch.tensor(values)
            self._waiting.append(waits)
        self._snapshots = [Snapshot(**snapshot) for snapshot in state_dict.get("snapshots", [])]

    # ------------------------------------------------------------------ watching

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._names = {parameter: name for name, parameter in pl_module.named_parameters()}
        if self.policy == "rollback" and not self._snapshots:
            self._snapshots = [self._snapshot(trainer, pl_module, step_of(trainer))]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.every:
            return
        if self.acts and not (self._window and self._buffers):  # none are in a checkpoint of `report`
            self._buffers = [buffer.detach().clone() for buffer in pl_module.buffers()]
        before = generators.state() if self.acts else None
        self._window.append(WatchedUpdate.given(batch, batch_idx, before))

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self.every and not hasattr(pl_module, "update_loss"):
            # Lightning has divided the loss by the micro-batches of the window.
            self._loss = self._loss + loss.detach() / loss_scale(trainer)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        loss, self._loss = getattr(pl_module, "update_loss", self._loss), 0.0
        window, self._window = self._window, []
        if not self.every:
            return
        gradients = Gradients.at(pl_module, optimizer)
        if gradients.there:  # else `training_step` returned None
            scale = gradient_scale(trainer, optimizer)
            norm = gradients.norm / scale
            update = WatchedUpdate(
                step_of(trainer) + 1,
                torch.stack([torch.as_tensor(loss).to(norm), norm]),
                window,
                gradients.norms / scale,
                [self._names.get(p, "") for p in gradients.parameters if p.grad is not None],
                learning_rate=optimizer.param_groups[0]["lr"],
            )
            self._waiting.append(update)
            self._lately.append(update)
        if self._waiting and (self.acts or self.is_due(trainer)):
            self._look(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.policy != "rollback" or trainer.fit_loop._should_accumulate():
            return
        if self._put_back:
            self._go_back(trainer, pl_module)
        update, rolled_back_at = step_of(trainer) + 1, self.progress["rolled_back_at"]
        if update - max(self._snapshots[-1].update, rolled_back_at) >= self.back:
            self._snapshots = [self._snapshots[-1], self._snapshot(trainer, pl_module, update)]
        self._put_back = False

    def _snapshot(self, trainer: pl.Trainer, pl_module: pl.LightningModule, update: int) -> Snapshot:
        """The training after an update."""
        watched = {name: self.progress[name] for name in ("recent", "first_losses", "rollbacks")}
        return Snapshot.take(trainer, pl_module, update, watched)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._window = []  # `on_train_batch_start` may have ended the epoch, after which no batch is used

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._waiting:
            self._look(trainer)
        elif self._unsent is not None:
            self._send(trainer, self._unsent)
        self._forget()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._waiting:
            with suppress(RuntimeError):  # the device may be what failed
                self._look(trainer, alone=True)
        self._forget()

    def _forget(self) -> None:
        """Let go of the model, and of an update that will not be finished."""
        self._loss, self._waiting, self._window, self._buffers, self._names = 0.0, [], [], [], {}

    # ------------------------------------------------------------------ judging

    def _look(self, trainer: pl.Trainer, alone: bool = False) -> None:
        """Judge the updates that wait, answer what is wrong, and send the numbers so far.

        Args:
            trainer: of the run.
            alone: whether other ranks may be gone, so that this one's values have to do.
        """
        updates, self._waiting = self._waiting, []
        device = trainer.lightning_module.device
        rows = torch.stack([update.values.to(device) for update in updates])
        rows = rows if alone else trainer.strategy.reduce(rows, reduce_op="mean")
        rows = rows.cpu()  # the one transfer to the host
        for update, row in zip(updates, rows, strict=True):
            update.values = row
        # An overflow that the gradient scaler has dealt with is no alarm.
        passed_over = rows[:, 0].isfinite() & ~rows[:, 1].isfinite() & self._scaled(trainer)
        alarms = self._overflows(trainer, updates, passed_over.tolist())
        kept = [update for update, passed in zip(updates, passed_over.tolist(), strict=True) if not passed]
        alarms += self._judge(kept)
        reason = self._answer(trainer, updates, alarms, alone)
        for update in updates:
            update.let_go()
        if reason or alone or not self.acts or alarms or self.is_due(trainer):
            self._send(trainer, updates[-1].number)
        else:
            self._unsent = updates[-1].number
        if reason:
            raise TrainingStoppedError(reason)

    def _scaled(self, trainer: pl.Trainer) -> bool:
        return getattr(trainer.precision_plugin, "scaler", None) is not None

    def _send(self, trainer: pl.Trainer, update: int) -> None:
        """Send the numbers so far."""
        progress, self._unsent = self.progress, None
        count = max(progress["updates"], 1)
        at = progress["diverged_at"]
        self.latest.pop("stability/diverged_at", None)
        drops = self._scaled(trainer) or self.policy in ("skip", "rollback")
        numbers = {
            "stability/spikes": float(progress["spikes"]),
            **{f"stability/spike_score/{name}": jumps / count for name, jumps in progress["jumps"].items()},
            "stability/diverged": float(at is not None),
            **({} if at is None else {"stability/diverged_at": float(at)}),
            **({"stability/skipped_updates": float(progress["skipped"])} if drops else {}),
            **({"stability/rollbacks": float(progress["rollbacks"])} if self.policy == "rollback" else {}),
        }
        self.send(trainer, numbers, update - 1)

    def _overflows(self, trainer: pl.Trainer, updates: list[WatchedUpdate], passed_over: list[bool]) -> list[_Alarm]:
        """Count the updates that the gradient scaler passes over; return an alarm where there are too many in a row."""
        alarms = []
        for update, passed in zip(updates, passed_over, strict=True):
            self.progress["skipped"] += passed
            in_a_row = self.progress["overflows"] = (self.progress["overflows"] + 1) * passed
            if passed and in_a_row % OVERFLOWS == 0:
                said = (
                    f"{in_a_row} updates in a row overflowed in float16 and were passed over, and the loss scale is "
                    f"down to {number(float(loss_scale(trainer)))}"
                )
                alarms.append(_Alarm(update.number, "overflow", said, f"; {CURES}, or precision bf16-mixed, would do"))
        return alarms

    def _judge(self, updates: list[WatchedUpdate]) -> list[_Alarm]:
        """Take in updates; return what is wrong. Values of one that is to be dropped are not taken in."""
        if not updates:
            return []
        progress, alarms = self.progress, []
        rows = torch.stack([update.values for update in updates])
        jumped = torch.zeros(len(updates), dtype=torch.bool)
        for number_of, (name, words) in enumerate(CURVES.items()):
            before, values = progress["recent"][name], rows[:, number_of]
            earlier, fewest = torch.tensor(before), self.window // 10
            far = stats.rolling_deviations(values, self.window, fewest, earlier)
            finite = torch.cat([torch.full((self.window,), math.nan), earlier, values]).isfinite()
            counted = finite.unfold(0, self.window, 1)[-len(values) - 1 : -1].sum(1)  # before each of the values
            for update, deviations, count in zip(updates, far.tolist(), counted.tolist(), strict=True):
                update.deviations[number_of] = deviations if count >= fewest else None
            jumps = far >= self.deviations
            progress["jumps"][name] += int(jumps.sum())
            jumped |= jumps
            alarms += [
                self._jump(updates[i].number, words, values[i].item(), far[i].item(), [*before, *values[:i].tolist()])
                for i in jumps.nonzero().flatten().tolist()
            ]
        progress["spikes"] += int(jumped.sum())
        progress["updates"] += len(updates)
        if not (self.acts and any(alarm.rises for alarm in alarms)):
            progress["in_a_row"] *= self.policy != "skip"
            for number_of, name in enumerate(CURVES):
                progress["recent"][name] = [*progress["recent"][name], *rows[:, number_of].tolist()][-self.window :]
            alarms += self._no_lower([update.number for update in updates], rows[:, 0].tolist())
        lost = not all(math.isfinite(value) for curve in progress["recent"].values() for value in curve[-LATELY:])
        diverged = [
            alarm.update for alarm in alarms if alarm.kind == "no lower" or (alarm.kind != "spike" and not self.acts)
        ]
        if not diverged and not lost:
            progress["diverged_at"] = None
        elif progress["diverged_at"] is None:
            progress["diverged_at"] = min(diverged, default=updates[-1].number)
        return alarms

    def _jump(self, update: int, words: str, value: float, deviations: float, before: list[float]) -> _Alarm:
        """The alarm of a jump of the curve called `words`, with the values before it."""
        if not math.isfinite(value):
            cure = f": training has diverged; go back to an earlier checkpoint; {CURES} would do"
            cure += "" if self.acts else "; policy: skip, rollback or stop looks for the module"
            return _Alarm(update, "not finite", f"the {words} is {value}", cure)
        said = f"the {words} jumped to {value:.4g}, {deviations:.1f} standard deviations off its mean of late"
        cure = "; clipping (model.clipping: ZClip), a longer warm-up or a lower learning rate smooth such jumps"
        rises = value > fmean(filter(math.isfinite, before[-self.window :]))
        return _Alarm(update, "spike", said, cure, rises)

    def _no_lower(self, updates: list[int], losses: list[float]) -> list[_Alarm]:
        """Return an alarm if the loss is above where it was in the beginning."""
        first = self.progress["first_losses"]
        first += [loss for loss in losses if math.isfinite(loss)][: FIRST - len(first)]
        lately = [loss for loss in self.progress["recent"]["loss"][-LATELY:] if math.isfinite(loss)]
        if len(lately) < min(LATELY, self.window) or not median(lately) > max(first, default=math.inf) + ABOVE_START:
            return []
        said = (
            f"the loss of the last {len(lately)} updates is {median(lately):.4g} in the middle, above the first ones' "
            f"{max(first):.4g}"
        )
        return [_Alarm(updates[-1], "no lower", said, f": training has diverged; {CURES} would do")]

    # ------------------------------------------------------------------ answering

    def _answer(self, trainer: pl.Trainer, updates: list[WatchedUpdate], alarms: list[_Alarm], alone: bool) -> str:
        """Do what the policy says about the gravest alarm of each update; return why the run has to end, if it has to.

        Every rank gets the same alarms.
        """
        reason = ""
        order = sorted(alarms, key=lambda alarm: (alarm.update, not alarm.rises, GRAVITY.index(alarm.kind)))
        gravest = {alarm.update: alarm for alarm in reversed(order)}
        for update in updates:
            if (alarm := gravest.get(update.number)) is None:
                continue
            action, done = ("reported", "") if alone else self._action(alarm)
            last = self.progress["alarms"].get(alarm.kind)
            again = action == "reported" and last is not None and alarm.update - last < LATELY
            if again and alarm.kind != "spike":
                continue
            rehearsal = None if action == "reported" else self._drop(trainer, update)
            event = self._event(trainer, update, alarm, action, rehearsal, alone)
            event["sentence"] += alarm.cure if action == "reported" else f"; {done}"
            sentence = f"update {alarm.update:,}: {event['sentence']}"
            if trainer.is_global_zero:
                self._table = [*self._table, events.row(event)][-events.ROWS :]
                events.publish(trainer, event, self._table)
                if not again and action != "stopped":
                    print(sentence, flush=True)
            if not again:
                self.progress["alarms"][alarm.kind] = alarm.update
            if action == "stopped":
                reason = sentence + self._last_checkpoint(trainer)
        return reason

    def _action(self, alarm: _Alarm) -> tuple[str, str]:
        """What is done about an alarm, and the same in words."""
        progress = self.progress
        if not self.acts or not alarm.rises or (self.policy == "skip" and alarm.kind == "no lower"):
            return "reported", ""
        if self.policy == "stop":
            if alarm.kind != "spike":
                progress["diverged_at"] = alarm.update
            return "stopped", "policy: stop ends training before this update"
        target = self._target(alarm.update) if self.policy == "rollback" else None
        in_a_row = progress["in_a_row"] = progress["in_a_row"] * (target == progress["back_to"]) + 1
        progress["back_to"] = target
        if in_a_row > self.patience or (self.policy == "skip" and alarm.kind == "overflow"):
            progress["diverged_at"] = alarm.update
            if self.policy == "skip":
                return (
                    "stopped",
                    f"{in_a_row} updates in a row cannot be used, so to skip them does not help; {CURES} may",
                )
            return "stopped", (
                f"{in_a_row - 1} rollbacks to update {target:,} have not helped; a larger back, a lower "
                f"learning_rate_factor, {CURES} may"
            )
        progress["skipped"] += alarm.kind != "overflow"  # else it is counted
        if self.policy == "skip":
            return "skipped", "the update is skipped"
        progress["rollbacks"] += 1
        progress["diverged_at"] = None
        self._put_back = True
        return "rolled back", f"back to update {target:,}"

    def _target(self, update: int) -> int:
        """The update of the snapshot that a rollback goes back to: the newest that is old enough, else the oldest."""
        taken = [snapshot.update for snapshot in self._snapshots]
        return max((number for number in taken if update - number >= self.back), default=taken[0])

    def _go_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put training back to the snapshot; those after it are of a course that is given up."""
        progress = self.progress
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.update <= progress["back_to"]]
        chosen = self._snapshots[-1]
        chosen.restore(trainer, pl_module)
        progress |= {name: copy.deepcopy(chosen.watched[name]) for name in ("recent", "first_losses")}
        progress["rolled_back_at"] = step_of(trainer) + 1
        if self.learning_rate_factor < 1:
            slow_down(trainer, self.learning_rate_factor ** (progress["rollbacks"] - chosen.watched["rollbacks"]))

    def _drop(self, trainer: pl.Trainer, update: WatchedUpdate) -> Rehearsal:
        """Let the update that is being made change nothing, and run its batches once more to see what was wrong."""
        pl_module = trainer.lightning_module
        unscale(trainer, trainer.optimizers[0])  # which says to the scaler whether they overflowed
        self._let_go(pl_module)
        window = [(given.batch, given.number, given.generators) for given in update.window]
        rehearsal = Rehearsal()
        with suppress(RuntimeError):  # out of memory, or a kind of checkpointing that cannot: the event says less then
            rehearsal = Rehearsal.of(trainer, pl_module, window)
        self._let_go(pl_module)
        return rehearsal

    def _let_go(self, pl_module: pl.LightningModule) -> None:
        drop = getattr(pl_module, "drop_update", pl_module.zero_grad)
        drop()
        for buffer, before in zip(pl_module.buffers(), self._buffers, strict=True):
            buffer.detach().copy_(before)

    # ------------------------------------------------------------------ telling

    def _event(
        self,
        trainer: pl.Trainer,
        update: WatchedUpdate,
        alarm: _Alarm,
        action: str,
        rehearsal: Rehearsal | None,
        alone: bool,
    ) -> dict[str, Any]:
        """All that is known of an update with an alarm; README has the fields."""
        together = trainer.world_size > 1 and not alone
        ranks = [self._of_this_rank(trainer, update, rehearsal)] * (trainer.world_size if together else 1)
        if together:
            torch.distributed.all_gather_object(ranks, ranks[0])
        profile: list[dict[str, Any]] = []
        if together or trainer.world_size == 1:  # to put shards together takes all ranks
            profile = [{"update": one.number, "gradient_norm": one.by_layer()} for one in self._until(update)]
        first = next((rank["first_not_finite"] for rank in ranks if rank["first_not_finite"]), None)
        where = f", first in the {first['what']} of {first['module']}" if first else ""
        if first is None and alarm.kind == "not finite" and profile:
            first, where = self._of_gradients(profile[-1]["gradient_norm"])
        loss, norm = update.values.tolist()
        return {
            "update": alarm.update,
            "kind": alarm.kind,
            "sentence": alarm.said + where + (_whose(ranks, first) if alarm.kind in ("not finite", "spike") else ""),
            "policy": self.policy,
            "action": action,
            "back_to": self.progress["back_to"] if action == "rolled back" else None,
            "loss": loss,
            "loss_deviations": update.deviations[0],
            "gradient_norm": norm,
            "gradient_norm_deviations": update.deviations[1],
            "learning_rate": float(update.learning_rate),
            "epoch": trainer.current_epoch,
            "ranks": ranks,
            "first_not_finite": first,
            "activation_rms": rehearsal.activation_rms if rehearsal else {},
            "profile": profile,
        }

    def _of_this_rank(self, trainer: pl.Trainer, update: WatchedUpdate, rehearsal: Rehearsal | None) -> dict[str, Any]:
        """The batches that this rank had in an update, their sentences, and what was wrong in them."""
        first = rehearsal.first if rehearsal else None
        sentences = update.sentences
        told = sentences if first is None else [sentences[first["batch"]]]
        lines = [line for batch in told for line in batch or ()][:TEXTS]
        written = getattr(getattr(trainer, "datamodule", None), "written", None)
        pairs = written(lines) if callable(written) and lines else []
        return {
            "rank": trainer.global_rank,
            "batches": [given.number for given in update.window],
            "sentences": sentences,
            "earlier": [
                {"update": one.number, "sentences": one.sentences} for one in self._until(update) if one is not update
            ],
            "texts": [
                {"sentence": line, "source": source, "target": target}
                for line, (source, target) in zip(lines, pairs, strict=False)
            ],
            "first_not_finite": first and {"rank": trainer.global_rank, **first},
        }

    def _of_gradients(self, norms: dict[str, float]) -> tuple[dict[str, str] | None, str]:
        """Where the gradient of the weights is not finite, as an event has it and in words, from its norm by layer.

        A backward that begins well meets the last of these layers first; where all are, none can be told.
        """
        layers = dict.fromkeys(block_of(name) for name in self._names.values())  # in the module's order
        broken = [layer for layer in layers if not math.isfinite(norms.get(layer, 0.0))]
        if not broken:
            return None, ""
        if len(broken) == len(norms):
            return None, ", and no layer has a finite gradient"
        where = f", and the gradients of {len(broken)} of {len(norms)} blocks are not finite, the last {broken[-1]}"
        return {"module": broken[-1], "what": "gradient by the weights"}, where

    def _until(self, update: WatchedUpdate) -> list[WatchedUpdate]:
        """The update and those shortly before it."""
        return [one for one in self._lately if 0 <= update.number - one.number < PROFILE]

    def _last_checkpoint(self, trainer: pl.Trainer) -> str:
        """Where to go on from, in words."""
        saved = trainer.checkpoint_callback
        path = getattr(saved, "last_model_path", "") or getattr(saved, "best_model_path", "")
        return f"; the last checkpoint is {path}" if path else "; there is no checkpoint yet"


def _whose(ranks: list[dict[str, Any]], first: dict[str, Any] | None) -> str:
    """The sentences of an update in words: a few of the batch where it went wrong, else of all."""
    if first and "batch" in first:
        ids = ranks[first["rank"]]["sentences"][first["batch"]]
    else:
        ids = [line for rank in ranks for batch in rank["sentences"] for line in batch or ()]
    if not ids:
        return ""
    more = f" and {len(ids) - NAMED:,} more" if len(ids) > NAMED else ""
    return f" (sentences {', '.join(map(str, ids[:NAMED]))}{more})"
