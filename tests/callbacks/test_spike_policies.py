"""What the spike guard does about a bad update: skip it, go back, or stop; and what it writes down."""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.amp import GradScaler

from stabilize.callbacks import Checkpoints, SpikeGuard, WeightAverage
from stabilize.callbacks.rehearsal import block_of
from stabilize.callbacks.snapshot import Snapshot, slow_down
from stabilize.callbacks.spike_guard import OVERFLOWS, PROFILE
from stabilize.commands import training
from stabilize.data import SyntheticCorpus
from stabilize.data.pairs import Pairs
from stabilize.decoding import BeamSearch
from stabilize.errors import TrainingStoppedError, UserError
from stabilize.model.layer import compiled_run
from stabilize.strategies import (
    InverseSqrt,
    MaskedBatchNorm,
    Noam,
    NoWarmup,
    PowerNorm,
    SigmaReparam,
    Stabilizer,
    ZClip,
)
from stabilize.task import TranslationTask
from tests import wandb_file
from tests.callbacks.monitors import stance
from tests.callbacks.poison import ADAM, POISONED, Ending, Infinite, Poison, Trail, batches, equal, events, train
from tests.callbacks.test_spike_guard import Scripted, curve, run
from tests.callbacks.tiny import hooks, loader, records, trainer
from tests.checkout import ROOT
from tests.tasks import ENGLISH, GERMAN, Sentences, fit, rows, sentence_batch, small_task, small_trainer
from tests.tasks import curve as logged_curve

BAD = 5
"""The update that is poisoned."""


def guard(policy: Any = "skip", **options: Any) -> SpikeGuard:
    return SpikeGuard(**{"every": 1, "policy": policy, "back": 2} | options)


# ---------------------------------------------------------------------- skip


SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bf16-mixed"},
    "checkpointed": {"checkpoint_layers": True},
    "zclip": {"clipping": ZClip(warmup=2)},
    "batch_norm": {"stabilizer": Stabilizer(norm=MaskedBatchNorm(), warmup=NoWarmup())},
    "power_norm": {"stabilizer": Stabilizer(norm=PowerNorm(warmup=0), warmup=NoWarmup())},
    "sigma_reparam": {"stabilizer": Stabilizer(attention=SigmaReparam(), warmup=NoWarmup())},
}


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "nan") for name in SETTINGS), ("float32", "infinite"), ("power_norm", "infinite")]
)
def test_a_skipped_update_has_never_been(tmp_path: Path, name: str, kind: str) -> None:
    """Weights, moments and statistics are those of a training that was never given the bad batch."""
    given = batches(8)
    without = train(tmp_path / "without", given[: BAD - 1] + given[BAD:], guard(), **SETTINGS[name])
    found = train(tmp_path / "with", given, guard(), Poison({BAD: kind}), **SETTINGS[name])
    assert equal(found[0], without[0])
    assert len(rows(tmp_path / "with")) > 0
    assert all(math.isfinite(value) for row in rows(tmp_path / "with") for value in row.values())
    assert [event["update"] for event in events(tmp_path / "with")] == [BAD]


def test_one_bad_batch_of_several_spoils_the_update(tmp_path: Path) -> None:
    given = batches(16)
    options = {"accumulate_grad_batches": 2}
    without = train(tmp_path / "without", given[: 2 * BAD - 2] + given[2 * BAD :], guard(), **options)
    found = train(tmp_path / "with", given, guard(), Poison({BAD: "nan"}, batch=1), **options)
    assert equal(found[0], without[0])
    (event,) = events(tmp_path / "with")
    assert event["first_not_finite"]["batch"] == 1
    assert event["ranks"][0]["batches"] == [2 * BAD - 2, 2 * BAD - 1]
    assert event["ranks"][0]["sentences"] == [batch.index.tolist() for batch in given[2 * BAD - 2 : 2 * BAD]]
    assert [text["sentence"] for text in event["ranks"][0]["texts"]] == []  # these batches are of no data module


@pytest.mark.parametrize("kind", ["nan", "infinite"])
def test_under_a_gradient_scaler(tmp_path: Path, kind: str) -> None:
    """An infinite gradient is its own business, a loss that is no number is not; either way the update is none."""
    given, task = batches(8), None
    trail = Trail()
    precision = {"plugins": MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=256.0))}
    watching = guard()
    _, task, _ = train(tmp_path, given, watching, Poison({BAD: kind}), trail, **precision)
    assert equal(trail.states[BAD - 1], trail.states[BAD - 2])
    assert not equal(trail.states[BAD], trail.states[BAD - 1])
    assert all(weight.isfinite().all() for weight in task.parameters())
    assert watching.summary()["stability/skipped_updates"] == 1
    assert [event["update"] for event in events(tmp_path)] == ([BAD] if kind == "nan" else [])


def test_the_schedule_and_the_count_go_on_past_a_skipped_update(tmp_path: Path) -> None:
    stabilizer = Stabilizer(warmup=Noam(4))
    for name, poison in (("with", {BAD: "nan"}), ("without", {})):
        train(tmp_path / name, batches(8), guard(), Poison(poison), stabilizer=stabilizer)
    rates = [[row["lr"] for row in rows(tmp_path / name) if "lr" in row] for name in ("with", "without")]
    assert rates[0] == rates[1]
    assert len(rates[0]) == 8


