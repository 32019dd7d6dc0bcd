"""Entry points of a fake distribution: a folder on sys.path with the metadata that an installer would write."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stabilize import plugins


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution with one strategy that works, one that raises and one whose module is missing."""
    metadata = tmp_path / "halved-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: halved\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[stabilize.strategies]\n"
        "Halved = halved_plugin:Halved\n"
        "Raising = raising_plugin:Raising\n"
        "Missing = missing_plugin:Missing\n"
        "[stabilize.callbacks]\n"
        "Watch = halved_plugin:Watch\n"
    )
    (tmp_path / "halved_plugin.py").write_text("class Halved: ...\n")
    (tmp_path / "raising_plugin.py").write_text("raise ValueError('needs a newer torch')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "broken", {})
    yield tmp_path
    for name in ("halved_plugin", "raising_plugin"):
        sys.modules.pop(name, None)


def test_a_plugin_is_imported(distribution: Path) -> None:
    plugins.load("stabilize.strategies")
    assert Path(sys.modules["halved_plugin"].__file__).parent == distribution
    assert plugins.cause_of_absence("Halved") is None


def test_a_broken_plugin_is_remembered_with_its_cause(distribution: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugins.load("stabilize.strategies")
    assert set(plugins.broken) == {"Raising", "Missing"}
    assert isinstance(plugins.cause_of_absence("Missing"), ModuleNotFoundError)
    for asked in ("Raising", "raising_plugin.Raising"):
        assert str(plugins.cause_of_absence(asked)) == "needs a newer torch"
    said = capsys.readouterr()
    assert said.out == ""
    warning, other = sorted(said.err.splitlines(), reverse=True)
    assert warning == ("warning: plug-in Raising (raising_plugin:Raising) is left out: ValueError: needs a newer torch")
    assert "missing_plugin" in other


def test_groups_are_loaded_apart(distribution: Path) -> None:
    plugins.load("stabilize.callbacks")
    assert set(plugins.broken) == {"Watch"}  # the module is there, the class is not
    assert isinstance(plugins.broken["Watch"], AttributeError)


def test_an_unknown_name_belongs_to_no_broken_plugin(distribution: Path) -> None:
    plugins.load("stabilize.strategies")
    assert plugins.cause_of_absence("PreNrom") is None
