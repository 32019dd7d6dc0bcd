"""What a device computes, and how fast: python -m tests.device.check [--device cuda] [--quick] [--out FILE].

One call, under five minutes on a GPU. Correctness is held against the CPU in float32; speed is that of a base-size
model through Lightning's trainer, as `fit` has it. What a device cannot show is left out with a reason. Everything goes
into a JSON file with date, device and versions, `tests/device/results/DEVICE.json` where no other is named and the look
is no quick one; the exit code is 1 where a check does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from stabilize import kernels
from stabilize.callbacks.layer_monitor import LayerMonitor
from stabilize.callbacks.monitor import Monitor
from stabilize.commands.bench import work
from stabilize.commands.training import MONITORS
from stabilize.data.batch import Batch
from stabilize.decoding import BeamSearch
from stabilize.model import Sizes
from stabilize.strategies import (
    B2T,
    DeepNormInit,
    DeepNormResidual,
    HyperConnections,
    NoWarmup,
    PostNorm,
    PreNorm,
    Stabilizer,
)
from stabilize.task import TranslationTask
from stabilize.tokens import BEGIN, END
from tests.tasks import fit, small_trainer

Report = dict[str, Any]

RESULTS = Path(__file__).parent / "results"

PEAKS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "A10G": 70.0, "RTX 4090": 165.0}
"""Dense bfloat16 products in TFLOP/s by a word in the device's name, from the vendor's data sheets (of the PCIe H100,
which is slower, 756 would be right)."""

STABILIZERS = {
    "pre_norm": lambda: Stabilizer(PreNorm(), warmup=NoWarmup()),
    "b2t": lambda: Stabilizer(B2T(), warmup=NoWarmup()),
    "deep_norm": lambda: Stabilizer(PostNorm(), DeepNormResidual(), initialization=DeepNormInit(), warmup=NoWarmup()),
    "hyper_connections": lambda: Stabilizer(PreNorm(), HyperConnections(), warmup=NoWarmup()),
}

EVERY = 50
"""Updates between two records."""


class NotHereError(Exception):
    """What a device cannot show, and why."""


@dataclass(frozen=True)
class Scale:
    """The sizes of a measurement: of the model, of a batch, and how many updates are timed."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    sentences: int
    length: int
    updates: int
    square: int
    """Rows of the matrices whose product is the ceiling."""


FULL = Scale(6, 512, 8, 2048, 32_000, 768, 32, 40, 8192)
QUICK = Scale(2, 32, 2, 64, 200, 8, 6, 4, 256)
SMALL = Scale(3, 64, 4, 128, 500, 16, 12, 0, 0)
"""Of the checks on correctness, which the CPU makes too."""


@dataclass(frozen=True)
class Place:
    """A device, and the sizes that are measured on it."""

    device: torch.device
    scale: Scale

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def need_gpu(self, why: str) -> None:
        """Leave a section out on a CPU."""
        if not self.is_gpu:
            raise NotHereError(why)

    def wait(self) -> None:
        """Until all that was asked of the device is done."""
        work.wait(self.device)


# ---------------------------------------------------------------- what is computed


def shape(scale: Scale) -> dict[str, int]:
    """The arguments of `Sizes`."""
    layers = {"encoder_layers": scale.layers, "decoder_layers": scale.layers}
    return layers | {"width": scale.width, "heads": scale.heads, "hidden": scale.hidden}


def task_of(scale: Scale, stabilizer: Stabilizer, precision: str = "32-true", **options: Any) -> TranslationTask:
    """A task with a model of this size on the CPU, its weights the same each time."""
    task = TranslationTask(stabilizer, **shape(scale) | options)
    task.tokenizer = SimpleNamespace(vocabulary=scale.vocabulary, model=b"")  # type: ignore[assignment]
    torch.manual_seed(1)
    task._build(precision)
    return task


