"""The page made of run folders, whole and broken: what it says, that it is escaped, and that it needs nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from stabilize.errors import UserError
from stabilize.report import page, read
from stabilize.report.markup import VOID, join, tag
from stabilize.report.page import labels
from stabilize.report.svg import POINTS, Scale, around_one, from_lowest, thinned
from stabilize.strategies import FixedEpsilon, Stabilizer
from tests.report.folders import POST_NORM, config, learnt, record, write_run

HOSTILE = "<script>alert('1')</script> & \"quoted\" </style></svg>"


class Reader(HTMLParser):
    """Checks that every element is closed in its place, and keeps what it met."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.met: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.met.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def looked_at(folders: Sequence[Path]) -> Reader:
    """The page of some run folders, read: well-formed, without scripts, asking for nothing."""
    written = page([read(folder) for folder in folders])
    assert "NaN" not in re.sub(r"<title>.*?</title>|aria-label=\"[^\"]*\"", "", written)
    reader = Reader()
    reader.feed(written)
    reader.close()
    assert reader.open == []
    for name, attributes in reader.met:
        assert name not in ("script", "iframe", "object", "base", "form")
        assert not any(key.startswith("on") for key in attributes)
        for key in ("src", "href"):
            assert (attributes.get(key) or "data:").startswith("data:")
    assert "url(" not in written
    assert "@import" not in written
    return reader


def text(folders: Sequence[Path]) -> str:
    return " ".join(" ".join(looked_at(folders).text).split())


def test_a_run_that_learnt(tmp_path: Path) -> None:
    samples = [("A dog runs.", "Ein Hund rennt.", "Ein Hund läuft.")]
    said = text([write_run(tmp_path / "run", config(), [*learnt(), {"step": 200, "test/bleu": 10.0}], samples)])
    for part in ("PreNorm", "healthy", "200 updates", "3.9", "10.0 test nrefs:1|tok:13a", "3+3 layers, width 16"):
        assert part in said
    for part in ("Ein Hund läuft.", "Xiong et al. 2020", "Nothing of note", "Of the test."):
        assert part in said


def test_runs_side_by_side(tmp_path: Path) -> None:
    """One colour a run, its name, its verdict; the same axes."""
    good = write_run(tmp_path / "good", config(), learnt())
    bad = write_run(tmp_path / "bad", config(POST_NORM), learnt(ratio=1e-6))
    reader = looked_at([good, bad])
    said = " ".join(reader.text)
    assert "2 runs side by side" in said
    assert "vanishing (decoder, encoder)" in said
    assert "1e-6 of the gradient of layer 3: vanishing" in said
    pictures = [attributes for name, attributes in reader.met if name == "svg"]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    (curve,) = (a["aria-label"] or "" for a in pictures if (a["aria-label"] or "").startswith("nll a token"))
    assert "PreNorm: 7.8 at update 10 to 4 at 200" in curve
    assert "PostNorm: 7.8 at" in curve
    colours = {a["class"] for name, a in reader.met if name == "path"}
    assert colours == {"c0 line", "c1 line"}
    assert any((a["aria-label"] or "").startswith("PostNorm, decoder: gradient of each layer") for a in pictures)
    assert "cannot be compared" not in said


def test_runs_are_called_by_what_they_differ_in(tmp_path: Path) -> None:
    def names(*settings: dict) -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return labels([read(write_run(folder / str(k), one, learnt())) for k, one in enumerate(settings)])

    assert names(config()) == ["PreNorm"]
    assert names(config(), config(POST_NORM)) == ["PreNorm", "PostNorm"]
    assert names(config(seed=1), config(seed=2)) == ["seed 1", "seed 2"]
    assert names(config(), config()) == ["PreNorm (0)", "PreNorm (1)"]
    wide = Stabilizer(epsilon=FixedEpsilon(1e-3))
    assert names(config(), config(wide)) == ["epsilon value: 1e-05", "epsilon value: 0.001"]
    split = config()
    split["model"]["decoder_stabilizer"] = POST_NORM.spec()
    assert names(split, config(POST_NORM))[0].startswith("PreNorm, decoder PostNorm")