def test_a_skipped_update_is_in_no_logged_number(tmp_path: Path) -> None:
    """Neither is it said again what was logged last."""
    train(tmp_path, batches(8), guard(), Poison({BAD: "nan"}))
    for key in ("train/loss", "train/nll", "train/perplexity", "gradient_norm/total_clipped"):
        assert [int(row["step"]) + 1 for row in rows(tmp_path) if key in row] == [1, 2, 3, 4, 6, 7, 8]


def test_running_statistics_of_any_module_are_put_back(tmp_path: Path) -> None:
    """torch's own norms move theirs in the forward."""

    class Normed(Scripted):
        def __init__(self, losses: list[float]) -> None:
            super().__init__(losses)
            self.norm = torch.nn.BatchNorm1d(3)

        def training_step(self, given: Any, batch_idx: int) -> torch.Tensor:
            x = torch.full((2, 3), math.nan if batch_idx == 2 else 1.0 + batch_idx)
            return super().training_step(given, batch_idx) + 0 * self.norm(x).sum()

    task = Normed([1.0] * 4)
    trainer(tmp_path, guard(), max_steps=4).fit(task, loader([0] * 4))
    expected = torch.nn.BatchNorm1d(3)
    for k in (0, 1, 3):
        expected(torch.full((2, 3), 1.0 + k))
    assert task.norm.running_mean is not None
    assert task.norm.running_mean.equal(expected.running_mean)
    assert task.norm.num_batches_tracked == 3


def test_a_jump_up_is_skipped_and_one_down_is_not(tmp_path: Path) -> None:
    losses = curve(60)
    losses[30], losses[40] = 40.0, 0.0
    watching = guard(window=40, every=10)
    run(tmp_path, losses, watching)
    assert [(event["update"], event["action"]) for event in events(tmp_path)] == [(31, "skipped"), (41, "reported")]
    assert watching.progress["recent"]["loss"] == pytest.approx((losses[:30] + losses[31:])[-40:])
    assert watching.summary()["stability/spikes"] == 2
    assert watching.summary()["stability/skipped_updates"] == 1
    (up, _) = events(tmp_path)
    before = losses[:30]
    far = (40 - statistics.fmean(before)) / statistics.pstdev(before)
    assert up["loss_deviations"] == pytest.approx(far, rel=1e-4)
    assert up["loss"] == 40.0


# ---------------------------------------------------------------------- rollback


@pytest.mark.parametrize(
    ("name", "kind"), [("float32", "nan"), ("zclip", "infinite"), ("power_norm", "infinite"), ("noam", "nan")]
)
def test_after_a_rollback_the_updates_since_have_never_been(tmp_path: Path, name: str, kind: str) -> None:
    """What goes on is a training on the batches up to the snapshot and those after the bad one; its schedule too."""
    settings = SETTINGS | {"noam": {"stabilizer": Stabilizer(warmup=Noam(4))}}
    given = batches(12)
    bad, kept = 8, 6  # snapshots are taken after updates 0, 2, 4, 6
    without, with_ = guard("report"), guard("rollback")
    expected = train(tmp_path / "without", given[:kept] + given[bad:], without, **settings[name])
    found = train(tmp_path / "with", given, with_, Poison({bad: kind}), **settings[name])
    assert equal(found[0], expected[0])
    assert with_.progress["recent"] == without.progress["recent"]
    rates = [[row["lr"] for row in rows(tmp_path / one) if "lr" in row] for one in ("with", "without")]
    assert rates[0][:kept] + rates[0][bad:] == rates[1]
    (event,) = events(tmp_path / "with")
    assert (event["update"], event["action"], event["back_to"]) == (bad, "rolled back", kept)
    assert with_.summary()["stability/rollbacks"] == 1
    assert found[1].trainer.global_step == 12, "the count goes on"


def test_each_rollback_lowers_the_learning_rate(tmp_path: Path) -> None:
    watching = guard("rollback", learning_rate_factor=0.5)
    train(tmp_path, batches(16), watching, Poison({4: "nan", 12: "nan", 14: "nan"}))
    rates = [row["lr"] for row in rows(tmp_path) if "lr" in row]
    full = ADAM.keywords["lr"]
    assert rates == pytest.approx([full] * 4 + [full / 2] * 8 + [full / 4] * 2 + [full / 8] * 2)
    assert [event["back_to"] for event in events(tmp_path)] == [2, 10, 10]


def test_the_first_updates_are_rolled_back_to_the_start(tmp_path: Path) -> None:
    """The schedule too; each lowers the learning rate once more."""
    watching = guard("rollback", learning_rate_factor=0.5)
    stabilizer, poison = Stabilizer(warmup=Noam(4)), Poison({1: "infinite", 2: "nan", 6: "nan"})
    train(tmp_path, batches(8), watching, poison, stabilizer=stabilizer)
    assert [event["back_to"] for event in events(tmp_path)] == [0, 0, 4]
    factor = Noam(4).at(16, 8).factor
    full = [ADAM.keywords["lr"] * factor(update) for update in range(1, 5)]
    slowed = [full[0], full[0] / 2, *(rate / 4 for rate in full), *(rate / 8 for rate in full[2:])]
    assert [row["lr"] for row in rows(tmp_path) if "lr" in row] == pytest.approx(slowed)


