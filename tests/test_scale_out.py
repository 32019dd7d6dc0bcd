"""Whole runs of several processes, started as a user starts them, say what one process says: DDP and FSDP2 by
Lightning's own launcher, by torchrun, and as two machines of a SLURM job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from stabilize import sharding, stats
from stabilize.errors import UserError
from tests.checkout import ROOT
from tests.commands.test_continuing import JOB
from tests.models import SOURCE, STABILIZERS, TARGET, disturb, model_of
from tests.tasks import rows
from tests.test_kills import newest
from tests.test_ranks import callback

pytestmark = pytest.mark.soak

CONFIG = """
seed_everything: 3
model:
  stabilizer:
    placement: PreNorm
    residual: ReZero
    warmup: {class_path: Linear, init_args: {updates: 5, total: 40}}
  encoder_layers: 2
  decoder_layers: 3
  width: 16
  heads: 2
  hidden: 32
  dropout: 0.0
  optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.01}}
  clipping: {class_path: GlobalNorm, init_args: {value: 1.0}}
  validation_search: {beam: 2, maximum_ratio: 0.5, maximum_extra: 4}
  search: {beam: 2, maximum_ratio: 0.5, maximum_extra: 4}
data:
  class_path: SyntheticCorpus
  init_args: {train_pairs: 144, validation_pairs: 9, test_pairs: 5, vocabulary: 100, batch_tokens: 96,
              evaluation_batch_tokens: 40, baselines: false}
trainer:
  accelerator: cpu
  max_steps: 12
  accumulate_grad_batches: 2
  val_check_interval: 8
  check_val_every_n_epoch: null
  log_every_n_steps: 1
  num_sanity_val_steps: 0
checkpoint: {every: 3, keep_last: 9, save_top_k: 2}
gradient_ratio: {every: 2, activations: true, roles: true, figures: false}
layer_similarity: {every: 2, figures: false}
activation_scale: {every: 3, figures: false}
update_ratio: {every: 3, figures: false}
epsilon_audit: {every: 3, figures: false}
attention_entropy: {every: 3, figures: false}
spike_guard: {every: 1}
test_after_fit: true
"""
"""An even number of batches an epoch, which two processes then deal out as one reads them."""

TWO = ["--trainer.devices=2", "--trainer.accumulate_grad_batches=1", "--trainer.val_check_interval=4"]
"""The updates and the checks of one process, by two."""
CLOCKS = ("per_second", "epoch")


def words(folder: Path, *added: str, verb: str = "fit") -> list[str]:
    """The command of a run with `CONFIG` in a folder, and what is laid over it."""
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(CONFIG)
    return ["-m", "stabilize", verb, "--config=run.yaml", *added]


def trainer(name: str) -> list[str]:
    """One of `configs/trainer`, on a CPU."""
    return [f"--config={ROOT}/configs/trainer/{name}.yaml", "--trainer.accelerator=cpu", "--trainer.precision=32-true"]


def start(command: Sequence[str], folder: Path, **more: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)} | more
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, **pipes)


def ended(command: Sequence[str], folder: Path, code: int = 0) -> str:
    """What a process says to its end."""
    process = start(command, folder)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == code, said
    return said


def one(folder: Path, *added: str) -> None:
    ended(words(folder, *added), folder)


def two(strategy: str) -> Callable[..., None]:
    def run(folder: Path, *added: str) -> None:
        ended(words(folder, *trainer(strategy), *TWO, *added), folder)

    return run


def by_torchrun(folder: Path, *added: str) -> None:
    ended(torchrun(words(folder, *trainer("ddp"), *TWO, *added)), folder)


def torchrun(command: Sequence[str]) -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}", *command]


def on_two_machines(folder: Path, *added: str) -> None:
    """As `srun` starts the tasks of a job of two nodes."""
    command = words(folder, *trainer("slurm"), *TWO, "--trainer.devices=1", *added)
    job = JOB | {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    tasks = [start(command, folder, **job | {"SLURM_PROCID": n, "SLURM_NODEID": n}) for n in ("0", "1")]
    said = [task.communicate(timeout=600)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


WAYS = {"ddp": two("ddp"), "fsdp": two("fsdp"), "torchrun": by_torchrun, "slurm": on_two_machines}


def numbers(folder: Path) -> dict[tuple[str, float], float]:
    """All that the last run in a folder has logged, by key and step."""
    return {
        (key, row["step"]): value
        for row in rows(newest(folder))
        for key, value in row.items()
        if key != "step" and not key.endswith(CLOCKS)
    }


def state(folder: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(newest(folder) / "checkpoints" / f"{name}.ckpt", weights_only=True)


def assert_same_state(found: dict[str, Any], expected: dict[str, Any], atol: float = 1e-5) -> None:
    """Weights and moments, whole, by the same names and numbers."""
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(found[part], expected[part], rtol=1e-3, atol=atol)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The option that has all begin with the same weights: several processes draw others than one."""
    folder = tmp_path_factory.mktemp("begun")
    one(folder, "--trainer.max_steps=2", "--test_after_fit=false")
    return f"--weights={newest(folder)}/checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, begun: str) -> Path:
    """The folder of a run of one process."""
    folder = tmp_path_factory.mktemp("one")
    one(folder, begun)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, begun: str) -> Path:
    """The folder of a run whose weights two processes share."""
    folder = tmp_path_factory.mktemp("sharded")
    WAYS["fsdp"](folder, begun)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_log_what_one_logs(way: str, whole: Path, begun: str, tmp_path: Path) -> None:
    WAYS[way](tmp_path, begun)
    assert len(list((tmp_path / "runs").iterdir())) == 1
    found, expected = numbers(tmp_path), numbers(whole)
    assert found.keys() == expected.keys()
    kinds = {key.partition("/")[0] for key, _ in expected}
    assert kinds >= {"train", "val", "test", "gradient_ratio", "activation_gradient_ratio", "layer_similarity"}
    assert kinds >= {"update_ratio", "activation_rms", "epsilon_audit", "attention_entropy", "stability"}
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=2e-3, abs=1e-5), key
    assert_same_state(state(tmp_path), state(whole))


