"""A working folder with a config that is measured in no time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TINY = """
model:
  encoder_layers: 2
  decoder_layers: 1
  width: 8
  heads: 2
  hidden: 8
  dropout: 0.0
data:
  class_path: SyntheticCorpus
  init_args: {train_pairs: 40, validation_pairs: 2, test_pairs: 3, vocabulary: 60, batch_tokens: 48}
trainer: {accelerator: cpu}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path