def test_slow_divergence_is_rolled_back_and_in_the_end_stops(tmp_path: Path, capsys: Any) -> None:
    """Whatever the weights are, this loss climbs: no way back helps."""
    losses = [5.0] + [4.0] * 50 + [5.0 + i / 25 for i in range(300)]
    watching = SpikeGuard(every=10, deviations=1e9, policy="rollback", back=20, patience=2)
    with pytest.raises(TrainingStoppedError, match=r"2 rollbacks to update .* have not helped") as end:
        run(tmp_path, losses, watching)
    found = events(tmp_path)
    assert [event["kind"] for event in found] == ["no lower"] * len(found)
    assert [event["action"] for event in found] == ["rolled back"] * (len(found) - 1) + ["stopped"]
    assert found[-1]["sentence"] in str(end.value)
    assert records(tmp_path, "stability")[-1]["stability/diverged_at"] == found[-1]["update"]


def test_what_is_skipped_says_nothing_of_slow_divergence(tmp_path: Path) -> None:
    losses = [5.0] + [4.0] * 50 + [5.0 + i / 25 for i in range(200)]
    watching = SpikeGuard(every=10, deviations=1e9, policy="skip")
    run(tmp_path, losses, watching)
    assert {event["action"] for event in events(tmp_path)} == {"reported"}
    assert watching.summary()["stability/diverged"] == 1
    assert watching.summary()["stability/skipped_updates"] == 0


@pytest.mark.parametrize(("policy", "tries"), [("skip", "4 updates in a row"), ("rollback", "3 rollbacks to update 4")])
def test_what_does_not_help_ends(tmp_path: Path, policy: str, tries: str) -> None:
    watching = guard(policy, patience=3)
    poison = dict.fromkeys(range(6, 30), "nan")
    state, task, reason = train(tmp_path, batches(30), watching, Poison(poison))
    assert tries in reason
    assert [event["action"] for event in events(tmp_path)][-2:] == [
        {"skip": "skipped", "rollback": "rolled back"}[policy],
        "stopped",
    ]
    assert task.trainer.global_step == 8, "updates 1 to 8 were counted, the ninth was not begun"
    assert all(value.isfinite().all() for value in state.values())


def test_trouble_after_each_new_start_ends(tmp_path: Path) -> None:
    """Each rollback is followed by as many good updates as make no new snapshot that is old enough."""
    poison = dict.fromkeys(range(8, 60, 3), "nan")
    _, task, reason = train(tmp_path, batches(60), guard("rollback", patience=3), Poison(poison))
    assert "3 rollbacks to update 6 have not helped" in reason
    assert task.trainer.global_step < 20


# ---------------------------------------------------------------------- stop


def test_stop_ends_with_the_weights_of_before(tmp_path: Path) -> None:
    trail, saves = Trail(), ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_last=True)
    watching = guard("stop")
    options = {"enable_checkpointing": True}
    state, _, reason = train(tmp_path, batches(8), watching, Poison({BAD: "nan"}), trail, saves, **options)
    assert equal(state, trail.states[BAD - 2])
    last = tmp_path / "saved" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 4
    assert reason.startswith(f"update {BAD}: the loss is nan, first in the output of model.{POISONED}")
    assert reason.endswith(f"; the last checkpoint is {last}")
    assert records(tmp_path, "stability")[-1] | {"step": 0} == {
        "step": 0,
        "stability/spikes": 1,
        "stability/spike_score/loss": pytest.approx(1 / 5),
        "stability/spike_score/gradient_norm": pytest.approx(1 / 5),
        "stability/diverged": 1,
        "stability/diverged_at": BAD,
    }


@pytest.mark.parametrize("policy", ["report", "skip", "rollback", "stop"])
def test_overflows_that_do_not_end_are_told_with_the_scale(tmp_path: Path, policy: Any, capsys: Any) -> None:
    """A loss a million times too large, again and again (FIELD_REPORTS 1.1): no policy loops in silence."""

    class Huge(Scripted):
        def training_step(self, given: Any, batch_idx: int) -> torch.Tensor:
            return 1e6 * super().training_step(given, batch_idx) + Infinite.apply(0 * self.weight)

    precision = {"plugins": MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=65536.0))}
    watching = SpikeGuard(every=10, policy=policy, patience=0)
    made = trainer(tmp_path, watching, max_steps=30, **precision)
    if policy == "report":
        made.fit(Huge([2.0] * 30), loader([0] * 30))
        said = capsys.readouterr().out
    else:
        with pytest.raises(TrainingStoppedError) as end:
            made.fit(Huge([2.0] * 30), loader([0] * 30))
        said = str(end.value)
    (event,) = events(tmp_path)
    assert event["update"] == OVERFLOWS
    assert event["kind"] == "overflow"
    assert deviations(event) == (None, None), "it is not judged"
    assert f"{OVERFLOWS} updates in a row overflowed in float16" in said
    assert re.search(r"loss scale is down to 0\.(125|0625)", said), said


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_first_overflows_of_float16_are_counted_and_no_trouble(tmp_path: Path) -> None:
    """The scale of the loss is still being found (FIELD_REPORTS 1.11); the schedule goes on meanwhile."""
    precision = {"plugins": MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2048.0))}
    watching, stabilizer = guard("stop"), Stabilizer(warmup=Noam(4))
    trail, poison = Trail(), Poison(dict.fromkeys((1, 2, 3), "infinite"))
    _, task, reason = train(tmp_path, batches(6), watching, poison, trail, stabilizer=stabilizer, **precision)
    assert not reason
    assert not events(tmp_path)
    assert [row["stability/skipped_updates"] for row in records(tmp_path, "stability")] == [1, 2, 3, 3, 3, 3]
    assert all(math.isfinite(value) for row in records(tmp_path, "stability") for value in row.values())
    assert task.trainer.precision_plugin.scaler.get_scale() == 2048 / 2**3
    assert trail.states[2]["model.source_embedding.weight"].equal(trail.states[0]["model.source_embedding.weight"])
    factor = Noam(4).at(16, 6).factor
    rates = [row["lr"] for row in rows(tmp_path) if "lr" in row]
    assert rates == pytest.approx([ADAM.keywords["lr"] * factor(update) for update in range(1, 7)])


