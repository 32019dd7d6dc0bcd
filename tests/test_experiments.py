"""The figures of the README: `pytest -m experiment`. Trainings of minutes each, and one of half an hour."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.tasks import rows

pytestmark = pytest.mark.experiment


def needs(name: str) -> pytest.MarkDecorator:
    """A mark for tests of configs that read a text from its usual place."""
    missing = not (ROOT.parent / "shared" / "data" / name).is_dir()
    return pytest.mark.skipif(missing, reason=f"there is no ../shared/data/{name}")


def fitted(folder: Path, *words: str) -> dict[str, float]:
    """The last value of every metric of a run on one thread."""
    command = [sys.executable, "-m", "stabilize", "fit", *words, f"--trainer.default_root_dir={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (run,) = folder.iterdir()
    return {key: value for row in rows(run) for key, value in row.items()}


@needs("multi30k")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_depth_kills_post_norm_and_not_b2t(seed: int, tmp_path: Path) -> None:
    words = ("--config=configs/experiments/depth_contrast.yaml", f"--seed_everything={seed}")
    post = fitted(tmp_path / "post", *words, "--model.stabilizer.placement=PostNorm")
    assert post["val/nll"] >= 5.2
    assert post["gradient_ratio/decoder/first_to_last"] <= 1e-4
    b2t = fitted(tmp_path / "b2t", *words)
    assert b2t["val/nll"] <= 4.7
    assert b2t["gradient_ratio/decoder/first_to_last"] >= 0.1


@needs("multi30k")
def test_a_useful_model(tmp_path: Path) -> None:
    assert fitted(tmp_path, "--config=configs/experiments/multi30k.yaml")["test/bleu"] >= 37.5


@needs("wmt")
def test_wmt_text_comes_to_the_same_scores_again(tmp_path: Path) -> None:
    """Near zero after so little text, and to the last digit the same."""
    one, two = (fitted(tmp_path / name, "--config=configs/experiments/wmt_subset.yaml") for name in ("one", "two"))
    scores = {key: value for key, value in one.items() if key.startswith("test/")}
    print(scores)
    assert scores == {key: value for key, value in two.items() if key.startswith("test/")}
    assert 0 < scores["test/bleu"] < 5
    first, second = (next((tmp_path / name).glob("*/translations/test.txt")) for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("bundle", ["deepnorm", "pre_ln", "b2t"])
def test_what_learns_the_embedded_corpus(bundle: str, tmp_path: Path) -> None:
    assert embedded(bundle, tmp_path)["test/bleu"] > 75


@pytest.mark.parametrize("bundle", ["post_ln", "residual_rsqrt2", "no_residual"])
def test_what_does_not_learn_the_embedded_corpus(bundle: str, tmp_path: Path) -> None:
    scores = embedded(bundle, tmp_path)
    assert scores["test/bleu"] < 5
    assert scores["gradient_ratio/decoder/first_to_last"] < 1e-6


def embedded(bundle: str, folder: Path) -> dict[str, float]:
    configs = "--config=configs/quickstart.yaml", f"--config=configs/strategies/{bundle}.yaml"
    return fitted(folder, *configs, "--trainer.max_steps=1000", "--model.stabilizer.warmup.init_args.total=1000")
