"""Every file under configs/ is a configuration that the command accepts."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import yaml

from stabilize import cli
from tests.checkout import ROOT

CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
COMPLETE = {QUICKSTART, *(CONFIGS / "experiments").glob("*.yaml")}  # all others are laid over the quickstart


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("**/*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS)))
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