@pytest.mark.parametrize("repeated", [1, 256])
def test_the_norm_that_is_judged_does_not_grow_with_the_batch(tmp_path: Path, repeated: int) -> None:
    """Neither does it overflow in half precision, though losses are summed (FIELD_REPORTS 1.2)."""
    plain, half = guard("report"), guard("report")
    train(tmp_path / "plain", [sentence_batch(0)], plain)
    many = sentence_batch(*[0] * repeated)
    precision = {"plugins": MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=256.0))}
    train(tmp_path / "half", [many], half, **precision)
    for name, tolerance in (("loss", 1e-3), ("gradient_norm", 1e-2)):
        (expected,), (found,) = plain.progress["recent"][name], half.progress["recent"][name]
        assert found == pytest.approx(expected, rel=tolerance)


def test_to_judge_each_update_takes_one_transfer_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    for method in ("cpu", "item", "tolist", "__float__", "__bool__"):
        read = getattr(torch.Tensor, method)

        def counted(self: torch.Tensor, *arguments: Any, method: str = method, read: Any = read) -> Any:
            if Path(sys._getframe(1).f_code.co_filename).stem in ("spike_guard", "watched_update", "gradients"):
                moved.append(method)
            return read(self, *arguments)

        monkeypatch.setattr(torch.Tensor, method, counted)
    train(tmp_path, batches(6), guard("skip", every=3), logger=False)
    assert moved.count("cpu") == 6


# ---------------------------------------------------------------------- several processes


def test_two_ranks_drop_what_is_bad_on_one_of_them(tmp_path: Path) -> None:
    """Both keep the same weights; the event has all their sentences, and says whose were bad (FIELD_REPORTS 1.13)."""
    watching, poison = guard("rollback"), Poison({4: "nan"}, rank=1)
    options = {"max_steps": 5, "devices": 2, "strategy": "ddp_spawn"}
    task = small_task(optimizer=ADAM)
    small_trainer(tmp_path, watching, poison, Ending(), **options).fit(task, datamodule=Sentences(batch_tokens=20))
    first, second = (torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1))
    assert equal(first, second)
    assert all(weight.isfinite().all() for weight in first.values())
    (event,) = events(tmp_path)
    assert (event["update"], event["back_to"]) == (4, 2)
    assert event["first_not_finite"] == {
        "rank": 1, "batch": 0, "module": f"model.{POISONED}", "what": "output"
    }  # fmt: skip
    sentences = [rank["sentences"] for rank in event["ranks"]]
    assert [rank["rank"] for rank in event["ranks"]] == [0, 1]
    assert all(len(lists) == 1 and lists[0] for lists in sentences)
    assert not set(sentences[0][0]) & set(sentences[1][0])
    assert [text["sentence"] for text in event["ranks"][1]["texts"]] == sentences[1][0]


def test_weights_that_are_sharded_are_not_rolled_back(tmp_path: Path) -> None:
    made = small_trainer(tmp_path, devices=2, strategy=ModelParallelStrategy(2, 1, process_group_backend="gloo"))
    with pytest.raises(UserError, match=r"policy: rollback keeps whole copies .* policy: skip, or strategy: ddp, "):
        guard("rollback").setup(made, small_task(), "fit")
    guard("skip").setup(made, small_task(), "fit")