def test_other_text_is_no_comparison(tmp_path: Path) -> None:
    other = config()
    other["data"]["init_args"]["vocabulary"] = 50
    folders = [write_run(tmp_path / "a", config(), learnt()), write_run(tmp_path / "b", other, learnt())]
    assert "cannot be compared" in text(folders)


def test_everything_is_escaped(tmp_path: Path) -> None:
    settings = config() | {"comment": HOSTILE}
    settings["model"]["stabilizer"]["placement"]["class_path"] = f"no.such.{HOSTILE}"
    rows = [*learnt(), {"step": 99, f"{HOSTILE}/mean": 1.0}]
    folder = write_run(tmp_path / "<b>run", settings, rows, [(HOSTILE,) * 3])
    (folder / "figures").mkdir()
    (folder / "figures" / "a'><b>_c.png").write_bytes(b"\x89PNG")
    written = page([read(folder)])
    assert "<script" not in written
    assert "<b>run" not in written
    looked_at([folder])


# ---------------------------------------------------------------------- what is not there


def test_a_plugin_that_is_gone_costs_only_the_card(tmp_path: Path) -> None:
    settings = config()
    settings["model"]["stabilizer"]["residual"] = {"class_path": "gone_plugin.Halved", "init_args": {"share": 0.5}}
    said = text([write_run(tmp_path / "run", settings, learnt())])
    assert "The card cannot be made again here (ModuleNotFoundError: No module named 'gone_plugin')" in said
    assert "PreNorm, Halved" in said
    assert "healthy" in said


@pytest.mark.parametrize("content", ["", "\n", "epoch,step,train/loss\n", "epoch,step\n0,1\n", "\0\0\0"])
def test_no_numbers_is_said(content: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", config())
    (folder / "metrics.csv").write_text(content)
    said = text([folder])
    assert "metrics.csv holds no numbers" in said
    assert "no numbers" in said
    assert "No numbers were logged." in said


def test_a_folder_with_a_config_alone(tmp_path: Path) -> None:
    said = text([write_run(tmp_path / "run", config())])
    assert "No metrics.csv" in said
    assert "Nothing was recorded by layer." in said
    assert "There are none." in said


@pytest.mark.parametrize("content", ["", "a: [", "- 1", "model: 3\ntrainer: x\n", "model: {stabilizer: 3}", "{}"])
def test_a_config_that_says_nothing(content: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows=learnt())
    (folder / "config.yaml").write_text(content)
    said = text([folder])
    assert "healthy" in said
    assert "No config.yaml that can be read" in said or "card cannot be made again" in said


def test_a_run_without_diagnostics(tmp_path: Path) -> None:
    rows = [{"step": k, "train/nll": 5.0, "train/loss": 5.0} for k in range(9, 100, 10)]
    said = text([write_run(tmp_path / "run", config(max_steps=105), rows)])
    assert "No gradient ratios" in said
    assert "not measured" in said
    assert "no fault seen 100 updates" in said
    assert "The numbers end" not in said


def test_a_run_that_was_cut_short(tmp_path: Path) -> None:
    said = text([write_run(tmp_path / "run", config(), learnt()[:9])])
    assert "90 of 200 updates" in said
    assert "The numbers end at update 90" in said


def test_one_update_only(tmp_path: Path) -> None:
    said = text([write_run(tmp_path / "run", config(max_steps=1), [record(1)])])
    assert "1 updates" not in said
    assert "1 update" in said


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, 0.0, -1.0, 1e-320])
def test_numbers_that_cannot_be_drawn(value: float, tmp_path: Path) -> None:
    rows = [*learnt(), record(210, loss=value, ratio=value, similarity=value)]
    rows.append({"step": 209, "gradient_norm/total": value, "val/nll": value, "val/bleu": value, "other/thing": value})
    reader = looked_at([write_run(tmp_path / "run", config(), rows)])
    if not abs(value) < 1e30:
        assert "✕" in reader.text


