"""Every file under configs/ is a configuration that the command accepts."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import jsonargparse._typehints
import pytest
import yaml

from stabilize import cli
from stabilize.card import Card, card, from_config
from stabilize.commands import training
from stabilize.commands.compare import plan, study_of
from stabilize.model import EncoderDecoder, Sizes
from stabilize.task import TranslationTask
from tests.checkout import ROOT
from tests.commands.parsing import fit_parser
from tests.models import SOURCE, TARGET, VOCABULARY

CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
COMPLETE = {QUICKSTART, *(CONFIGS / "experiments").glob("*.yaml")}  # all others are laid over the quickstart


STUDIES = sorted((CONFIGS / "studies").glob("*.yaml"))  # of `compare`, the others of `fit`
BUNDLES = sorted((CONFIGS / "strategies").glob("*.yaml"))
SWEEPS = sorted((CONFIGS / "sweeps").glob("*.yaml"))  # of `wandb sweep`
OTHERS = sorted({*CONFIGS.glob("**/*.yaml")} - {*STUDIES} - {*SWEEPS})


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_compare_accepts_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That `fit` knows each key of each run is seen in tests/commands/test_compare.py, which takes a minute."""
    monkeypatch.chdir(ROOT)
    study = study_of(path)
    assert all(Path(config).is_file() for config in study.configs)
    planned = plan(path, study, threads=1)
    assert len({cell.name for cell in planned}) == len(planned) >= len(study.strategies) * len(study.seeds)
    assert study.question.endswith("?")
    if path.stem != "strategies":  # its question is another: all that are published, on real text
        assert "two cores" in path.read_text(encoding="utf-8").partition("question:")[0]
        assert study.core_minutes


def words_of(sweep: Path, first: bool) -> list[str]:
    """The command of a sweep as an agent makes it, each parameter at its first or last value."""
    settings = yaml.safe_load(sweep.read_text(encoding="utf-8"))
    args = []
    for key, given in settings["parameters"].items():
        values = given.get("values") or [given["min"], given["max"]]
        args.append(f"--{key}={values[0 if first else -1]}")
    found = settings["command"]
    place = found.index("${args}")
    assert found[:3] == ["${env}", "stabilize", "fit"]
    return [*found[2:place], *args, *found[place + 1 :]]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda path: path.stem)
def test_each_key_of_a_sweep_is_a_flag_of_fit(sweep: Path, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = words_of(sweep, first)
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as end:
        cli.main([*words, "--print_config"])
    assert not end.value.code
    assert cli.main([*words, "--modell.width=8", "--print_config"]) == 2  # what is no flag is refused


@pytest.mark.parametrize("config", OTHERS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_the_command_accepts_it(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # paths in configurations start at the checkout
    files = [config] if config in COMPLETE else [QUICKSTART, config]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            code = cli.main(["fit", *(f"--config={path}" for path in files), "--print_config"])
        except SystemExit as end:
            code = end.code
    assert not code
    resolved = yaml.safe_load(output.getvalue())
    assert {"model", "data", "trainer"} <= set(resolved)


def made(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TranslationTask, Card]:
    """The task of a bundle over the quickstart, and its card as the report makes it, from the config alone."""
    name = "discard_init_args_on_class_path_change"  # as the command has it
    monkeypatch.setattr(jsonargparse._typehints, name, training.keep_no_arguments_of_another_class)
    parser = fit_parser()
    config = parser.parse_args([f"--config={QUICKSTART}", f"--config={bundle}"])
    return parser.instantiate(config).model, from_config(yaml.safe_load(parser.dump(config)))


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.stem)
def test_a_bundle_makes_a_model_and_a_card(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, shown = made(bundle, monkeypatch)
    sizes = Sizes(4, 4, width=16, heads=2, hidden=64)
    model = EncoderDecoder(VOCABULARY, sizes, task.stabilizer, task.decoder_stabilizer).eval()
    assert model(SOURCE, TARGET).isfinite().all()
    parts = (task.sizes, task.stabilizer, task.decoder_stabilizer, "32-true")
    assert shown.stacks.keys() >= card(*parts).stacks.keys()
    answers = [answer for stack in shown.stacks.values() for answer in stack]
    assert {answer.axis for answer in answers} >= {*task.stabilizer.axes}
    assert all(answer.equation for answer in answers if answer.axis in task.stabilizer.axes)


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.stem)
def test_a_bundle_says_in_its_first_line_what_it_is_and_where_it_is_from(bundle: Path) -> None:
    first = bundle.read_text(encoding="utf-8").splitlines()[0]
    assert re.match(r"# \S.*\b(19|20)\d\d\b", first)


@pytest.mark.parametrize(
    ("bundle", "beside"),
    [
        (
            "deepnorm",
            {"clipping": ("GlobalNorm", "value: 1.0"), "optimizer": ("Adam", "lr: 0.002, betas: (0.9, 0.98)")},
        ),
        ("b2t_released", {"clipping": ("GlobalNorm", "value: 0.1"), "optimizer": ("Adam", "lr: 0.002")}),
        ("admin", {"clipping": ("GlobalNorm", "value: 1.0"), "optimizer": ("RAdam", "lr: 0.001, betas: (0.9, 0.98)")}),
        ("power_norm", {"clipping": ("GlobalNorm", "value: 1.0"), "optimizer": ("Adam", "lr: 0.002")}),
    ],
)
def test_the_card_has_what_a_bundle_sets_beside_the_axes(
    bundle: str, beside: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shown = made(CONFIGS / "strategies" / f"{bundle}.yaml", monkeypatch)
    assert list(shown.stacks) == (["encoder", "decoder", "both stacks"] if bundle == "power_norm" else [""])
    last = list(shown.stacks.values())[-1]
    found = {answer.axis: (answer.name, answer.options) for answer in last[-len(beside) :]}
    assert found.keys() == beside.keys()
    for axis, (name, options) in beside.items():
        assert found[axis][0] == name
        assert found[axis][1].startswith(options)