@pytest.mark.soak
def test_an_update_of_sharded_weights_is_skipped(tmp_path: Path) -> None:
    """FSDP2, two processes, the poison in one of them: what is gone on with is what the update before came to."""
    command = [sys.executable, "-m", "tests.callbacks.sharded", str(tmp_path), "skip"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    (event,) = events(tmp_path)
    assert (event["update"], event["action"]) == (2, "skipped")
    moved = [json.loads((tmp_path / f"moved_{rank}.json").read_text()) for rank in (0, 1)]
    assert moved == [[True, False, True]] * 2


# ---------------------------------------------------------------------- one wild batch


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
def test_a_wild_batch_is_told_in_that_very_step_and_a_checkpoint_before_it_goes_on(tmp_path: Path) -> None:
    """Random targets at fifty times the learning rate (FIELD_REPORTS 1.12).

    Without the batch, what goes on from the checkpoint before it is what skipping it came to, to the bit.
    """
    bad, after = 60, 4
    given = [sentence_batch(*range(k % 3, k % 3 + 3)) for k in range(bad + after)]
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=bad - 1, save_top_k=-1)
    torch.manual_seed(1)
    fast = functools.partial(torch.optim.Adam, lr=2e-2)
    states, losses = {}, {}
    for policy, action in (("report", "reported"), ("skip", "skipped"), ("rollback", "rolled back")):
        watching, poison = guard(policy, window=20, deviations=20, back=5), Poison({bad: "wild"})
        options = {"optimizer": fast, "enable_checkpointing": True}
        states[policy], *_ = train(tmp_path / policy, given, watching, poison, saves, **options)
        (event,) = events(tmp_path / policy)
        assert (event["update"], event["kind"], event["action"]) == (bad, "spike", action)
        assert event["loss_deviations"] > 20
        assert event["ranks"][0]["batches"] == [bad - 1]
        assert event["ranks"][0]["sentences"] == poison.seen == [given[bad - 1].index.tolist()]
        losses[policy] = watching.progress["recent"]["loss"][-after:]
    assert min(losses["report"]) > 4 * max(losses["skip"] + losses["rollback"])
    path, rest = tmp_path / f"step={bad - 1}.ckpt", {"optimizer": fast, "max_steps": bad - 1 + after}
    again, *_ = train(tmp_path / "again", given[bad:], guard("report"), ckpt_path=path, **rest)
    assert equal(again, states["skip"])
    assert not events(tmp_path / "again")


# ---------------------------------------------------------------------- the same after a resume


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(("policy", "at"), [("skip", 5), ("rollback", 5), ("rollback", 9)])
def test_a_resumed_run_does_the_same(tmp_path: Path, policy: str, at: int) -> None:
    """Before the bad updates, at one of them, and between; a rollback goes back to a snapshot of before the resume."""
    poison = {6: "nan", 10: "infinite"}
    every_update = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)

    def fitted(folder: Path, *more: pl.Callback, **options: Any) -> tuple[Any, SpikeGuard]:
        task, watching = small_task(optimizer=ADAM, stabilizer=Stabilizer(warmup=Noam(4))), guard(policy, back=3)
        made = small_trainer(folder, watching, Poison(poison), *more, max_steps=12, enable_checkpointing=bool(more))
        made.fit(task, datamodule=Sentences(), **options)
        return task, watching

    whole, first = fitted(tmp_path / "whole", every_update)
    resumed, second = fitted(tmp_path / "resumed", ckpt_path=tmp_path / "saved" / f"step={at}.ckpt")
    assert equal(dict(resumed.state_dict()), dict(whole.state_dict()))
    assert second.progress == first.progress
    assert second.state_dict()["table"] == first.state_dict()["table"]
    later = [event for event in events(tmp_path / "whole") if event["update"] > at]
    assert events(tmp_path / "resumed") == later
    assert len(later) == sum(update > at for update in poison)


def cut(folder: Path, policy: str, batch: int, **options: Any) -> tuple[Any, SpikeGuard, list[dict[str, Any]], Path]:
    """Six updates, the third of which a validation cuts in two and one of its batches spoils; the state in between."""
    one, other = (Stabilizer(norm=norm, warmup=Noam(4)) for norm in (MaskedBatchNorm(), PowerNorm(warmup=0)))
    short = BeamSearch(beam=1, maximum_ratio=0.1, maximum_extra=2)
    task = small_task(one, decoder_stabilizer=other, optimizer=ADAM, validation_search=short)
    watching, poison = guard(policy), Poison({3: "nan"}, batch=batch)
    saves = Checkpoints(every=0, keep_last=99, dirpath=folder / "saved")
    settings = {"accumulate_grad_batches": 2, "val_check_interval": 5, "limit_val_batches": 1, "max_steps": 6}
    settings |= {"log_every_n_steps": 3, "enable_checkpointing": True}
    data = Sentences({"train": Pairs([*ENGLISH] * 4, [*GERMAN] * 4)})
    small_trainer(folder, watching, poison, saves, **settings).fit(task, datamodule=data, **options)
    states = {path: torch.load(path, weights_only=True) for path in (folder / "saved").glob("last*")}
    between = [path for path, state in states.items() if state["window"] is not None and state["global_step"] == 2]
    return task, watching, events(folder), (between or [folder])[0]


@pytest.mark.parametrize(("policy", "batch"), [("skip", 0), ("rollback", 1)])
def test_a_bad_update_that_a_validation_has_cut_in_two(tmp_path: Path, policy: str, batch: int) -> None:
    """Nothing of its first half is left either, and it is in the event, but for what a batch that is gone put out."""
    task, watching, (event,), state = cut(tmp_path / "whole", policy, batch)
    again, same, (late,), _ = cut(tmp_path / "resumed", policy, batch, ckpt_path=state)
    assert equal(dict(again.state_dict()), dict(task.state_dict()))
    assert same.progress == watching.progress
    assert len(event["ranks"][0]["batches"]) == 2
    if batch == 0:
        assert late["first_not_finite"] is None
        assert "no layer has a finite gradient" in late["sentence"]
        for gone in (event, late):
            gone["ranks"][0] |= {"texts": [], "first_not_finite": None}
            gone |= {"first_not_finite": None, "activation_rms": {}, "sentence": ""}
    assert late == event
    losses = [logged_curve(tmp_path / name, "train/loss") for name in ("whole", "resumed")]
    assert losses[0] == losses[1]
    assert list(losses[0]) == [2, 5]