def test_only_numbers_that_cannot_be_drawn(tmp_path: Path) -> None:
    rows = [record(update, math.nan, math.nan, math.nan) for update in (10, 20)]
    assert "diverged at update 10" in text([write_run(tmp_path / "run", config(), rows)])


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", config(), learnt())
    whole = (folder / "metrics.csv").read_text()
    for cut in (1, 5, 40):
        (folder / "metrics.csv").write_text(whole[:-cut])
        assert "healthy" in text([folder])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"samples": 3}', '{"samples": [1, {}]}', '{"signatures": 3}'])
def test_a_torn_score_file(content: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", config(), learnt(), [("a", "b", "c")])
    (folder / "translations" / "test.json").write_text(content)
    (folder / "summary.json").write_text(content)
    assert "healthy" in text([folder])


def test_translations_without_source(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", config(), learnt())
    (folder / "translations").mkdir()
    (folder / "translations" / "test.txt").write_text("Ein Hund.\n\nEine Katze.\n", encoding="utf-8")
    said = text([folder])
    assert "the folder has no source text" in said
    assert "Eine Katze." in said


@pytest.mark.parametrize("what", ["missing", "empty", "above"])
def test_what_is_no_run_folder_is_refused_by_name(what: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "above" / "inner", config())
    with pytest.raises(UserError, match=f"{what} ") as error:
        read(tmp_path / what)
    assert ("inner" in str(error.value)) == (what == "above")


# ---------------------------------------------------------------------- parts


def test_markup_escapes_what_is_not_markup() -> None:
    assert tag("p", "<", tag("b", "&"), class_="x", data_name='"', hidden=True, open=False) == (
        '<p class="x" data-name="&quot;" hidden>&lt;<b>&amp;</b></p>'
    )
    assert tag("rect", x=1.04, y=2.0) == '<rect x="1" y="2"></rect>'
    assert join("<", tag("br")) == "&lt;<br>"


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 100, 0, 1), [0, 25, 50, 75, 100]),
        (Scale(0.0, 0.00105, 0, 1), [0, 0.0005, 0.001]),
        (Scale(1e-8, 1.0, 0, 1, True), [1e-8, 1e-6, 1e-4, 1e-2, 1.0]),
        (Scale(0.4, 3.0, 0, 1, True), [0.5, 1.0, 2.0]),
    ],
)
def test_ticks_are_round(scale: Scale, ticks: list[float]) -> None:
    assert scale.ticks == pytest.approx(ticks)


def test_thinning_keeps_every_peak() -> None:
    points = [(k, 1000.0 if k == 54_321 else -7.0 if k == 999 else math.sin(k)) for k in range(100_000)]
    kept = thinned(points)
    assert len(kept) <= POINTS
    assert {(54_321, 1000.0), (999, -7.0), points[-1]} <= set(kept)
    assert kept == sorted(kept)


def test_one_is_in_the_middle_of_a_ratios_colours() -> None:
    colours = around_one([1e-6, 3.0, math.nan, 0.0])
    assert (colours.low, colours.high) == pytest.approx((1e-6, 1e6))
    assert [colours.level(value) for value in (0.0, 1e-9, 1.0, 1e9)] == ["d0", "d0", "d10", "d20"]
    assert from_lowest([math.nan]).level(0.0) == "s0"
    assert from_lowest([0.5, 0.5], high=1.0).level(1.0) == "s20"
    assert from_lowest([1e-4, 1.0]).level(1e-2) == "s10"


def test_the_page_stays_small(tmp_path: Path) -> None:
    """A long run of a deep model: every record of 25 layers, 10,000 of them, is thinned."""
    rows = [
        {"step": k, "train/nll": 5.0} | {f"gradient_ratio/encoder/layer_{n:03d}": 1.0 for n in range(1, 26)}
        for k in range(3000)
    ]
    assert len(page([read(write_run(tmp_path / "run", config(), rows))])) < 400_000


def test_settings_with_dates_and_lists_are_no_trouble(tmp_path: Path) -> None:
    settings = yaml.safe_load("{seed_everything: 2026-01-01, trainer: {max_steps: [1]}, model: [], data: 3}")
    assert "unknown" in text([write_run(tmp_path / "run", settings, learnt())])
