"""`stabilize fit` and the verbs after it: folders, checkpoints, lists of callbacks, plug-ins, quiet output."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, Timer

from stabilize import plugins
from stabilize.callbacks import Checkpoints, GradientRatio, LayerSimilarity
from stabilize.cli import main
from stabilize.commands import training
from stabilize.model.layer import compiled_run
from stabilize.task import TranslationTask
from tests.checkout import ROOT
from tests.tasks import rows

TINY = """
model:
  stabilizer:
    placement: B2T
    residual: {class_path: ScaledSum, init_args: {sum_scale: 0.5}}
    warmup: {class_path: InverseSqrt, init_args: {updates: 10}}
  encoder_layers: 1
  decoder_layers: 1
  width: 8
  heads: 2
  hidden: 8
  search: {beam: 1, maximum_ratio: 0.1, maximum_extra: 2}
  validation_search: {beam: 1, maximum_ratio: 0.1, maximum_extra: 2}
data:
  class_path: SyntheticCorpus
  init_args: {train_pairs: 200, validation_pairs: 4, test_pairs: 4, vocabulary: 60, batch_tokens: 96}
trainer: {accelerator: cpu, max_steps: 2, num_sanity_val_steps: 0}
"""
STRATEGY = '''
from stabilize.strategies import Sum


class Tenfold(Sum):
    """Adds the branch ten times over."""

    def __init__(self, gain: float = 10.0) -> None:
        super().__init__()
        self.gain = gain

    def write(self, stream, branch):
        return stream + self.gain * branch
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with `tiny.yaml` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two updates."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.yaml").write_text(TINY)
    assert main(["fit", f"--config={folder}/tiny.yaml", f"--trainer.default_root_dir={folder}/runs"]) == 0
    (run,) = (folder / "runs").iterdir()
    return run


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "runs").iterdir(), key=lambda run: run.stat().st_mtime_ns)


def residual(run: Path) -> str:
    config = yaml.safe_load((run / "config.yaml").read_text())
    return config["model"]["stabilizer"]["residual"]["class_path"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence with which the command stops, before it makes a run folder."""
    capsys.readouterr()
    assert main(list(words)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert not list(Path.cwd().glob("runs/*"))
    (line,) = output.err.splitlines()
    return line.removeprefix("error: ")


# ---------------------------------------------------------------------- one run after another


def test_no_run_collides_with_another(trained: Path, here: Path) -> None:
    """Each has a folder of its own with the config that ran (FIELD_REPORTS 2.10)."""
    config, checkpoint = f"--config={trained}/config.yaml", f"--ckpt_path={trained}/checkpoints/last.ckpt"
    before = (trained / "config.yaml").read_text()
    place = "--trainer.default_root_dir=runs"
    for words in (
        ["fit", config],
        ["fit", config],
        ["fit", config, checkpoint, "--trainer.max_steps=3"],
        ["test", config, checkpoint],
        ["predict", config, checkpoint],
        ["validate", config, checkpoint],
    ):
        assert main([*words, place]) == 0
    first, second, resumed, tested, predicted, validated = runs(here)
    assert (trained / "config.yaml").read_text() == before
    assert (first / "config.yaml").read_text() == (second / "config.yaml").read_text()
    assert yaml.safe_load((resumed / "config.yaml").read_text())["trainer"]["max_steps"] == 3
    for run in (resumed, tested, validated):
        assert json.loads((run / "summary.json").read_text())["checkpoint"] == f"{trained}/checkpoints/last.ckpt"
    state = torch.load(resumed / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 3
    assert not list(resumed.rglob("hparams.yaml"))
    for run, name in ((tested, "test"), (predicted, "predict")):
        assert len((run / "translations" / f"{name}.txt").read_text().splitlines()) == 4
    assert "val/nll" in (validated / "metrics.csv").read_text()


def test_every_verb_reads_the_config_of_a_run(trained: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = f"--ckpt_path={trained}/checkpoints/last.ckpt"
    assert main(["explain", f"--config={trained}/config.yaml", checkpoint]) == 0
    assert "sum_scale: 0.5" in capsys.readouterr().out


# ---------------------------------------------------------------------- checkpoints


def test_another_stabilizer_than_the_checkpoints_is_named(
    trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--config={trained}/config.yaml", f"--ckpt_path={trained}/checkpoints/last.ckpt"]
    words += ["--trainer.default_root_dir=runs"]
    for verb in ("fit", "test"):
        message = refused(capsys, verb, *words, "--model.stabilizer.placement=PreNorm")
        assert "model.stabilizer.placement is B2T in the checkpoint and PreNorm here" in message
        message = refused(capsys, verb, *words, "--model.stabilizer.residual.sum_scale=0.25")
        assert "residual.sum_scale is 0.5 in the checkpoint and 0.25 here" in message
        message = refused(capsys, verb, *words, "--model.decoder_stabilizer.placement=PreNorm")
        assert "decoder_stabilizer" in message


class Intruder:
    """A pickle that makes a folder when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("intruded",)


def cut(share: float) -> Callable[[Path, Path], None]:
    """The first part of a checkpoint."""

    def write(path: Path, whole: Path) -> None:
        content = whole.read_bytes()
        path.write_bytes(content[: int(share * len(content))])

    return write


def without(*keys: str) -> Callable[[Path, Path], None]:
    """A checkpoint as another version may have written it."""

    def write(path: Path, whole: Path) -> None:
        saved = torch.load(whole, weights_only=True)
        torch.save({key: value for key, value in saved.items() if key not in keys}, path)

    return write


def with_other(**parts: Any) -> Callable[[Path, Path], None]:
    """A checkpoint of which a part is something else."""
    return lambda path, whole: torch.save(torch.load(whole, weights_only=True) | parts, path)


BAD: dict[str, Callable[[Path, Path], None]] = {
    **{f"cut at {share:.0%}": cut(share) for share in (0.001, 0.5, 0.999)},
    "empty": lambda path, whole: path.touch(),
    "text": lambda path, whole: path.write_text("weights\n") and None,
    "code": lambda path, whole: torch.save({"state_dict": Intruder()}, path),
    "code where it belongs": lambda path, whole: torch.save(
        torch.load(whole, weights_only=True) | {"optimizer_states": [Intruder()]}, path
    ),
    "foreign": lambda path, whole: torch.save({"state_dict": {}}, path),
    "weights alone": lambda path, whole: torch.save(torch.load(whole, weights_only=True)["state_dict"], path),
    "missing": lambda path, whole: None,
    "folder": lambda path, whole: path.mkdir(),
    "spoilt tokenizer": with_other(tokenizer=b"junk"),
    "tokenizer of another kind": with_other(tokenizer=3),
    "no task": with_other(task=None),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_checkpoint_is_one_sentence(
    kind: str, trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BAD[kind](here / "bad.ckpt", trained / "checkpoints" / "last.ckpt")
    message = refused(capsys, "test", f"--config={trained}/config.yaml", "--ckpt_path=bad.ckpt")
    assert message.startswith("ckpt_path is bad.ckpt")
    assert not (here / "intruded").exists()


OTHER = {
    "another version's optimisers": without("optimizers"),
    "another version's clipping": without("clipping", "precision"),
    "another version's task": with_other(task={}),
    "another vocabulary": with_other(state_dict={}),
    "callbacks of another kind": with_other(callbacks=[1]),
}


@pytest.mark.parametrize("kind", OTHER)
def test_a_checkpoint_that_only_training_can_refuse_is_one_sentence(
    kind: str, trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    OTHER[kind](here / "bad.ckpt", trained / "checkpoints" / "last.ckpt")
    words = [f"--config={trained}/config.yaml", "--ckpt_path=bad.ckpt", "--trainer.default_root_dir=runs"]
    assert main(["fit", *words, "--trainer.max_steps=3", "--trainer.logger=false"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "checkpoint" in line or "bad.ckpt" in line
    assert not list(here.glob("runs/*/checkpoints/*"))


def test_a_validation_alone_belongs_to_the_update_of_its_checkpoint(here: Path) -> None:
    """FIELD_REPORTS 3.3, and the update that is told is the one that fit tells."""
    keep = ["--checkpoint.save_top_k=-1", "--checkpoint.monitor=null", "--checkpoint.every_n_train_steps=1"]
    words = ["--config=tiny.yaml", "--trainer.max_steps=3", "--trainer.val_check_interval=1", *keep]
    assert main(["fit", *words]) == 0
    (fitted,) = runs(here)
    within = {int(row["step"]) + 1: row["val/nll"] for row in rows(fitted) if "val/nll" in row}
    assert set(within) == {1, 2, 3}
    for update, nll in within.items():
        path = fitted / "checkpoints" / f"update_{update}.ckpt"
        words = [f"--config={fitted}/config.yaml", f"--ckpt_path={path}", f"--trainer.default_root_dir={update}"]
        assert main(["validate", *words]) == 0
        (alone,) = (here / str(update)).iterdir()
        (row,) = (row for row in rows(alone) if "val/nll" in row)
        assert (row["step"], row["val/nll"]) == (update, pytest.approx(nll))
        assert json.loads((alone / "summary.json").read_text())["best/val_nll_update"] == update


def test_weights_are_asked_for(trained: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("validate", "test", "predict"):
        message = refused(capsys, verb, f"--config={trained}/config.yaml")
        assert message.startswith(f"{verb} needs weights: --ckpt_path")


# ---------------------------------------------------------------------- settings


CALLBACK = """
from lightning.pytorch import Callback


class Counter(Callback):
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def on_train_end(self, *_) -> None:
        print(f"counted from {self.count}")
"""


def test_a_callback_of_another_distribution_is_used_by_name(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = here / "site" / "counter-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: counter\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stabilize.callbacks]\nCounter = counter_of_updates:Counter\n")
    (here / "site" / "counter_of_updates.py").write_text(CALLBACK)
    monkeypatch.syspath_prepend(here / "site")
    words = ["--trainer.callbacks+=Counter", "--trainer.callbacks.start=41", "--trainer.logger=false"]
    assert main(["fit", "--config=tiny.yaml", *words]) == 0
    assert "counted from 41" in capsys.readouterr().out


def callbacks(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[type]:
    """The callbacks of a run with these words; it is not carried out."""
    found: list[type] = []

    def only_look(command: training.Command, verb: str) -> None:
        found.extend(type(callback) for callback in command.trainer.callbacks)

    monkeypatch.setattr(training.Command, "_run_subcommand", only_look)
    assert main(["fit", "--config=tiny.yaml", *words]) == 0
    return found


def test_a_second_list_of_callbacks_leaves_the_commands_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What watches and saves is in no list that a config could replace (FIELD_REPORTS 2.14)."""
    for name, callback in (("one", "Timer"), ("two", "LearningRateMonitor")):
        (here / f"{name}.yaml").write_text(f"trainer: {{callbacks: [{callback}]}}\n")
    (here / "more.yaml").write_text("trainer: {callbacks+: [LearningRateMonitor]}\n")
    own = {GradientRatio, LayerSimilarity, Checkpoints, training.RunConfig}
    replaced = callbacks(monkeypatch, "--config=one.yaml", "--config=two.yaml")
    assert own | {LearningRateMonitor} <= set(replaced)
    assert Timer not in replaced
    for words in (
        ["--config=one.yaml", "--config=more.yaml"],
        ["--config=one.yaml", "--trainer.callbacks+=LearningRateMonitor"],
    ):
        assert own | {Timer, LearningRateMonitor} <= set(callbacks(monkeypatch, *words))


def test_environment_variables_set_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As README says (FIELD_REPORTS 2.15)."""
    for prefix in ("PL", "STABILIZE"):
        monkeypatch.setenv(f"{prefix}_FIT__TRAINER__MAX_STEPS", "77")
        monkeypatch.setenv(f"{prefix}_TRAINER__MAX_STEPS", "77")
    with pytest.raises(SystemExit):
        main(["fit", "--config=tiny.yaml", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_steps"] == 2


def test_the_default_optimizer_is_the_tasks() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1))]
    default = inspect.signature(TranslationTask).parameters["optimizer"].default(weights)
    assert isinstance(default, torch.optim.Adam)
    assert default.defaults == torch.optim.Adam(weights, **training.OPTIMIZER["init_args"]).defaults
    assert training.OPTIMIZER["class_path"] == "torch.optim.Adam"


# ---------------------------------------------------------------------- settings that change the path

VALIDATED = ["--trainer.val_check_interval=1", "--trainer.check_val_every_n_epoch=null", "--test_after_fit=true"]
DYNAMIC = ["--model.stabilizer.placement=PreNorm", "--model.stabilizer.residual=HyperConnections"]
DYNAMIC += ["--model.stabilizer.residual.dynamic=true"]
PATHS = {
    "compiled": ["--model.compile_layers=true"],
    "bf16-true": ["--trainer.precision=bf16-true", *DYNAMIC],
    "16-true": ["--trainer.precision=16-true", *DYNAMIC],
    "64-true": ["--trainer.precision=64-true", *DYNAMIC],
    "never logged": ["--trainer.log_every_n_steps=0"],
    "no checkpoints": ["--trainer.enable_checkpointing=false"],
    "barebones": ["--trainer.barebones=true"],
    "another bar": ["--trainer.callbacks+=TQDMProgressBar"],
    "no test": ["--test_after_fit=false", "--data.test_pairs=0"],
    "learned positions": [
        "--model.positions=learned",
        "--model.maximum_length=300",
        "--model.search.maximum_extra=999",
    ],
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.filterwarnings("ignore:model.optimizer.eps is 1e-09, which is 0 in torch.float16")
@pytest.mark.parametrize("name", PATHS)
def test_a_run_comes_to_its_end(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training, a check after each update, and a test."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # no C++ compiler
    compiled_run.cache_clear()
    assert main(["fit", "--config=tiny.yaml", *VALIDATED, *PATHS[name]]) == 0, capsys.readouterr().err
    (run,) = runs(here)
    told = capsys.readouterr().out
    assert told.endswith(f"run folder: {run.relative_to(here)}\n")
    assert ("on a CPU layers train faster as they are" in told) == (name == "compiled")
    assert (run / "checkpoints").exists() == (name not in ("no checkpoints", "barebones"))
    assert (run / "translations").exists() == (name != "no test")


LATE = {
    "no test text": (["--test_after_fit=true", "--data.test_pairs=0"], "test_after_fit is true, but data gives no te"),
    "negative rate": (["--model.optimizer.lr=-1"], "model.optimizer cannot be made: Invalid learning rate: -1.0"),
    "optimiser without groups": (["--model.optimizer=LBFGS"], "model.optimizer cannot be made: LBFGS doesn't support"),
    "optimiser of other gradients": (
        ["--model.optimizer=SparseAdam"],
        "model.optimizer SparseAdam makes no update: SparseAdam does not support dense gradients",
    ),
    "optimiser of another machine": (
        ["--model.optimizer.capturable=true"],
        "model.optimizer Adam makes no update: If capturable=True",
    ),
    "a way to clip without a value": (
        ["--trainer.gradient_clip_algorithm=value", "--model.clipping=GlobalNorm"],
        "trainer.gradient_clip_algorithm is value, which belongs to trainer.gradient_clip_val, and there is none; "
        "model.clipping, GlobalNorm, takes no heed of it",
    ),
    "width": (
        ["--model.width=1000000"],
        "model.encoder_layers 1, model.decoder_layers 1, model.width 1000000, model.hidden 8 make 1.2e+13 weights or ",
    ),
    "pairs": (["--data.train_pairs=1000000000000"], "data.train_pairs is 1000000000000; the embedded corpus has no mo"),
    "checks that do not come": (
        ["--trainer.val_check_interval=400"],
        "the config cannot be carried out: `val_check_interval` (400) must be less than or equal to the number of the ",
    ),
    "a file in the way of runs": (
        ["--trainer.default_root_dir=tiny.yaml"],
        "the folder tiny.yaml/",
    ),
    "a file in the way of checkpoints": (
        ["--checkpoint.dirpath=tiny.yaml/below"],
        "the folder ",
    ),
    "learned positions": (
        ["--model.positions=learned", "--model.maximum_length=10"],
        "model.maximum_length is 10, but the text has a line of ",
    ),
    "interval": (
        ["--trainer.val_check_interval=0.5", "--trainer.check_val_every_n_epoch=null"],
        "trainer.val_check_interval is 0.5: `val_check_interval` should be an integer ",
    ),
    "monitor": (
        ["--checkpoint.monitor=foo", "--trainer.val_check_interval=1"],
        "checkpoint.monitor is foo, which no validation gives; val/loss, val/nll, val/bleu, val/chrf, val/lines, "
        "val/empty, val/truncated would do",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_only_the_text_or_the_model_can_tell(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, start = LATE[name]
    assert main(["fit", "--config=tiny.yaml", "--trainer.logger=false", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {start}")
    assert not list(here.glob("runs/*"))


def test_a_disk_that_is_full(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As one user's share of it: no file may grow beyond what the table of an update needs."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, before[1]))
    try:
        code = main(["fit", "--config=tiny.yaml", "--trainer.logger=false"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert re.match(r"error: .*runs/\S+ cannot be (written|used): File too large", line), line
    assert not list(here.rglob("*.ckpt"))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_place_where_one_may_not_write(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refuse(folder: Path, *_: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number), str(folder))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert main(["fit", "--config=tiny.yaml", "--trainer.logger=false"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    said = f"cannot be used: {os.strerror(number)}; trainer.default_root_dir names another place"
    assert re.fullmatch(rf"error: the folder runs/\S+ {said}", line), line


def test_weights_and_biases_cannot_be_imported(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, training.__name__)
    message = refused(capsys, "fit", "--config=tiny.yaml")
    assert message.startswith("fit needs wandb, which cannot be imported: ")


def test_what_weights_and_biases_refuses(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "a/b?")
    assert main(["fit", "--config=tiny.yaml"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: Weights & Biases refuses, Invalid project name 'a/b?'")
    assert line.endswith("; WANDB_MODE=offline, or disabled, would do without it")


def test_a_mode_of_weights_and_biases(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("NETRC", str(here / "netrc"))
    for mode, start in (
        ("online", "WANDB_MODE is online, but nobody is logged in"),
        ("off", "the environment variable"),
    ):
        monkeypatch.setenv("WANDB_MODE", mode)
        assert main(["fit", "--config=tiny.yaml"]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {start}")


def test_an_output_that_nobody_reads_on(here: Path) -> None:
    """As under `stabilize fit ... | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "stabilize", "fit", "--config=tiny.yaml", "--trainer.logger=false"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment, timeout=300)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_printed_config_goes_to_every_verb(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--config=tiny.yaml", "--print_config"])
    (here / "printed.yaml").write_text(capsys.readouterr().out)
    for verb in ("explain", "fit"):
        assert main([verb, "--config=printed.yaml"]) == 0


def test_the_card_has_what_stands_beside_the_axes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "--config=tiny.yaml", "--model.z_loss=1e-4", "--model.optimizer=RAdam"]
    assert main([*words, "--model.clipping=ZClip", "--model.optimizer.lr=0.5"]) == 0
    card = capsys.readouterr().out
    for axis, name, first in (
        ("clipping", "ZClip", r"z = \(\|g\|"),
        ("z_loss", "0.0001", r"loss \+ z_loss \(log Z\)\^2"),
        ("optimizer", "RAdam", r"lr: 0\.5"),
    ):
        assert re.search(rf"^\W+{axis} +{name} +{first}", card, flags=re.MULTILINE)
    assert main(["explain", "--config=tiny.yaml", "--model.clipping=NoClipping", "--model.z_loss=0"]) == 0
    assert not re.search(r"^\W+(clipping|z_loss) ", capsys.readouterr().out, flags=re.MULTILINE)


def test_an_optimizer_that_goes_on(trained: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--config={trained}/config.yaml", f"--ckpt_path={trained}/checkpoints/last.ckpt", "--trainer.max_steps=3"]
    words += ["--trainer.default_root_dir=runs", "--trainer.logger=false"]
    assert main(["fit", *words, "--model.optimizer=SGD"]) == 2
    assert "model.optimizer is Adam in the checkpoint and SGD here" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="model.optimizer.lr is 0.001 in the checkpoint and 0.5 here; a run that goes"):
        assert main(["fit", *words, "--model.optimizer.lr=0.5"]) == 0


def test_other_ranks_of_torchrun_leave_no_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(training.RUN_FOLDER, raising=False)
    monkeypatch.setattr(training.rank_zero_only, "rank", 1)
    assert training.run_folder(Path("runs")) == Path("runs")
    assert not Path("runs").exists()
    monkeypatch.setenv(training.RUN_FOLDER, "runs/first")
    assert training.run_folder(Path("runs")) == Path("runs/first")


# ---------------------------------------------------------------------- plug-ins


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "Careless does not keep its argument gain: __init__ must set self.gain"),
        (
            "        self.gain = torch.nn.Parameter(torch.ones(1))",
            "cannot assign parameters before Module.__init__() call",
        ),
    ],
)
def test_a_careless_strategy_is_one_sentence(
    body: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = "super().__init__()" if not body else "pass"
    name = f"careless_{start[0]}"
    (here / f"{name}.py").write_text(
        "import torch\nfrom stabilize.strategies import Sum\n\n\nclass Careless(Sum):\n"
        f"    def __init__(self, gain: float = 1.0) -> None:\n        {start}\n{body}\n"
    )
    assert main(["explain", "--config=tiny.yaml", f"--model.stabilizer.residual={name}.Careless"]) == 2
    assert said in capsys.readouterr().err


FAULTY = """
from stabilize.strategies import Sum


class Faulty(Sum):
    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain
        {0}

    def write(self, stream, branch):
        return {1}
"""
FAULTS = {
    "built": (("{}['x']", "stream"), 2, "error: Faulty cannot be made: KeyError: 'x'\n"),
    "at work": (
        ("pass", "stream + gone"),
        1,
        "error: NameError: name 'gone' is not defined; the plug-in faulty_0 fails in write, line 12\n"
        "(--debug shows the traceback)\n",
    ),
    "felt elsewhere": (
        ("pass", "stream[..., :3]"),
        1,
        "; the cause may be in a plug-in: faulty_0\n(--debug shows the traceback)\n",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_plugin_names_it(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, code, said = FAULTS[name]
    module = f"faulty_{len(name)}"  # each is imported once
    (here / f"{module}.py").write_text(FAULTY.format(*lines))
    words = ["fit", "--config=tiny.yaml", f"--model.stabilizer.residual={module}.Faulty", "--trainer.logger=false"]
    assert main(words) == code
    assert capsys.readouterr().err.endswith(said.replace("faulty_0", module))


def test_a_plugin_distribution_is_used_by_its_short_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = here / "site"
    metadata = site / "tenfold-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tenfold\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stabilize.strategies]\nTenfold = tenfold_plugin:Tenfold\n")
    (site / "tenfold_plugin.py").write_text(STRATEGY)
    monkeypatch.syspath_prepend(site)
    (here / "tenfold.yaml").write_text("model: {stabilizer: {residual: {class_path: Tenfold, init_args: {gain: 3}}}}\n")
    assert main(["fit", "--config=tiny.yaml", "--config=tenfold.yaml", "--trainer.logger=false"]) == 0
    (run,) = runs(here)
    assert residual(run) == "tenfold_plugin.Tenfold"
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["task"]["stabilizer"]["residual"]["init_args"] == {"gain": 3.0}
    assert checkpoint["global_step"] == 2


def test_a_broken_plugin_that_no_config_names_is_a_warning(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = here / "site" / "missing-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: missing\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stabilize.strategies]\nMissing = missing_plugin:Missing\n")
    monkeypatch.syspath_prepend(here / "site")
    monkeypatch.setattr(plugins, "broken", {})
    for words in (["explain", "--config=tiny.yaml"], ["strategies", "residual"]):
        assert main(words) == 0
        assert capsys.readouterr().err == (
            "warning: plug-in Missing (missing_plugin:Missing) is left out: "
            "ModuleNotFoundError: No module named 'missing_plugin'\n"
        )


def script() -> list[str]:
    path = Path(sys.executable).parent / "stabilize"
    if not path.exists():
        pytest.skip("the command is not installed beside this Python")
    return [str(path)]


def under_a_terminal(command: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command that reads and writes a terminal where nobody sits."""
    screen, terminal = pty.openpty()
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, env=environment)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # how the end of a terminal is read
        while chunk := os.read(screen, 65536):
            shown += chunk
    os.close(screen)
    _, errors = process.communicate(timeout=300)
    return process.returncode, shown.decode(), errors.decode()


def without_input(command: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """The same of one whose input is closed and whose output is a file."""
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, text=True, timeout=300
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("way", ["script", "module", "file"])
def test_a_strategy_beside_the_config_and_nobody_to_ask(way: str, here: Path) -> None:
    """Without a W&B key: the script under a terminal, the module and its file with their input closed
    (FIELD_REPORTS 2.13)."""
    (here / "configs").mkdir()
    (here / "configs" / "beside.py").write_text(STRATEGY)
    (here / "configs" / "beside.yaml").write_text("model: {stabilizer: {residual: beside.Tenfold}}\n")
    hidden = ("WANDB_", "STABILIZE_", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"HOME": str(here), "OMP_NUM_THREADS": "1"}
    words = ["fit", "--config=tiny.yaml", "--config=configs/beside.yaml"]
    if way == "script":
        code, shown, errors = under_a_terminal([*script(), *words], environment)
    else:
        module = [
            sys.executable,
            *{"module": ["-m", "stabilize"], "file": [ROOT / "stabilize/__main__.py"]}[way],
            *words,
        ]
        code, shown, errors = without_input(module, environment | {"PYTHONPATH": str(ROOT)})
    assert (code, errors) == (0, "")
    assert "account" not in shown.lower()
    assert "offline" in shown
    (run,) = runs(here)
    assert residual(run) == "beside.Tenfold"
    (record,) = run.glob("wandb/offline-run-*/*.wandb")
    assert record.stat().st_size > 0


# ---------------------------------------------------------------------- output


def test_a_log_file_stays_short(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--trainer.max_steps=200", "--trainer.val_check_interval=100", "--trainer.check_val_every_n_epoch=null"]
    assert main(["fit", "--config=tiny.yaml", *words, "--test_after_fit=true"]) == 0
    output = capfd.readouterr()
    # wandb is silent, but only in the first run of a process.
    assert [line for line in output.err.splitlines() if not line.startswith("wandb: ")] == []
    lines = output.out.splitlines()
    assert len(lines) < 100
    assert "\r" not in output.out
    assert "\x1b" not in output.out
    said = [line.partition(":")[0] for line in lines if line.startswith("update ")]
    assert said == [f"update {update}" for update in (50, 100, 100, 150, 200, 200)]  # twice where it was validated
    assert any(re.search(r"test/bleu +\d", line) for line in lines)
    assert lines[-1].startswith("run folder: runs/")


def test_half_precision_on_a_cpu_is_said_to_be_another(here: Path) -> None:
    """Lightning's warning, which is not among those that the command leaves out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert main(["fit", "--config=tiny.yaml", "--trainer.precision=16-mixed"]) == 0
    said = " ".join(str(warning.message) for warning in caught)
    assert "fp16 is not supported on CPU. Using `precision='bf16-mixed'` instead" in said


def test_a_run_that_the_guard_stops_ends_with_three_and_a_sentence(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    poison = {"class_path": "tests.callbacks.poison.Poison", "init_args": {"updates": {"3": "nan"}}}
    flags = [f"--trainer.callbacks+={json.dumps(poison)}", "--spike_guard.policy=stop", "--checkpoint.every=1"]
    assert main(["fit", "-c", "tiny.yaml", *flags, "--trainer.max_steps=6"]) == 3
    (folder,) = here.glob("runs/*")
    last = folder / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("stopped: update 3: the loss is nan, first in the output of model.decoder.layers.0.")
    assert said.endswith(f"; the last checkpoint is {last.relative_to(here)}")
    (event,) = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    assert (event["update"], event["kind"], event["action"]) == (3, "not finite", "stopped")
    assert len(event["ranks"][0]["texts"]) == len(event["ranks"][0]["sentences"][0])
    assert json.loads((folder / "summary.json").read_text())["stability/verdict"] == "diverged at update 3"
    assert main(["fit", "-c", str(folder / "config.yaml"), "--ckpt_path", str(last), "--trainer.max_steps=4"]) == 3


def test_the_seed_decides_every_bit(here: Path) -> None:
    """Of the weights, whatever the number of workers: with dropout and noise in the text."""
    words = ["--model.dropout=0.1", "--model.optimizer.lr=0.01", "--data.sampling=0.1", "--trainer.max_steps=4"]
    for other in ("--data.workers=0", "--data.workers=2", "--seed_everything=2"):
        assert main(["fit", "--config=tiny.yaml", *words, other]) == 0
    places = (run / "checkpoints" / "last.ckpt" for run in runs(here))
    alone, helped, another = (torch.load(place, weights_only=True)["state_dict"] for place in places)
    assert all(helped[key].equal(value) for key, value in alone.items())
    assert not any(another[key].equal(value) for key, value in alone.items() if value.ndim > 1)


SIGNALS = pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])


@pytest.fixture
def signalled(here: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Trains for six updates and sends a signal in the third; the exit code and all that was said."""

    def train(name: str, times: int, *words: str) -> tuple[int, str]:
        (here / "signal.yaml").write_text(
            "trainer:\n  callbacks:\n  - class_path: tests.commands.cues.SendSignal\n"
            f"    init_args: {{name: {name}, update: 3, times: {times}}}\n"
        )
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
        code = main(["fit", "--config=tiny.yaml", "--config=signal.yaml", "--trainer.max_steps=6", *words])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, before)
        output = capfd.readouterr()
        assert "Traceback" not in output.err
        return code, output.out.replace("\n", "")

    return train


@SIGNALS
@pytest.mark.parametrize(("accumulate", "check"), [(1, 4), (1, 3), (2, 12)])
def test_a_run_that_is_asked_to_end_goes_on_as_if_nothing_had_happened(
    name: str, code: int, accumulate: int, check: int, here: Path, signalled: Callable[..., tuple[int, str]]
) -> None:
    """The signal comes in the third update; every `check` batches there is a validation, once just after it."""
    words = ["--model.dropout=0.1", f"--trainer.accumulate_grad_batches={accumulate}", "--model.optimizer.lr=0.01"]
    words += [f"--trainer.val_check_interval={check}", "--trainer.check_val_every_n_epoch=null"]
    words += ["--trainer.log_every_n_steps=1"]
    ended, said = signalled(name, 1, *words)
    assert ended == code
    (run,) = runs(here)
    assert f"{name}: the update is finished and saved first" in said
    assert f"ended after update 3; it goes on with --ckpt_path {run.relative_to(here)}/checkpoints/last.ckpt" in said
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 3
    last = ["--config=tiny.yaml", "--trainer.max_steps=6", *words]
    assert main(["fit", *last, "--ckpt_path=last"]) == 0
    assert main(["fit", *last]) == 0
    _, resumed, whole = runs(here)
    found, expected = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for folder in (resumed, whole)
    )
    assert all(found[key].equal(expected[key]) for key in expected)
    losses = [[row["train/loss"] for row in rows(folder) if "train/loss" in row] for folder in (run, resumed, whole)]
    assert losses[0] + losses[1] == losses[2]
    assert len(losses[2]) == 6
    assert len(list(run.glob("checkpoints/update_*.ckpt"))) == (check == 3)


@SIGNALS
def test_a_second_signal_ends_at_once(
    name: str, code: int, here: Path, signalled: Callable[..., tuple[int, str]]
) -> None:
    ended, said = signalled(name, 2)
    assert ended == code
    assert "ended after update" not in said
    (run,) = runs(here)
    assert not list(run.rglob("*.ckpt"))


def test_words_that_cannot_be_said_take_nothing_away(
    here: Path, signalled: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends all of `stabilize fit | tee log`."""

    def broken(words: str, **_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("stabilize.callbacks.interruption.print", broken, raising=False)
    ended, said = signalled("SIGINT", 1)
    assert ended == 130
    assert "the update is finished" not in said
    (run,) = runs(here)
    assert (run / "checkpoints" / "last.ckpt").exists()


@SIGNALS
def test_a_signal_after_the_last_update_is_heard(
    name: str, code: int, here: Path, signalled: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was to follow, the test here, does not."""
    monkeypatch.setattr(ModelCheckpoint, "on_train_epoch_end", lambda *_: os.kill(os.getpid(), signal.Signals[name]))
    ended, said = signalled(name, 0, "--test_after_fit=true")
    assert ended == code
    assert "test/bleu" not in said


def test_without_checkpoints_nothing_is_promised(here: Path, signalled: Callable[..., tuple[int, str]]) -> None:
    ended, said = signalled("SIGINT", 1, "--trainer.enable_checkpointing=false")
    assert ended == 130
    assert "ended after update 3" in said
    assert "ckpt_path" not in said


def test_a_fresh_start_where_there_is_nothing_to_go_on_from(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "fit", "--config=tiny.yaml", "--ckpt_path=last").startswith("ckpt_path is last, but no run")
    for said, step in (("a fresh start", 2), ("goes on from", 4)):
        assert main(["fit", "--config=tiny.yaml", "--ckpt_path=auto", f"--trainer.max_steps={step}"]) == 0
        assert said in capsys.readouterr().out
        assert torch.load(runs(here)[-1] / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == step