def test_a_policy_may_begin_to_act_in_such_an_update(tmp_path: Path) -> None:
    *_, state = cut(tmp_path / "whole", "report", 1)
    again, _, (event,), _ = cut(tmp_path / "resumed", "skip", 1, ckpt_path=state)
    assert event["action"] == "skipped"
    assert len(event["ranks"][0]["batches"]) == 2
    assert all(value.isfinite().all() for value in again.state_dict().values())


# ---------------------------------------------------------------------- what is written down


@pytest.mark.parametrize("module", [POISONED, "encoder.layers.0.branches.0.function"])
def test_the_first_module_is_named(tmp_path: Path, module: str) -> None:
    task, watching, poison = small_task(optimizer=ADAM), guard(), Poison({4: "nan", 7: "infinite"}, module)
    small_trainer(tmp_path, watching, poison, max_steps=8).fit(task, datamodule=Sentences())
    output, gradient = events(tmp_path)
    assert output["first_not_finite"] == {
        "rank": 0, "batch": 0, "module": f"model.{module}", "what": "output"
    }  # fmt: skip
    assert gradient["first_not_finite"]["what"].startswith("gradient")
    assert gradient["ranks"][0]["sentences"] == poison.seen[1:]
    for event, sentences in zip((output, gradient), poison.seen, strict=True):
        texts = {text["sentence"]: (text["source"], text["target"]) for text in event["ranks"][0]["texts"]}
        assert texts == {line: (ENGLISH[line], GERMAN[line]) for line in sentences}
    names = {block_of(name) for name, _ in task.named_parameters()}
    for event in (output, gradient):
        assert [row["update"] for row in event["profile"]] == list(range(1, event["update"] + 1))[-PROFILE:]
        assert all(row["gradient_norm"].keys() == names for row in event["profile"])
    assert output["activation_rms"].keys() == {"model.encoder.layers.0", "model.decoder.layers.0"}


def test_the_profile_adds_up_to_the_norm(tmp_path: Path) -> None:
    train(tmp_path, batches(8), guard(), Poison({BAD: "nan"}))
    (event,) = events(tmp_path)
    logged = [row["gradient_norm/total_clipped"] for row in rows(tmp_path) if "gradient_norm/total_clipped" in row]
    for row, norm in zip(event["profile"], logged[: BAD - 1], strict=False):
        assert math.hypot(*row["gradient_norm"].values()) == pytest.approx(norm, rel=1e-5)
    assert {float(norm) for norm in event["profile"][-1]["gradient_norm"].values()} != set()
    assert any(norm == "nan" for norm in event["profile"][-1]["gradient_norm"].values())