def batches(scale: Scale, count: int) -> list[Batch]:
    """Sentences of random words, as long as each other in a batch, so that no position is padding."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for number in range(count):
        length = scale.length + number % 5 - 2
        shape = (scale.sentences, length - 1)
        source, target = (torch.randint(4, scale.vocabulary, shape, generator=generator) for _ in range(2))
        begin, end = (torch.full((scale.sentences, 1), token) for token in (BEGIN, END))
        real = torch.arange(scale.sentences * length)
        sides = torch.cat([source, end], 1), torch.cat([begin, target, end], 1)
        made.append(Batch(*sides, torch.arange(scale.sentences), real=real))
    return made


def to(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(part.to(device) if isinstance(part, Tensor) else part for part in batch))


def gradients(task: TranslationTask, batch: Batch, device: torch.device, half: bool = False) -> tuple[float, Tensor]:
    """Loss per token, and all gradients in one row on the CPU."""
    task.to(device).zero_grad()
    with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
        loss, _, tokens = task.loss(to(batch, device))
    (loss / tokens).backward()
    return loss.item() / tokens, torch.cat([p.grad.flatten().cpu() for p in task.parameters() if p.grad is not None])


def off(found: Tensor, expected: Tensor) -> float:
    """The length of the difference over the length."""
    return (torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)).item()


def held(report: Report, **bounds: float) -> Report:
    """The report, with whether each number is at most its bound."""
    return report | {"bounds": bounds, "holds": all(report[name] <= bound for name, bound in bounds.items())}


# ---------------------------------------------------------------- correctness


def like_the_cpu(place: Place) -> Report:
    """Loss and gradients in float32 and under bfloat16 autocast, against float32 on the CPU."""
    (batch,) = batches(SMALL, 1)
    worst = dict.fromkeys(("loss", "gradients", "bf16_loss", "bf16_gradients"), 0.0)
    for make in STABILIZERS.values():
        task = task_of(SMALL, make(), dropout=0.0).train()
        loss, expected = gradients(task, batch, torch.device("cpu"))
        for prefix, half in (("", False), ("bf16_", True)):
            found, rows = gradients(task, batch, place.device, half)
            worst[f"{prefix}loss"] = max(worst[f"{prefix}loss"], abs(found - loss) / loss)
            worst[f"{prefix}gradients"] = max(worst[f"{prefix}gradients"], off(rows, expected))
    return held(worst, loss=1e-5, gradients=1e-3, bf16_loss=1e-2, bf16_gradients=0.1)


def attention(place: Place) -> Report:
    """Scaled dot-product attention with padding against its equation in float64, forward and backward."""
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(4, 2, 9, 16, generator=generator, dtype=torch.float64) for _ in range(3)]
    mask = (torch.rand(4, 1, 1, 9, generator=generator) < 0.7) | torch.eye(9, dtype=torch.bool)
    found: dict[str, list[Tensor]] = {}
    for name, dtype, device in (("exact", torch.float64, "cpu"), ("here", torch.float32, place.device)):
        query, key, value = (part.detach().to(device, dtype).requires_grad_() for part in parts)
        if name == "exact":
            weights = (query @ key.mT / 4).masked_fill(~mask, -torch.inf).softmax(-1)
            out = weights @ value
        else:
            out = kernels.attend(query, key, value, mask.to(device), 0.0)
        out.square().sum().backward()
        found[name] = [t.detach().cpu().double() for t in (out, *(p.grad for p in (query, key, value)))]
    return held(
        {"error": max(off(here, exact) for here, exact in zip(found["here"], found["exact"], strict=True))}, error=1e-5
    )


def dropout(place: Place) -> Report:
    """The share that is kept, in standard deviations off the rate, and the factor of what is kept."""
    ones, report = torch.ones(2**20, device=place.device), {"deviations": 0.0, "factor": 0.0}
    torch.manual_seed(4)
    for rate in (0.1, 0.3, 0.9):
        kept = kernels.dropout(ones, rate)
        deviations = abs((kept != 0).double().mean().item() - (1 - rate)) / (rate * (1 - rate) / ones.numel()) ** 0.5
        report["deviations"] = max(report["deviations"], deviations)
        report["factor"] = max(report["factor"], abs(kept.max().item() * (1 - rate) - 1))
    return held(report, deviations=5.0, factor=1e-5)


def checkpointed(place: Place) -> Report:
    """Gradients with layers computed again in the backward pass, over those without, with dropout."""
    rows = []
    for again in (False, True):
        task = task_of(SMALL, Stabilizer(B2T()), dropout=0.3, attention_dropout=0.1, checkpoint_layers=again)
        torch.manual_seed(5)
        rows.append(gradients(task.train(), batches(SMALL, 1)[0], place.device)[1])
    return held({"gradients": off(rows[1], rows[0])}, gradients=1e-5)


def compiled(place: Place) -> Report:
    """Gradients of compiled layers, over those of layers as they are written."""
    place.need_gpu("on a CPU compiling takes minutes, and tests/model/test_compile.py has it")
    rows = []
    for compile_layers in (False, True):
        task = task_of(SMALL, Stabilizer(B2T()), dropout=0.0, compile_layers=compile_layers)
        rows.append(gradients(task.train(), batches(SMALL, 1)[0], place.device)[1])
    return held({"gradients": off(rows[1], rows[0])}, gradients=1e-3)


def decoding(place: Place) -> Report:
    """Beam search here and on the CPU, in float32: how many hypotheses differ, and by how much their scores."""
    task = task_of(SMALL, Stabilizer(PreNorm())).eval()
    (batch,) = batches(SMALL, 1)
    search = BeamSearch(beam=4, maximum_ratio=1.0)
    found = []
    for device in ("cpu", place.device):
        with torch.no_grad():
            found.append(search(task.to(device).model, batch.source.to(device)))
    pairs = list(zip(*found, strict=True))
    unlike = sum(one.ids != other.ids for one, other in pairs) / len(pairs)
    return held(
        {"unlike": unlike, "scores": max(abs(one.score - other.score) for one, other in pairs)},
        unlike=0.05,
        scores=1e-3,
    )


# ---------------------------------------------------------------- speed


def flops(scale: Scale, given: Sequence[Batch]) -> int:
    """Useful floating-point operations of an update of each of some batches."""
    tokens = work.Tokens.of(given)
    return work.training_flops(Sizes(**shape(scale)), scale.vocabulary, tokens.source, tokens.target)


class Clock(pl.Callback):
    """Seconds of each span of updates after a warm-up, with all that the device was asked to do in it."""

    def __init__(self, place: Place, warmup: int, span: int) -> None:
        self.place, self.warmup, self.span = place, warmup, span
        self.seconds: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        done = trainer.global_step - self.warmup
        if done < 0 or done % self.span:
            return
        self.place.wait()
        now = time.perf_counter()
        if done:
            self.seconds.append(now - self.start)
        self.start = time.perf_counter()


def diagnostics(every: int) -> list[Monitor]:
    """The callbacks of every run, with a record at least every so many updates of those that are on; none for 0."""
    monitors = [kind() for kind in MONITORS.values()]
    for monitor in monitors:
        monitor.every = min(monitor.every, every)
        if isinstance(monitor, LayerMonitor):
            monitor.figures = False
    return monitors


def train(place: Place, updates: int, *callbacks: pl.Callback, given: int = 5, **options: Any) -> None:
    """Updates of a base-size model in bfloat16 through Lightning's trainer, on `given` batches in turn."""
    task = task_of(place.scale, Stabilizer(PreNorm(), warmup=NoWarmup()), "bf16-mixed", optimizer=adam, **options)
    ready = batches(place.scale, given)
    accelerator = {"accelerator": "gpu" if place.is_gpu else "cpu", "precision": "bf16-mixed"}
    every = {"log_every_n_steps": EVERY, "max_steps": updates, "max_epochs": -1}
    with tempfile.TemporaryDirectory() as folder:
        trainer = small_trainer(Path(folder), *callbacks, **accelerator, **every)
        fit(trainer, task, (ready * (updates // given + 1))[:updates])


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4, betas=(0.9, 0.98), fused=True)


def training(place: Place, **options: Any) -> Report:
    """Target tokens a second, model-FLOPs utilisation and peak memory."""
    scale, span = place.scale, 5 * max(1, place.scale.updates // 15)
    clock = Clock(place, span, span)
    if place.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place.device)
    train(place, 4 * span, clock, **options)
    given = batches(scale, 5)
    tokens = sum(batch.target[:, 1:].numel() for batch in given) * span / 5
    tera = flops(scale, given) * span / 5 / 1e12
    report: Report = {"target_tokens_per_second": sorted(round(tokens / seconds, 1) for seconds in clock.seconds)}
    report["tflops_per_second"] = tera / statistics.median(clock.seconds)
    if place.is_gpu:
        report["peak_memory_gib"] = torch.cuda.max_memory_allocated(place.device) / 2**30
        if (peak := peak_of(torch.cuda.get_device_name(place.device))) is not None:
            report["model_flops_utilisation"] = report["tflops_per_second"] / peak
    return report


def peak_of(name: str) -> float | None:
    """The data sheet's TFLOP/s of a device; none of one that is not known."""
    return next((peak for word, peak in PEAKS.items() if word in name), None)


def training_compiled(place: Place) -> Report:
    place.need_gpu("on a CPU compiling takes minutes; stabilize bench train measures it there")
    return training(place, compile_layers=True)


def ceiling(place: Place) -> Report:
    """The fastest product of large square matrices in bfloat16, in TFLOP/s."""
    return {"tflops_per_second": work.ceiling(torch.bfloat16, place.scale.square, place.device) / 1e12}


def callbacks(place: Place) -> Report:
    """Seconds of 50 updates with all default diagnostics over those without, runs of both kinds in turn."""
    span, rounds = (EVERY, 3) if place.is_gpu else (5, 1)
    ratios = []
    for _ in range(rounds):
        seconds = []
        for every in (0, span):
            clock = Clock(place, 5, span)
            train(place, 5 + span, clock, *diagnostics(every))
            seconds += clock.seconds
        ratios.append(seconds[1] / seconds[0])
    return {"updates_between_records": span, "with_over_without": sorted(ratios)}


class NoWaiting(pl.Callback):
    """Lets CUDA raise wherever an update that logs nothing waits for the device."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        update = trainer.global_step + 1
        quiet = update > 5 and all(update % every for every in (10, EVERY))
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def no_waiting(place: Place) -> Report:
    """Updates between two records in which the host waited for the device: the first, with where, or none."""
    place.need_gpu("a CPU computes while the host waits")
    try:
        train(place, 2 * EVERY, NoWaiting(), *diagnostics(EVERY))
    except RuntimeError as error:
        where = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
        return {"holds": False, "waits": f"{Path(where[-1].filename).name}:{where[-1].lineno}: {where[-1].line}"}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"holds": True}


SECTIONS: dict[str, Callable[[Place], Report]] = {
    section.__name__: section
    for section in (
        *(like_the_cpu, attention, dropout, checkpointed, compiled, decoding),
        *(ceiling, training, training_compiled, callbacks, no_waiting),
    )
}


# ---------------------------------------------------------------- the whole


@contextmanager
def exact_products() -> Iterator[None]:
    """No TensorFloat-32 in what is compared."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measure(place: Place) -> Report:
    """All sections, each with its seconds; one that fails says why, and the others go on."""
    found: Report = {}
    for name, section in SECTIONS.items():
        start = time.perf_counter()
        try:
            with exact_products():
                report = section(place)
        except NotHereError as reason:
            report = {"skipped": str(reason)}
        except Exception as error:  # of whatever the device or its driver thinks of
            traceback.print_exc()
            report = {"holds": False, "failed": f"{type(error).__name__}: {error}"}
        found[name] = report | {"seconds": round(time.perf_counter() - start, 1)}
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.device.check", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1, cpu")
    parser.add_argument("--quick", action="store_true", help="a small model and few updates: does it run at all")
    parser.add_argument("--out", type=Path, help="the JSON file")
    asked = parser.parse_args(words)
    place = Place(torch.device(asked.device), QUICK if asked.quick else FULL)
    name = torch.cuda.get_device_name(place.device) if place.is_gpu else f"{platform.machine()} CPU"
    report: Report = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": name,
        "quick": asked.quick,
        "scale": dataclasses.asdict(place.scale),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "lightning": pl.__version__,
        },
        "datasheet_tflops": peak_of(name),
        "sections": measure(place),
    }
    report["holds"] = all(section.get("holds", True) for section in report["sections"].values())
    kept = None if asked.quick else RESULTS / f"{name.replace(' ', '_')}.json"
    if (out := asked.out or kept) is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{'all holds' if report['holds'] else 'something does not hold'}; {out or 'a quick look is not kept'}")
    return 0 if report["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
