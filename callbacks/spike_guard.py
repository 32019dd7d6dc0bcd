"""When training jumps, and when it is lost."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from stabilize import stats
from stabilize.callbacks.monitor import Monitor, step_of
from stabilize.errors import UserError
from stabilize.findings import ABOVE_START
from stabilize.gradients import Gradients
from stabilize.precision import gradient_scale, loss_scale

Policy: TypeAlias = Literal["report"]

CURVES = {"loss": "loss", "gradient_norm": "gradient norm"}
"""What is watched: its name in keys, and in words."""
LATELY = 100
"""Updates: what the loss of lately is the median of, and for how long an alarm of one kind is not repeated."""
FIRST = 10
"""Updates whose highest loss is where training began: a run that goes on from good weights begins low."""
CURES = "a longer warm-up, a lower learning rate, or pre-norm, B2T or DeepNorm"


class _Alarm(NamedTuple):
    """What is wrong at an update: its kind, and the same in one sentence with the remedy."""

    update: int
    kind: Literal["spike", "not finite", "no lower"]
    sentence: str


class SpikeGuard(Monitor):
    """Watch the loss and the gradient norm of every update; say so when one jumps, and when training has diverged.

    | key                                   | what                                                                   |
    |---------------------------------------|------------------------------------------------------------------------|
    | `stability/spikes`                    | updates so far at which the loss or the gradient norm jumped           |
    | `stability/spike_score/loss`          | share of updates at which the loss jumped: OLMo 2's SpikeScore         |
    | `stability/spike_score/gradient_norm` | the same of the gradient norm                                          |
    | `stability/diverged`                  | 1 while training is lost, else 0                                       |
    | `stability/diverged_at`               | the update since which it is; there only while it is                   |
    | `stability/skipped_updates`           | updates that the gradient scaler passed over; under `16-mixed` alone   |

    A value jumps where it is at least `deviations` standard deviations off the mean of the `window` before it, or is
    not finite. Training has diverged where the loss or the gradient norm of one of the last hundred updates is not
    finite, or the median loss of all of them is more than 1 (in nats: as much as batches never differ by) above the
    highest of the first ten, as long as it is. The norm is the true one, before clipping; the loss that of the whole
    update over all ranks, per token where the task says so (`update_loss`), else the mean of what `training_step`
    returned. Both wait on the device, and are looked at together at every n-th update.

    Args:
        every: updates between two looks; 0 switches the callback off.
        deviations: what counts as a jump.
        window: updates that a value is measured against; with fewer than a tenth of them nothing jumps.
        policy: what to do about it: `report` prints one sentence with the number and what helps.

    Raises:
        UserError: if a number is too small.
    """

    reads_weights = True

    def __init__(self, every: int = 10, deviations: float = 7.0, window: int = 1000, policy: Policy = "report") -> None:
        super().__init__(every)
        if not deviations > 0:
            raise UserError(f"deviations: {deviations} is no distance; a number above 0, such as 7, would do")
        if window < 10:
            raise UserError(f"window: {window} is too few updates to have a mean; 10 or more, such as 1000, would do")
        self.deviations = deviations
        self.window = window
        self.policy = policy
        self.progress: dict[str, Any] = {
            "recent": {name: [] for name in CURVES},
            "jumps": dict.fromkeys(CURVES, 0),
            "updates": 0,
            "spikes": 0,
            "skipped": 0,
            "first_losses": [],
            "diverged_at": None,
            "alarms": {},
        }
        """Everything that has been judged, in plain values: checkpoints hold it."""
        self._loss: Tensor | float = 0.0
        self._waiting: list[tuple[int, Tensor]] = []

    def summary(self) -> dict[str, float]:
        """Return the last numbers."""
        return dict(self.latest)

    def state_dict(self) -> dict[str, Any]:
        waiting = [(update, values.tolist()) for update, values in self._waiting]
        return super().state_dict() | {"progress": copy.deepcopy(self.progress), "waiting": waiting}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.progress |= copy.deepcopy(state_dict["progress"])
        self._waiting = [(update, torch.tensor(values)) for update, values in state_dict["waiting"]]

    # ------------------------------------------------------------------ watching

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self.every and not hasattr(pl_module, "update_loss"):
            # Lightning has divided the loss by the micro-batches of the window.
            self._loss = self._loss + loss.detach() / loss_scale(trainer)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        loss, self._loss = getattr(pl_module, "update_loss", self._loss), 0.0
        if not self.every:
            return
        gradients = getattr(pl_module, "gradients", None)  # whose norm clipping asks for too
        if not isinstance(gradients, Gradients):
            gradients = Gradients.of(optimizer)
        if gradients.there:  # else `training_step` returned None
            norm = stats.whole(gradients.norm).float() / gradient_scale(trainer, optimizer)
            self._waiting.append((step_of(trainer) + 1, torch.stack([torch.as_tensor(loss).to(norm), norm])))
        if self.is_due(trainer) and self._waiting:
            self._look(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._waiting:
            self._look(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._waiting:
            with suppress(RuntimeError):  # the device may be what failed
                self._look(trainer, alone=True)
        self._loss, self._waiting = 0.0, []

    # ------------------------------------------------------------------ judging

    def _look(self, trainer: pl.Trainer, alone: bool = False) -> None:
        """Judge the updates that wait, and send the numbers so far.

        Args:
            trainer: of the run.
            alone: whether other ranks may be gone, so that this one's values have to do.
        """
        progress, scaled = self.progress, getattr(trainer.precision_plugin, "scaler", None) is not None
        (updates, values), self._waiting = zip(*self._waiting, strict=True), []
        device = trainer.lightning_module.device
        rows = torch.stack([value.to(device) for value in values])
        rows = rows if alone else trainer.strategy.reduce(rows, reduce_op="mean")
        rows = rows.cpu()  # the one transfer to the host
        # An overflow that the gradient scaler has dealt with is no alarm.
        passed_over = rows[:, 0].isfinite() & ~rows[:, 1].isfinite() & scaled
        progress["skipped"] += int(passed_over.sum())
        kept = (~passed_over).nonzero().flatten()
        if len(kept):
            self.react(trainer, self._judge([updates[i] for i in kept.tolist()], rows[kept]))
        count = max(progress["updates"], 1)
        at = progress["diverged_at"]
        self.latest.pop("stability/diverged_at", None)
        numbers = {
            "stability/spikes": float(progress["spikes"]),
            **{f"stability/spike_score/{name}": jumps / count for name, jumps in progress["jumps"].items()},
            "stability/diverged": float(at is not None),
            **({} if at is None else {"stability/diverged_at": float(at)}),
            **({"stability/skipped_updates": float(progress["skipped"])} if scaled else {}),
        }
        self.send(trainer, numbers, updates[-1] - 1)

    def _judge(self, updates: list[int], rows: Tensor) -> list[_Alarm]:
        """Take in the loss and gradient norm `[updates, 2]`; return what is wrong, in order."""
        progress, alarms = self.progress, []
        jumped = torch.zeros(len(updates), dtype=torch.bool)
        for (name, words), values in zip(CURVES.items(), rows.unbind(1), strict=True):
            before = progress["recent"][name]
            far = stats.rolling_deviations(values, self.window, self.window // 10, torch.tensor(before))
            jumps = far >= self.deviations
            progress["jumps"][name] += int(jumps.sum())
            progress["recent"][name] = [*before, *values.tolist()][-self.window :]
            jumped |= jumps
            for i in jumps.nonzero().flatten().tolist():
                value, deviations = values[i].item(), far[i].item()
                if math.isfinite(value):
                    said = f"jumped to {value:.4g}, {deviations:.1f} standard deviations off its mean of late"
                    cure = (
                        "clipping (model.clipping: ZClip), a longer warm-up or a lower learning rate smooth such jumps"
                    )
                    alarms.append(_Alarm(updates[i], "spike", f"the {words} {said}; {cure}"))
                else:
                    cure = f"go back to an earlier checkpoint; {CURES} would do"
                    alarms.append(
                        _Alarm(updates[i], "not finite", f"the {words} is {value}: training has diverged; {cure}")
                    )
        progress["spikes"] += int(jumped.sum())
        progress["updates"] += len(updates)
        alarms += self._no_lower(updates, rows[:, 0].tolist())
        diverged = [alarm.update for alarm in alarms if alarm.kind != "spike"]
        lost = not all(math.isfinite(value) for curve in progress["recent"].values() for value in curve[-LATELY:])
        if not diverged and not lost:
            progress["diverged_at"] = None
        elif progress["diverged_at"] is None:
            progress["diverged_at"] = min(diverged, default=updates[-1])
        return sorted(alarms, key=lambda alarm: alarm.update)

    def _no_lower(self, updates: list[int], losses: list[float]) -> list[_Alarm]:
        """Return an alarm if the loss is above where it was in the beginning."""
        first = self.progress["first_losses"]
        first += [loss for loss in losses if math.isfinite(loss)][: FIRST - len(first)]
        lately = [loss for loss in self.progress["recent"]["loss"][-LATELY:] if math.isfinite(loss)]
        if len(lately) < min(LATELY, self.window) or not median(lately) > max(first, default=math.inf) + ABOVE_START:
            return []
        said = (
            f"the loss of the last {len(lately)} updates is {median(lately):.4g} in the middle, above the first ones'"
        )
        sentence = f"{said} {max(first):.4g}: training has diverged; {CURES} would do"
        return [_Alarm(updates[-1], "no lower", sentence)]

    def react(self, trainer: pl.Trainer, alarms: list[_Alarm]) -> None:
        """Do what the policy says. Every rank gets the same alarms."""
        for alarm in alarms:
            last = self.progress["alarms"].get(alarm.kind)
            if last is None or alarm.update - last >= LATELY:
                self.progress["alarms"][alarm.kind] = alarm.update
                if trainer.is_global_zero:
                    print(f"update {alarm.update:,}: {alarm.sentence}", flush=True)