def test_to_run_a_batch_again_leaves_no_trace(tmp_path: Path) -> None:
    """Dropout draws, logs, hooks and the clock of statistics are as if nobody had looked."""
    given, draws = batches(6), []

    class Draws(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            draws.append((torch.get_rng_state().clone(), hooks(pl_module), len(pl_module.__dict__)))

    train(tmp_path / "report", given, guard("report"), Draws(), dropout=0.1)
    train(tmp_path / "skip", given, guard("skip", deviations=1e-9, window=10, patience=9), Draws(), dropout=0.1)
    assert [event["action"] for event in events(tmp_path / "skip")].count("skipped") >= 1
    for (state, *counts), (other, *more) in zip(draws[:6], draws[6:], strict=True):
        assert state.equal(other)
        assert counts == more


def test_the_fields_of_an_event_are_those_of_the_readme(tmp_path: Path) -> None:
    train(tmp_path, batches(8), guard(), Poison({BAD: "nan"}))
    (event,) = events(tmp_path)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    table = page[page.index("| field of an event |") :].split("\n\n")[0].splitlines()[2:]
    said = [name for row in table for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert said == list(event)
    assert event["loss"] == "nan"
    assert math.isnan(float(event["loss"]))


def deviations(event: dict[str, Any]) -> tuple[Any, Any]:
    return event["loss_deviations"], event["gradient_norm_deviations"]


@pytest.mark.parametrize("policy", ["report", "skip"])
@pytest.mark.parametrize(("before", "expected"), [([2.0], (None, None)), ([2.0, 4.0], (2e10 - 3, "inf"))])
def test_deviations_are_null_without_enough_updates_before(
    tmp_path: Path, policy: Any, before: list[float], expected: Any
) -> None:
    """A window of 20 asks for two; those of 2 and 4 are a mean of 3 and a deviation of 1."""

    class Broken(Scripted):
        def training_step(self, given: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(given, batch_idx)
            return loss + Infinite.apply(0 * self.weight) if batch_idx == len(before) else loss

    losses = [*before, 2e10]
    made = trainer(tmp_path, SpikeGuard(window=20, policy=policy), max_steps=len(losses))
    made.fit(Broken(losses), loader([0] * len(losses)))
    (event,) = events(tmp_path)
    assert (event["update"], event["kind"], event["loss"]) == (len(losses), "not finite", 2e10)
    assert deviations(event) == expected


def test_updates_that_are_not_finite_are_no_history(tmp_path: Path) -> None:
    """The loss has never been a number; the gradient norm has been 1 at a hundred updates, as many as are needed."""
    run(tmp_path, [math.nan] * 101, SpikeGuard())
    assert [(event["update"], deviations(event)) for event in events(tmp_path)] == [
        (1, (None, None)),
        (101, (None, 0.0)),
    ]


def test_weights_and_biases_gets_a_table_of_all_events(tmp_path: Path) -> None:
    logger = training.wandb_logger(tmp_path, "offline")
    train(tmp_path, batches(8), guard(), Poison({3: "nan", 6: "nan"}), logger=logger)
    wandb.finish()
    wandb.teardown()
    tables = [
        json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-*/files/media/table/events_*.table.json")
    ]
    (whole,) = (table for table in tables if len(table["data"]) == 2)
    assert [dict(zip(whole["columns"], row, strict=True)) for row in whole["data"]] == [
        {name: str(event[name]) for name in ("update", "kind", "action", "loss", "gradient_norm", "sentence")}
        | {name: json.dumps([event["ranks"][0][name]]) for name in ("batches", "sentences")}
        | {"profile": json.dumps(event["profile"])}
        for event in events(tmp_path)
    ]
    row = [row for row in wandb_file.history(tmp_path) if "stability/skipped_updates" in row][-1]
    assert (row["trainer/global_step"], row["stability/skipped_updates"]) == (7, 2)


def test_a_report_has_the_sentences_of_each_jump(tmp_path: Path, capsys: Any) -> None:
    """Of all updates since the last look, though their batches are gone."""
    watching = SpikeGuard(every=10, window=20, deviations=1e-9)
    given = batches(10)
    train(tmp_path, given, watching)
    found = events(tmp_path)
    assert len(found) > 2
    for event in found:
        assert event["ranks"][0]["sentences"] == [given[event["update"] - 1].index.tolist()]
        assert event["policy"] == "report"
        assert event["action"] == "reported"
    assert len([line for line in capsys.readouterr().out.splitlines() if "deviations" in line]) == 1


@pytest.mark.parametrize("kind", ["nan", "infinite"])
def test_a_report_names_the_sentences_and_what_the_gradients_tell(tmp_path: Path, kind: str, capsys: Any) -> None:
    """At its next look, the batch is gone and the weights have moved. An infinite gradient arises before a decoder's
    last branch, whose weights and all that come before it in the model have it; what comes after has not."""
    given = batches(10)
    train(tmp_path, given, guard("report", every=10), Poison({BAD: kind}))
    event = events(tmp_path)[0]
    assert (event["update"], event["kind"], event["action"]) == (BAD, "not finite", "reported")
    said = capsys.readouterr().out.splitlines()[0]
    ids = given[BAD - 1].index.tolist()
    assert f"(sentences {', '.join(map(str, ids))})" in said
    assert "policy: skip, rollback or stop looks for the module" in said
    broken = [name for name, norm in event["profile"][-1]["gradient_norm"].items() if not math.isfinite(float(norm))]
    if kind == "nan":
        assert "the loss is nan, and no layer has a finite gradient" in said
        assert event["first_not_finite"] is None
    else:
        assert "blocks are not finite, the last model.decoder.layers.0" in said
        assert event["first_not_finite"] == {"module": "model.decoder.layers.0", "what": "gradient by the weights"}
        assert "model.decoder.end" not in broken


# ---------------------------------------------------------------------- snapshots


def test_a_snapshot_holds_copies(tmp_path: Path) -> None:
    task = small_task(optimizer=ADAM, stabilizer=Stabilizer(norm=MaskedBatchNorm(), warmup=Noam(4)))
    made = small_trainer(tmp_path, max_steps=3)
    fit(made, task, batches(3))
    before = {name: value.clone() for name, value in task.state_dict().items()}
    moments = [value.clone() for state in made.optimizers[0].state.values() for value in state.values()]
    rate = made.optimizers[0].param_groups[0]["lr"]
    snapshot = Snapshot.take(made, task, 3, {"seen": [1]})
    for _ in range(2):  # what it puts back is not what it holds
        for tensor in (*task.state_dict().values(), *made.optimizers[0].state[next(task.parameters())].values()):
            tensor.detach().add_(1)
        made.lr_scheduler_configs[0].scheduler.step()
        assert not equal(dict(task.state_dict()), before)
        snapshot.restore(made, task)
        assert equal(dict(task.state_dict()), before)
        now = [value for state in made.optimizers[0].state.values() for value in state.values()]
        assert all(one.equal(other) for one, other in zip(now, moments, strict=True))
        assert made.optimizers[0].param_groups[0]["lr"] == rate
    torch.save(vars(snapshot), tmp_path / "snapshot.pt")
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["update"] == 3


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_a_snapshot_holds_the_average_of_the_weights_too(tmp_path: Path) -> None:
    task, average = small_task(optimizer=ADAM), WeightAverage(0.9)
    made = small_trainer(tmp_path, average, max_steps=3)
    fit(made, task, batches(3))
    assert average._average_model is not None
    before = {name: value.clone() for name, value in average._average_model.state_dict().items()}
    snapshot = Snapshot.take(made, task, 3, {})
    for value in average._average_model.state_dict().values():
        value.fill_(math.nan if value.is_floating_point() else 7)
    snapshot.restore(made, task)
    assert equal(dict(average._average_model.state_dict()), before)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda done: 1 / (done + 1)),
        functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
        functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=20),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            [4],
        ),
    ],
)
def test_a_lower_rate_stays_lower_whatever_the_schedule(make: Any) -> None:
    rates = []
    for factor in (1.0, 0.25):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.1)
        schedule = make(optimizer)
        for update in range(10):
            optimizer.step()
            schedule.step()
            if update == 2:
                config = type("Config", (), {"scheduler": schedule})()
                slow_down(type("Made", (), {"optimizers": [optimizer], "lr_scheduler_configs": [config]})(), factor)
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates[12:] == pytest.approx([rate / 4 for rate in rates[2:10]])


