"""`stabilize strategies` and the options' own help: what is on the menu, and what is said of it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from stabilize.cli import VERBS, main
from stabilize.commands.menu import MENU, key
from stabilize.strategies import AXES, Strategy, Sum
from stabilize.strategies.menu import entry, menu
from tests.checkout import ROOT

OURS = [
    pytest.param(axis, strategy, id=f"{axis}-{strategy.__name__}")
    for axis, base in MENU.items()
    for strategy in menu(base)
    if strategy.__module__.startswith("stabilize.")
]
PLAIN = {"NoNorm", "NoResidual", "FixedEpsilon", "PrecisionEpsilon", "LayerEpsilon", "Linear", "NoWarmup", "NoClipping"}
"""What no paper proposed."""


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints; it may leave as a parser does after its help."""
    with contextlib.suppress(SystemExit):
        assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("axis", "strategy"), OURS)
def test_every_strategy_says_what_it_does(axis: str, strategy: type[Strategy]) -> None:
    about = entry(strategy)
    assert about.sentence.endswith(".")
    assert len(about.sentence.split()) > 2
    assert re.search(r"[=<(]", about.equation)
    if strategy.__name__ not in PLAIN:
        assert re.search(r"\b(19|20)\d\d\b", about.paper)
        assert re.search(r"arXiv:\d{4}\.\d{4,5}|proceedings\.", about.paper)


def test_the_menu_has_every_axis_and_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "strategies")
    assert "model.stabilizer.placement" in text
    assert "model.clipping" in text
    for axis, base in MENU.items():
        assert re.search(rf"^{key(axis)} *$", text, flags=re.MULTILINE)
        for strategy in menu(base):
            assert re.search(rf"^ *{strategy.__name__} ", text, flags=re.MULTILINE)


def test_the_menu_ends_with_the_bundles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    *_, last = said(capsys, "strategies").split("configs/strategies")
    assert re.search(r"^ *deepnorm  +DeepNorm: a scaled skip .*arXiv:2203\.00555 *$", last, flags=re.MULTILINE)
    names = re.findall(r"^  (\w+)  ", last, flags=re.MULTILINE)
    assert names == sorted(path.stem for path in (ROOT / "configs" / "strategies").glob("*.yaml"))
    assert "DeepNorm: a scaled" not in said(capsys, "strategies", "residual")

    (tmp_path / "configs" / "strategies").mkdir(parents=True)
    (tmp_path / "configs" / "strategies" / "mine.yaml").write_text("# Mine [sic]: nobody 2026\nmodel:\n")
    monkeypatch.chdir(tmp_path)
    assert re.search(r"^ *mine  +Mine \[sic\]: nobody 2026 *$", said(capsys, "strategies"), flags=re.MULTILINE)


def test_an_axis_has_sentence_equation_and_paper(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    text = said(capsys, "strategies", "residual")
    assert "The skip is scaled up with depth, so that an update changes the model by a bounded amount." in text
    assert "x ⊕ f = alpha x + f" in text
    assert "Wang et al. 2022, arXiv:2203.00555" in text
    assert "PreNorm " not in text


def test_a_strategy_has_docstring_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "strategies", "residual", "ScaledSum")
    assert text.startswith("stabilize.strategies.residual.ScaledSum\n")
    assert "x ⊕ f = sum_scale (x + f)" in text
    assert "sum_scale: float | Literal['rsqrt2'] = 'rsqrt2'" in text


class Plain(Sum):
    """Its annotations are classes, as in a module without annotations from the future."""

    def __init__(self, gain=1.0, other=None) -> None:
        super().__init__()

    __init__.__annotations__["gain"] = float


def test_annotations_are_shown_as_they_were_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "strategies", "residual", "Plain").endswith("  gain: float = 1.0\n  other = None\n")


@pytest.mark.parametrize(
    ("words", "near"),
    [(["residul"], "residual"), (["residual", "ScaledSun"], "ScaledSum"), (["norm", "LayerNorm", "x"], "axis")],
)
def test_a_misspelt_axis_or_name(words: list[str], near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", *words]) == 2
    assert near in capsys.readouterr().err


def test_the_parser_shows_a_strategys_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "fit", "--model.stabilizer.placement.help=PostNorm")
    assert "x <- norm(x ⊕ f(x))" in text
    assert "arXiv:1706.03762" in text
    text = said(capsys, "fit", "--model.stabilizer.residual.help=ScaledSum")
    assert "--model.stabilizer.residual.sum_scale" in text
    assert "multiplies x + f" in text


def test_help_has_every_verb_and_says_where_settings_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--help")
    for verb, what in VERBS.items():
        assert re.search(rf"^  {verb} +{what}$", text, flags=re.MULTILINE)
    assert "Environment variables set none." in text
    assert said(capsys) == text


def test_the_help_of_a_verb_has_every_axis(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "fit", "--help")
    for axis, base in AXES.items():
        assert f"--model.stabilizer.{axis} " in text
        assert all(strategy.__name__ in text for strategy in menu(base))


def test_a_name_alone_is_found_on_its_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "HyperConnections"]) == 0
    alone = capsys.readouterr().out
    assert main(["strategies", "residual", "HyperConnections"]) == 0
    assert capsys.readouterr().out == alone
    assert main(["strategies", "deepnorm"]) == 2
    assert "configs/strategies/deepnorm.yaml" in capsys.readouterr().err
