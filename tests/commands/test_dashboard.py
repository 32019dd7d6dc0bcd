"""`stabilize dashboard`; that it shows what a run logs is in tests/test_run.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import wandb
import wandb_workspaces.workspaces as workspaces

from stabilize.cli import main


def test_a_workspace_is_saved_in_the_project_that_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved: list[Any] = []

    def save(workspace: Any) -> Any:
        saved.append(workspace)
        return type("Saved", (), {"url": "https://wandb.example/team/deep"})()

    monkeypatch.setattr(workspaces.Workspace, "save", save)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    assert main(["dashboard", "--entity", "team", "--project", "deep", "--name", "Depth"]) == 0
    assert "https://wandb.example/team/deep" in capsys.readouterr().out
    (workspace,) = saved
    assert (workspace.entity, workspace.project, workspace.name) == ("team", "deep", "Depth")
    assert workspace.sections[0].name == "Translation"


def test_nobody_is_asked_to_log_in(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    assert main(["dashboard"]) == 2
    assert "wandb login, or --spec FILE" in capsys.readouterr().err


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert main(["dashboard", "--spec", "spec.json"]) == 2
    assert "stabilize-nmt[dashboard]" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--spec", str(tmp_path / "absent" / "spec.json")]) == 2
    assert "absent/spec.json cannot be written" in capsys.readouterr().err


def test_an_unknown_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--projct", "x"]) == 2
    assert "dashboard: unrecognized arguments: --projct" in capsys.readouterr().err