@pytest.mark.parametrize(
    "wrong",
    [
        {"back": 0},
        {"patience": -1},
        {"learning_rate_factor": 0.0},
        {"learning_rate_factor": 2.0},
        *({"every": 0, "policy": policy} for policy in ("skip", "rollback", "stop")),
    ],
)
def test_wrong_settings_of_a_policy_are_named(wrong: dict[str, Any]) -> None:
    name, *_ = wrong
    with pytest.raises(UserError, match=f"{name}: "):
        SpikeGuard(**wrong)


# ---------------------------------------------------------------------- whole trainings


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_that_are_compiled_are_looked_into(
    tmp_path: Path, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is run again as it was written, with hooks inside the layers."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled_run.cache_clear()
    settings, given = {"compile_layers": True, "checkpoint_layers": checkpointed}, batches(8)
    try:
        found = train(tmp_path / "with", given, guard(), Poison({BAD: "infinite"}, "model.decoder"), **settings)
        without = train(tmp_path / "without", given[: BAD - 1] + given[BAD:], guard(), **settings)
        assert stance() == "default"
    finally:
        compiled_run.cache_clear()
        torch._dynamo.reset()
    assert equal(found[0], without[0])
    (event,) = events(tmp_path / "with")
    assert event["first_not_finite"]["module"] == "model.decoder.end.slots.norm"
    assert event["activation_rms"].keys() == {"model.encoder.layers.0", "model.decoder.layers.0"}


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_a_poisoned_training_ends_where_one_without_poison_does(tmp_path: Path, seed: int) -> None:
    """NaN, an infinite gradient, and random targets at fifty times the learning rate, each undone."""
    poisoned = {400: "nan", 550: "infinite", 700: "wild"}

    def trained(policy: Any, poison: Poison) -> tuple[float, list[dict[str, Any]], str]:
        pl.seed_everything(seed, verbose=False)
        folder = tmp_path / f"{policy}_{len(poison.updates)}"
        shape = {"encoder_layers": 2, "decoder_layers": 2, "width": 32, "heads": 2, "hidden": 64}
        adam = functools.partial(torch.optim.Adam, lr=3e-3, betas=(0.9, 0.98))
        task = TranslationTask(Stabilizer(warmup=InverseSqrt(100)), optimizer=adam, **shape)
        sizes = {"train_pairs": 2000, "validation_pairs": 200, "test_pairs": 4, "vocabulary": 300, "batch_tokens": 512}
        data, reason = SyntheticCorpus(**sizes), ""
        watching = SpikeGuard(policy=policy, back=10)
        made = small_trainer(folder, watching, poison, max_steps=1000, log_every_n_steps=50)
        try:
            made.fit(task, datamodule=data)
        except TrainingStoppedError as end:
            reason = str(end)
        task.eval()
        with torch.no_grad():
            sums = torch.tensor([[float(nll), tokens] for _, nll, tokens in map(task.loss, data.val_dataloader())])
        nll, tokens = sums.sum(0).tolist()
        return nll / tokens, events(folder), reason

    clean, none, _ = trained("report", Poison({}))
    assert not none
    for policy, action in (("rollback", "rolled back"), ("skip", "skipped")):
        poison = Poison(poisoned)
        cured, found, _ = trained(policy, poison)
        print(f"seed {seed}: validation nll {clean:.4f} without poison, {cured:.4f} with poison and {policy}")
        assert cured == pytest.approx(clean, rel=0.02)
        assert [(event["update"], event["kind"], event["action"]) for event in found] == [
            (400, "not finite", action), (550, "not finite", action), (700, "spike", action)
        ]  # fmt: skip
        assert [event["ranks"][0]["sentences"] for event in found] == [[sentences] for sentences in poison.seen]
    stopped, last, reason = trained("stop", Poison(poisoned))
    assert math.isfinite(stopped)
    assert [event["update"] for event in last] == [400]
    assert reason
    spoilt, told, _ = trained("report", Poison(poisoned))
    assert math.isnan(spoilt)
    assert told[0]["update"] == 400
