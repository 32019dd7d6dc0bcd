"""A study as a page, in Markdown and as pictures: what they say, and that they need nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from stabilize.study import figures
from stabilize.study.answer import RULES
from stabilize.study.claims import RULE, judge
from stabilize.study.maps import column_key, frontiers, maps
from stabilize.study.page import page
from stabilize.study.results import Results, markdown
from stabilize.study.significance import compared
from tests.report.test_report import Reader
from tests.study.rows import row

KEYS = ["strategy", "depth", "learning_rate"]
HOSTILE = "<script>alert('1')</script>"


def some_rows() -> list[dict[str, str]]:
    """Two strategies, two depths, two rates, two seeds; post-norm is lost at twelve layers, and at the larger rate."""
    rows = []
    for depth in (3, 12):
        for rate in (0.001, 0.002):
            for seed in (1, 2):
                common = {"depth": depth, "learning_rate": rate, "seed": seed}
                numbers = {
                    "test_bleu": 50 - depth,
                    "decoder_gradient_ratio": 1e-6,
                    "encoder_effective_depth": depth / 2,
                }
                fate = "stuck" if depth == 12 else "diverged" if rate > 0.001 else "trained"
                nll = 3 + 100 * rate + seed / 100
                rows.append(row(len(rows), fate, strategy="post_ln", val_nll=nll + depth, **common, **numbers))
                rows.append(row(len(rows), strategy="pre_ln", val_nll=nll, **common, **numbers))
    return rows


def read(written: str) -> Reader:
    assert "<script" not in written
    assert "url(" not in written
    reader = Reader()
    reader.feed(written)
    reader.close()
    assert reader.open == []
    return reader


def test_what_the_page_says() -> None:
    rows = some_rows()
    results = Results("Who wins?", KEYS, rows, RULES["strategies"](rows, KEYS))
    said = " ".join(" ".join(read(page(results)).text).split())
    for part in (
        *("Who wins?", "16 runs", "pre_ln trains with every seed", "none of 2 (0% to 66%)", "2 stuck of 2"),
        *("stuck: training nll fell by less than 1% from", "failures (95 %)", "Stability frontier"),
        *("post_ln: largest stable learning rate: 3 layers 0.001, 12 layers none", "3.12 ± 0.0635", "A star"),
    ):
        assert part in said, part
    pictures = [attributes for name, attributes in read(page(results)).met if name == "svg"]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    (map_,) = [a["aria-label"] or "" for a in pictures if (a["aria-label"] or "").startswith("validation nll")]
    assert "pre_ln, depth 12: 3.12" in map_
    assert "post_ln, depth 12: 15.1*" in map_


def test_what_markdown_says() -> None:
    rows = some_rows()
    lines = markdown(Results("Who wins?", KEYS, rows, ["One | two."])).splitlines()
    assert lines[:2] == ["# Who wins?", "- One | two."]
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert table[0].startswith("| strategy | depth | lr | val nll | BLEU | ratio dec | depth used enc | failures")
    assert table[2].startswith("| pre_ln | 3 | 0.001 | 3.12 ± 0.0635 | 47 ± 0 | 1e-6 | 1.5 | none of 2")


def test_everything_is_escaped() -> None:
    rows = [one | {"strategy": HOSTILE} for one in some_rows()]
    read(page(Results(HOSTILE, KEYS, rows, [HOSTILE])))


def test_claims_have_a_table_of_their_own() -> None:
    said = " ".join(read(page(Results("Which hold?", KEYS, [], [RULE], judge([])))).text)
    assert "a1: without residuals the gradient falls to 5 %" in said
    assert said.count("not measured") == len(judge([]))
    assert "Maps" not in said


def test_what_goes_across() -> None:
    rows = [row(depth=depth, k=k) for depth in (3, 6) for k in (1, 2)]
    assert column_key(rows, ["strategy", "depth", "k"]) == "depth"
    assert column_key(rows[:2], ["strategy", "depth", "k"]) == "k"
    assert column_key(rows[:1], ["strategy", "depth", "k"]) == "strategy"


def test_the_same_results_draw_the_same_files(tmp_path: Path) -> None:
    rows = some_rows()
    drawn = [*maps(rows, KEYS), *frontiers(rows, KEYS)]
    assert [one.name for one in drawn] == [
        *("val_nll", "test_bleu", "decoder_gradient_ratio", "encoder_effective_depth"),
        *("frontier_post_ln", "frontier_pre_ln"),
    ]
    for folder in ("one", "two"):
        figures.write(tmp_path / folder, drawn)
    for one in drawn:
        first, second = ((tmp_path / folder / f"{one.name}.png").read_bytes() for folder in ("one", "two"))
        assert first == second
        assert first.startswith(b"\x89PNG")


def test_translations_are_compared_with_the_best(tmp_path: Path) -> None:
    """A system that errs in half of the lines differs from one without errors; an equal one does not. The tests
    themselves are seen beside sacreBLEU's command in tests/commands/test_score.py."""
    text = [f"the cat number {k} sees a dog in the house" for k in range(40)]
    worse = [line if k % 2 else "we eat bread" for k, line in enumerate(text)]
    rows, folders = [], {}
    for strategy, lines, bleu in (("bad", worse, 40), ("best", text, 100), ("same", text, 99), ("lost", text, 0)):
        for seed in (1, 2):
            fate = "stuck" if strategy == "lost" else "trained"
            rows.append(row(len(rows), fate, seed, strategy=strategy, test_bleu=bleu, val_nll=1))
            place = folders[rows[-1]["run"]] = tmp_path / str(len(rows))
            (place / "translations").mkdir(parents=True)
            (place / "translations" / "test.txt").write_text("".join(f"{line}\n" for line in lines))
            (place / "translations" / "test.reference.txt").write_text("".join(f"{line}\n" for line in text))
    best, same, bad = compared(rows, ["strategy"], folders)
    assert (best["strategy"], best["bleu"], best["p_bootstrap"]) == ("best", "100.00000000000004", "")
    assert (same["strategy"], same["p_bootstrap"], same["p_randomization"]) == ("same", "1.0", "1.0")
    assert bad["strategy"] == "bad"
    assert float(bad["p_bootstrap"]) < 0.01
    assert float(bad["p_randomization"]) < 0.01
    assert re.search(r"seed:12345\|.*tok:13a", bad["signature"])
    (folders[rows[0]["run"]] / "translations" / "test.txt").unlink()
    assert [one["strategy"] for one in compared(rows, ["strategy"], folders)] == ["best", "same"]
