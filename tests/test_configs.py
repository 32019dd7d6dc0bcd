"""Every file under configs/ is a configuration that the command accepts."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import yaml

from stabilize import cli
from stabilize.commands.compare import study_of
from stabilize.commands.probe import paths_of
from stabilize.study import cells
from tests.checkout import ROOT

CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
COMPLETE = {QUICKSTART, *(CONFIGS / "experiments").glob("*.yaml")}  # all others are laid over the quickstart


STUDIES = sorted((CONFIGS / "studies").glob("*.yaml"))  # of `compare`, the others of `fit`
OTHERS = sorted({*CONFIGS.glob("**/*.yaml")} - {*STUDIES})


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_compare_accepts_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That `fit` knows each key of each run is seen in tests/commands/test_compare.py, which takes a minute."""
    monkeypatch.chdir(ROOT)
    study = study_of(path)
    assert all(Path(config).is_file() for config in study.configs)
    assert len(cells(study, paths_of(study.strategies))) >= len(study.strategies) * len(study.seeds)


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
