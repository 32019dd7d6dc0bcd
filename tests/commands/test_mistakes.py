"""Typing errors, on the command line and in files: one sentence that names the key, the value and what is near
(FIELD_REPORTS 2.12)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stabilize import cli, plugins
from tests.checkout import ROOT

Said = Callable[..., str]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs `stabilize fit` with flags and YAML texts, which has to fail; what it says on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, verb: str = "fit") -> str:
        flags = []
        for place, word in enumerate(words):
            if word.startswith("-"):
                flags.append(word)
            else:
                (tmp_path / f"{place}.yaml").write_text(word)
                flags.append(f"--config={place}.yaml")
        assert cli.main([verb, *flags]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert not list(tmp_path.glob("runs/*"))
        lines = output.err.splitlines()
        assert len(lines) <= 5
        assert "Traceback" not in output.err
        assert "usage:" not in output.err
        (error,) = [line for line in lines if line.startswith("error: ")]
        return error.removeprefix("error: ")

    return run


def yaml_of(key: str, value: str) -> str:
    names = key.split(".")
    lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(names)]
    return "\n".join(lines) + f" {value}\n"


AXES = {
    "model.stabilizer.placement": ("PrNorm", "PreNorm"),
    "model.stabilizer.residual": ("ScaledSun", "ScaledSum"),
    "model.stabilizer.norm": ("RMSNrom", "RMSNorm"),
    "model.stabilizer.epsilon": ("FixdEpsilon", "FixedEpsilon"),
    "model.stabilizer.initialization": ("Xaver", "Xavier"),
    "model.stabilizer.attention": ("QKNrom", "QKNorm"),
    "model.stabilizer.warmup": ("InverseSqr", "InverseSqrt"),
    "model.decoder_stabilizer.residual": ("DeepNormResidul", "DeepNormResidual"),
    "model.clipping": ("GlobalNrm", "GlobalNorm"),
    "model.optimizer": ("Adamm", "Adam"),
    "data": ("SyntheticCorpos", "SyntheticCorpus"),
}


@pytest.mark.parametrize("form", ["flag", "name", "class_path", "second file"])
@pytest.mark.parametrize("key", AXES)
def test_a_misspelt_class(key: str, form: str, said: Said) -> None:
    wrong, right = AXES[key]
    in_file = yaml_of(key, wrong if form != "class_path" else f"{{class_path: {wrong}, init_args: {{}}}}")
    words = {"flag": [f"--{key}={wrong}"], "second file": ["seed_everything: 1\n", in_file]}.get(form, [in_file])
    place = "" if form == "flag" else f" (in {len(words) - 1}.yaml)"
    message = said(*words)
    assert message.startswith(f"{key} is {wrong}{place}: no ")
    assert right in message.partition("; nearest: ")[2].split(", ")


CALLBACKS = "trainer: {{callbacks: [{{class_path: {0}, init_args: {{{1}: step}}}}]}}"
RESIDUAL = "model: {stabilizer: {residual: {class_path: ScaledSum, init_args: {sum_scal: 0.5}}}}"
SUM_SCALE = "model.stabilizer.residual.sum_scale"

MISTAKES = {
    "argument": (
        ["--model.stabilizer.residual=ScaledSum", "--model.stabilizer.residual.sum_scal=0.5"],
        "model.stabilizer.residual.sum_scal is 0.5: there is no such key; nearest: model.stabilizer.residual.sum_scale",
    ),
    "argument in a file": (
        [RESIDUAL],
        "model.stabilizer.residual.sum_scal is 0.5 (in 0.yaml): there is no such key; nearest: " + SUM_SCALE,
    ),
    "argument after a file": (
        ["model: {stabilizer: {residual: ScaledSum}}", "--model.stabilizer.residual.sum_scal=0.5"],
        "model.stabilizer.residual.sum_scal is 0.5: there is no such key; nearest: model.stabilizer.residual.sum_scale",
    ),
    "argument of another class": (
        [f"--{SUM_SCALE}=0.5"],
        f"{SUM_SCALE} is 0.5: Sum has no such argument; it belongs to ScaledSum",
    ),
    "word for a number": (["--model.width=sixty"], "model.width is sixty: expected int"),
    "float for an integer": (["--trainer.max_steps=1e3"], "trainer.max_steps is 1e3: expected int"),
    "formula": (
        ["--model.stabilizer.residual=ScaledSum", f"--{SUM_SCALE}=1/sqrt(2)"],
        f"{SUM_SCALE} is 1/sqrt(2): expected float or rsqrt2; nearest: rsqrt2",
    ),
    "word of a choice": (
        ["--model.activation=rellu"],
        "model.activation is rellu: expected relu or gelu or swiglu; nearest: relu, gelu",
    ),
    "no value": (["--model.width"], "model.width is '': expected int"),
    "off for a number": (
        ["trainer:\n  max_epochs: off\n"],
        "trainer.max_epochs is false (in 0.yaml): expected int or null",
    ),
    "unknown group": (
        ["modell: {width: 64}"],
        "modell is {width: 64} (in 0.yaml): there is no such key; nearest: model",
    ),
    "unknown flag": (["--model.widht=64"], "model.widht is 64: there is no such key; nearest: model.width"),
    "shortened flag": (["--model.wid=64"], "model.wid is 64: there is no such key; nearest: model.width"),
    "level too high": (
        ["stabilizer: {placement: PreNorm}"],
        "stabilizer is {placement: PreNorm} (in 0.yaml): there is no such key at this level; nearest: model.stab",
    ),
    "flag too high": (
        ["--stabilizer.placement=PreNorm"],
        "stabilizer is {placement: PreNorm}: there is no such key at this level; nearest: model.stab",
    ),
    "argument too high": (
        ["--batch_tokens=500"],
        "batch_tokens is 500: there is no such key at this level; nearest: data.batch_tokens",
    ),
    "level too low": (
        ["model: {data: SyntheticCorpus}"],
        "model.data is SyntheticCorpus (in 0.yaml): there is no such key at this level; nearest: data",
    ),
    "class for a group": (
        ["--model.stabilizer=PreNorm"],
        "model.stabilizer is PreNorm: this is a group of keys; there are: model.stabilizer.placement, ",
    ),
    "tab": (["model:\n\twidth: 64\n"], "0.yaml, line 2, column 1 is no YAML: "),
    "too few of them": (
        ["--model.optimizer=torch.optim.Adam", "--model.optimizer.betas=[0.9]"],
        "model.optimizer.betas is [0.9]: expected a list of 2 float",
    ),
    "no threads": (["--threads=0"], "threads is 0; from 1 to 1,024 would do"),
    "more threads than can be counted": (["--threads=10000000000000000000000"], "threads is 1000"),
    "no quotes": (
        ["data:\n  init_args:\n    train: [a.{lang}, b]\n"],
        "0.yaml, line 3, column 15 is no YAML: did not find expected ',' or ']'; a text with { or [ in it needs quotes",
    ),
    "a list of what is chosen from": (
        ["--data.drop=[foo]"],
        "data.drop is [foo]: expected a list of copied, duplicate",
    ),
    "bracket": (["model: {width: 64\ntrainer: 3\n"], "0.yaml, line 2, column 8 is no YAML: "),
    "no mapping": (["[model]\n"], "the config 0.yaml has no keys, but is [model]"),
    "nothing": (["# nothing yet\n"], "the config 0.yaml has no keys, but is empty"),
    "no file": (
        ["model: {}", "--config=O.yaml"],
        "the config O.yaml cannot be read: No such file or directory; there are: 0.yaml",
    ),
    "misspelt file": (
        [f"--config={ROOT}/configs/strategies/deepnrm.yaml"],
        f"the config {ROOT}/configs/strategies/deepnrm.yaml cannot be read: No such file or directory; nearest: "
        f"{ROOT}/configs/strategies/deepnorm.yaml",
    ),
    "data argument": (
        ["--data.batch_token=5"],
        "data.batch_token is 5: there is no such key; nearest: data.batch_tokens, data.evaluation_batch_tokens",
    ),
    "missing arguments": (["--data=ParallelText"], "ParallelText cannot do without data.train"),
    "trainer argument": (
        ["--trainer.max_step=5"],
        "trainer.max_step is 5: there is no such key; nearest: trainer.max_steps, ",
    ),
    "callback": (
        [CALLBACKS.format("LearningRateMonitr", "logging_interval")],
        "trainer.callbacks[0] is LearningRateMonitr (in 0.yaml): no Callback is called so; nearest: LearningR",
    ),
    "one more callback": (
        ["--trainer.callbacks+=LearningRateMonitr"],
        "trainer.callbacks[0] is LearningRateMonitr: no Callback is called so; nearest: LearningRateMonitor",
    ),
    "argument of a callback": (
        [CALLBACKS.format("LearningRateMonitor", "logging_intervall")],
        "trainer.callbacks[0].logging_intervall is step (in 0.yaml): there is no such key; nearest: trainer.callbac",
    ),
    "argument of an optimiser": (
        ["--model.optimizer.beta=0.9"],
        "model.optimizer.beta is 0.9: there is no such key; nearest: model.optimizer.betas",
    ),
    "key within an optional group": (
        ["model: {decoder_stabilizer: {placment: PostNorm}}"],
        "model.decoder_stabilizer.placment is PostNorm (in 0.yaml): there is no such key; nearest: model.decoder",
    ),
    "class_path": (
        ["model: {stabilizer: {placement: {class_pth: PreNorm}}}"],
        "model.stabilizer.placement.class_pth is PreNorm (in 0.yaml): there is no such key; nearest: model.stabil",
    ),
    "strategy of another axis": (
        ["--model.stabilizer.placement=Xavier"],
        "model.stabilizer.placement is Xavier: no Placement is called so; there are: PreNorm, ",
    ),
    "module": (
        ["--model.stabilizer.placement=stabilize.strategies.placment.PreNorm"],
        "model.stabilizer.placement is stabilize.strategies.placment.PreNorm: no Placement is called so; nearest: Pre",
    ),
    # What YAML and jsonargparse take for something else.
    "twice": (
        ["trainer:\n  max_steps: 3\n  max_epochs: 1\n  max_steps: 5\n"],
        "0.yaml, line 4, column 3 will not do: max_steps stands here for the second time, after line 2; one of them ",
    ),
    "twice on a line": (["--model={width: 8, width: 16}"], "model is {width: 8, width: 16}: this is a group of keys"),
    "null for a group": (
        ["model: {stabilizer: null}"],
        "model.stabilizer is null (in 0.yaml): this is a group of keys; there are: model.stabilizer.placement, ",
    ),
    "number for a group": (["model: {stabilizer: 1e-5}"], "model.stabilizer is 1.0e-05 (in 0.yaml): this is a gro"),
    "null for a class": (
        ["model: {stabilizer: {residual: null}}"],
        "model.stabilizer.residual is null (in 0.yaml): expected Residual",
    ),
    "null for an optimiser": (["model: {optimizer: null}"], "model.optimizer is null (in 0.yaml): expected "),
    "base": (
        ["model: {stabilizer: {epsilon: {class_path: stabilize.strategies.Epsilon}}}"],
        "model.stabilizer.epsilon is stabilize.strategies.Epsilon (in 0.yaml): Epsilon is only what others descend "
        "from; there are: FixedEpsilon, ",
    ),
    "list for a class": (["model: {clipping: [GlobalNorm]}"], "model.clipping is [GlobalNorm] (in 0.yaml): "),
    "no logger": (["trainer: {logger: [false]}"], "trainer.logger[0] is false (in 0.yaml): expected Logger"),
    "key that is nothing": (["~: 1\n"], "0.yaml, line 1, column 1 will not do: a word is to stand before the colon"),
    "endless": (["model: &m {stabilizer: *m}\n"], "0.yaml, line 1, column "),
    "deep": ([f"model: {'[' * 30}"], "0.yaml, line 1, column 31 will not do: it is nested deeper than 24 levels"),
    "growing": (
        ["".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9) if k else 1}]\n" for k in range(9))],
        "0.yaml, line ",
    ),
    "no number in a callback": (["--spike_guard.deviations=.nan"], "spike_guard.deviations is nan, which "),
    # What a class itself refuses.
    "combination": (
        ["--model.stabilizer.placement=PostNorm", "--model.stabilizer.residual=HyperConnections"],
        "HyperConnections cannot be combined with PostNorm: ",
    ),
    "value of a strategy": (["--model.stabilizer.warmup.updates=0"], "model.stabilizer.warmup.updates is 0; "),
    "value of a strategy of the decoder": (
        ["--model.decoder_stabilizer.warmup=Noam", "--model.decoder_stabilizer.warmup.updates=0"],
        "model.stabilizer.warmup.updates is 0; ",
    ),
    "combination in the decoder": (
        ["model: {decoder_stabilizer: {placement: PostNorm, residual: HyperConnections}}"],
        "HyperConnections cannot be combined with PostNorm: ",
    ),
    "value of the model": (["--model.heads=7"], "model.width is 512, which model.heads, 7, does not divide"),
    "value of the data": (["--data.batch_tokens=0"], "data.batch_tokens is 0; 1 is the least that will do"),
    "null for a choice": (
        ["--model.stabilizer.residual=AdminResidual", "--model.stabilizer.residual.profile=null"],
        "model.stabilizer.residual.profile is null: expected paper or released",
    ),
    "infinity": (["model: {z_loss: .inf}"], "model.z_loss is inf, which is beyond the numbers "),
    "no number": (
        ["model: {stabilizer: {residual: {class_path: SkipInit, init_args: {initial: .nan}}}}"],
        "model.stabilizer.residual.initial is nan, which is beyond ",
    ),
    "too small for float32": (
        ["--model.stabilizer.attention=SoftCap", "--model.stabilizer.attention.cap=1e-50"],
        "model.stabilizer.attention.cap is 1e-50, which is beyond ",
    ),
    "too many updates": (
        [f"--model.stabilizer.warmup.updates=1{'0' * 30}"],
        f"model.stabilizer.warmup.updates is 1{'0' * 30}, which is beyond ",
    ),
    "null for a number": (["--data.workers=null"], "data.workers is null: expected int"),
    "null within a strategy": (
        [
            "model: {stabilizer: {residual: {class_path: StochasticDepth, init_args: {around: {class_path: DLCL, "
            "init_args: {normalize: null}}}}}}"
        ],
        "model.stabilizer.residual.around.normalize is null (in 0.yaml): expected each or sum",
    ),
    "seed of the data": (["--data.seed=-1"], "data.seed is -1; 0 is the least that will do"),
    "workers": (["--data.workers=-1"], "data.workers is -1; 0 is the least that will do"),
    "test pairs": (["--data.test_pairs=-3"], "data.test_pairs is -3; 0 is the least that will do"),
    "smoothing": (["--model.label_smoothing=1.5"], "model.label_smoothing is 1.5; a share below 1 would do"),
    "samples": (["--model.samples=-2"], "model.samples is -2; 0 is the least that will do"),
    "seed": (["--seed_everything=-1"], "seed_everything is -1: "),
    # What only a library knows.
    "accelerator": (["--trainer.accelerator=cpuu"], "trainer.accelerator is cpuu: You selected an invalid acc"),
    "devices": (["--trainer.devices=abc"], "trainer.devices is abc: `devices` selected with "),
    "strategy": (["--trainer.strategy=dpp"], "trainer.strategy is dpp: You selected an invalid strategy name"),
    "mode of a callback": (["--checkpoint.mode=least"], "Checkpoints cannot be made: `mode` can be min, max but "),
    "callback twice": (["--trainer.callbacks+=GradientRatio"], "trainer.callbacks has a GradientRatio, but every run "),
    # Which words are not what they seem.
    "learning rate": (["--model.optimizer.lr=abc"], "model.optimizer.lr is abc: expected float"),
    "argument of nobody": (
        ["--model.stabilizer.placement.foo=3"],
        "model.stabilizer.placement.foo is 3: PreNorm ",
    ),
}

WORDS = {
    "config without its flag": (["tiny.yaml"], "tiny.yaml stands alone, without what it is for; -c tiny.yaml would do"),
    "flag without its value": (["-c"], "-c needs the path of a config after it"),
    "file right after the letter": (["-cmissing.yaml"], "the config missing.yaml cannot be read: "),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_as_they_are_typed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, start = WORDS[name]
    assert cli.main(["explain", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {start}")


@pytest.mark.parametrize("name", MISTAKES)
def test_the_sentence(name: str, said: Said) -> None:
    words, start = MISTAKES[name]
    message = said(*words, verb="explain")
    assert message.startswith(start)


def test_a_broken_plugin_is_an_error_where_its_class_is_asked_for(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "raising-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: raising\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stabilize.strategies]\nRaising = raising_plugin:Raising\n")
    (tmp_path / "raising_plugin.py").write_text("raise ValueError('needs a newer torch')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "broken", {})
    for name in ("Raising", "raising_plugin.Raising"):
        message = said(f"--model.stabilizer.residual={name}")
        assert message.startswith(f"model.stabilizer.residual is {name}: ")
        assert message.endswith("ValueError: needs a newer torch")


FORMS = {
    "a class within a flag": ["--model.clipping={class_path: ZClip, init_args: {threshold: 3}}"],
    "a group within a flag": ["--model.stabilizer={placement: PostNorm}"],
    "arguments of the class before": ["--model.optimizer=SGD", "model: {optimizer: {lr: 0.1}}"],
    "a list in a flag": ["--trainer.callbacks=[Timer]"],
    "arguments of the last of a list": ["--trainer.callbacks+=Timer", "--trainer.callbacks.verbose=false"],
    "another class, whose predecessor needed more": ["data: ParallelText", "data: SyntheticCorpus"],
    "a text that looks like a number": ["--trainer.default_root_dir=123"],
    "a mark at the beginning": ["\ufeffmodel: {width: 64}"],
}


@pytest.mark.parametrize("name", FORMS)
def test_what_is_no_mistake(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading the words first refuses nothing that jsonargparse understands."""
    monkeypatch.chdir(tmp_path)
    flags = []
    for place, word in enumerate(FORMS[name]):
        if not word.startswith("--"):
            (tmp_path / f"{place}.yaml").write_text(word, encoding="utf-8")
        flags.append(word if word.startswith("--") else f"--config={place}.yaml")
    assert cli.main(["explain", *flags]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
def test_a_file_in_another_encoding(encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.yaml").write_text("model: {width: 64}  # schön\n", encoding=encoding)
    assert cli.main(["explain", f"--config={tmp_path}/other.yaml"]) == 2
    assert f"error: the config {tmp_path}/other.yaml is no text in UTF-8: " in capsys.readouterr().err


def test_the_quickstart_has_no_mistake(said: Said) -> None:
    quickstart = ROOT / "configs" / "quickstart.yaml"
    assert said(f"--config={quickstart}", "--model.widht=8") == (
        "model.widht is 8: there is no such key; nearest: model.width"
    )


def test_a_word_that_belongs_to_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "PostNorm"]) == 2
    assert "PostNorm" in capsys.readouterr().err.splitlines()[0]


def test_a_misspelt_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fitt"]) == 2
    assert capsys.readouterr().err == "error: stabilize has no verb fitt; did you mean fit?\n"


def test_the_file_of_the_command_is_the_command() -> None:
    """As `python stabilize/cli.py`, which is what somebody types who reads the layout."""
    command = [sys.executable, str(ROOT / "stabilize" / "cli.py"), "fitt"]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (ended.returncode, ended.stderr) == (2, "error: stabilize has no verb fitt; did you mean fit?\n")