def compare_gradients(rank: int, port: str, folder: Path) -> None:
    """In each of two processes: where the gradients of a sharded model are not those of a whole one, by stabiliser."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(address)
    torch.distributed.init_process_group("gloo")
    mesh, unlike = init_device_mesh("cpu", (2,)), {}
    torch.manual_seed(1)  # both have the same weights
    for name in STABILIZERS:
        models = [model_of(name, dropout=0.2).train() for _ in range(2)]
        for model in models:
            torch.manual_seed(1)
            disturb(model)
        models[1].load_state_dict(models[0].state_dict())
        try:
            sharding.shard(models[1], mesh)
        except UserError as error:
            unlike[name] = str(error)
            continue
        for model in models:
            for _ in range(2):  # the second time with weights that have been gathered before
                model.zero_grad()
                torch.manual_seed(2)
                model.project(model(SOURCE, TARGET)).square().mean().backward()
        found = {key: stats.whole(p.grad) for key, p in models[1].named_parameters() if p.grad is not None}
        expected = {key: p.grad for key, p in models[0].named_parameters() if p.grad is not None}
        try:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
        except AssertionError as error:
            unlike[name] = str(error)
    (folder / f"unlike_{rank}.json").write_text(json.dumps(unlike))
    torch.distributed.destroy_process_group()


def test_gradients_of_shards_are_those_of_the_whole_for_every_stabilizer(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(compare_gradients, (free_port(), tmp_path), nprocs=2)
    for rank in (0, 1):
        unlike = json.loads((tmp_path / f"unlike_{rank}.json").read_text())
        assert unlike.keys() == {name for name in STABILIZERS if "dlcl" in name}, unlike
        assert all("has weights between layers" in refusal for refusal in unlike.values())


def test_a_sharded_run_leaves_files_that_every_verb_reads(whole: Path, sharded: Path, tmp_path: Path) -> None:
    """One file with whole weights; what one process makes of it is what two make of it."""
    run = newest(sharded)
    last = run / "checkpoints" / "last.ckpt"
    assert last.is_file()
    assert state(sharded)["state_dict"].keys() == state(whole)["state_dict"].keys()
    config = [f"--config={run}/config.yaml", "--trainer.default_root_dir=runs"]
    plain = ["--trainer.strategy=auto", "--trainer.devices=1"]
    for folder, options in ((tmp_path / "one", plain), (tmp_path / "two", [])):
        ended(words(folder, *config, *options, f"--ckpt_path={last}", verb="predict"), folder)
    one, two = ((newest(tmp_path / name) / "translations" / "predict.txt").read_text() for name in ("one", "two"))
    assert one == two
    assert len(one.splitlines()) == 5
    source = "\n".join(["the dog sees the cat"] * 2)
    said = subprocess.run(
        [sys.executable, "-m", "stabilize", "translate", f"--checkpoint={last}", "--beam=2"],
        input=source, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert len(said.stdout.splitlines()) == 2
    ended(["-m", "stabilize", "average", str(run), "--last=3", "--output=average.ckpt"], tmp_path)
    folder = tmp_path / "tested"
    ended(words(folder, *config, *TWO[:1], f"--ckpt_path={tmp_path}/average.ckpt", verb="test"), folder)
    assert (newest(folder) / "translations" / "test.json").is_file()


@pytest.mark.parametrize(("before", "after"), [("fsdp", "fsdp"), ("fsdp", "one"), ("one", "fsdp"), ("ddp", "fsdp")])
def test_a_run_goes_on_with_other_shares(
    before: str, after: str, begun: str, whole: Path, sharded: Path, tmp_path: Path
) -> None:
    """From the middle of an update too, that a validation has cut in two; to the bit where all is as before."""
    ways = WAYS | {"one": one}
    folder = {"one": whole, "fsdp": sharded}.get(before)
    if folder is None:
        folder = tmp_path / "before"
        ways[before](folder, begun)
    (tmp_path / "after").mkdir()
    saved = newest(folder) / "checkpoints" / "last-2.ckpt"
    assert torch.load(saved, weights_only=True)["global_step"] == 8
    ways[after](tmp_path / "after", f"--ckpt_path={saved}")
    found = state(tmp_path / "after")
    assert found["global_step"] == 12
    assert_same_state(found, state(whole))
    if before == after:
        assert all(found["state_dict"][name].equal(weight) for name, weight in state(sharded)["state_dict"].items())


def test_shards_of_an_update_that_a_validation_has_cut_in_two(begun: str, tmp_path: Path) -> None:
    """Two batches an update of each process, and a validation after every third."""
    cut = ["--trainer.accumulate_grad_batches=2", "--trainer.val_check_interval=3", "--trainer.max_steps=4"]
    cut += ["--checkpoint.every=0", "--test_after_fit=false"]
    WAYS["fsdp"](tmp_path / "whole", begun, *cut)
    assert all(gradient is not None for gradient in state(tmp_path / "whole", "last-2")["window"]["gradients"])
    saved = newest(tmp_path / "whole") / "checkpoints" / "last-2.ckpt"
    WAYS["fsdp"](tmp_path / "shards", f"--ckpt_path={saved}", *cut)
    expected = state(tmp_path / "whole")["state_dict"]
    found = state(tmp_path / "shards")["state_dict"]
    assert all(found[name].equal(weight) for name, weight in expected.items())
    ended(words(tmp_path / "ddp", *trainer("ddp"), *TWO, f"--ckpt_path={saved}", *cut), tmp_path / "ddp")
    torch.testing.assert_close(state(tmp_path / "ddp")["state_dict"], expected, rtol=1e-3, atol=1e-5)


REFUSED = {
    "DLCL": (["--model.stabilizer.residual=DLCL"], "DLCL has weights between layers, which trainer.strategy Fully"),
    "plain": (
        ['--trainer.strategy={"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}'],
        "trainer.strategy is ModelParallelStrategy, whose checkpoints are no files; stabilize.sharding.FullySharded",
    ),
    "rollback": (["--spike_guard.policy=rollback"], "policy: rollback keeps whole copies of the weights"),
    "average": (["--trainer.callbacks+=WeightAverage"], "WeightAverage needs all weights in every process"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_shared_out_is_refused(what: str, tmp_path: Path) -> None:
    options, sentence = REFUSED[what]
    said = ended(words(tmp_path, *trainer("fsdp"), *TWO, *options), tmp_path, code=2)
    assert f"error: {sentence}" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("options", [["--trainer.precision=bf16-mixed"], ["--model.compile_layers=true"]], ids=str)
def test_shards_in_other_ways_of_computing(options: list[str], begun: str, tmp_path: Path) -> None:
    """With layers that are computed again in the backward pass."""
    options = [*options, "--model.checkpoint_layers=true", "--trainer.max_steps=4", "--test_after_fit=false"]
    options += ["--trainer.num_sanity_val_steps=2"]  # a sharded model runs first without gradients
    losses = []
    for way in (one, WAYS["fsdp"]):
        folder = tmp_path / str(len(losses))
        way(folder, begun, *options)
        losses.append({key: value for key, value in numbers(folder).items() if key[0] == "train/loss"})
    assert len(losses[0]) > 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-2 if "bf16" in options[0] else 1e-4)


def test_statistics_of_batches_are_the_first_processes_whoever_has_the_weights(tmp_path: Path) -> None:
    """In the checkpoint, and in what the other process evaluates."""
    options = ["--model.stabilizer.norm=MaskedBatchNorm", "--model.stabilizer.residual=Sum", "--test_after_fit=false"]
    for strategy in ("ddp", "fsdp"):
        WAYS[strategy](tmp_path / strategy, *options)
    ddp, fsdp = (state(tmp_path / name)["state_dict"] for name in ("ddp", "fsdp"))
    torch.testing.assert_close(fsdp, ddp, rtol=1e-3, atol=1e-5)
    assert any("running_mean" in name and weight.any() for name, weight in fsdp.items())
    ddp, fsdp = (
        {key: value for key, value in numbers(tmp_path / name).items() if key[0] == "val/nll"}
        for name in ("ddp", "fsdp")
    )
    assert len(ddp) > 0
    assert fsdp == pytest.approx(ddp, rel=1e-4)


def test_a_mistake_ends_torchrun_with_a_sentence(tmp_path: Path) -> None:
    said = ended(torchrun(words(tmp_path, *trainer("ddp"), *TWO, "--model.width=15")), tmp_path, code=1)
    assert "error: model.width is 15, which model.heads, 2, does not divide" in said
    assert not list(tmp_path.glob("runs/*"))


def test_a_signal_to_one_process_of_torchrun_ends_all_with_their_state(tmp_path: Path) -> None:
    """torchrun itself has no other exit code than 1."""
    cue = callback("SendSignal", name="SIGTERM", update=3, rank=1)
    said = ended(torchrun(words(tmp_path, *trainer("ddp"), *TWO, *cue)), tmp_path, code=1)
    assert said.count("ended after update 3; it goes on with --ckpt_path runs/") == 1
    assert state(tmp_path)["global_step"] == 3
