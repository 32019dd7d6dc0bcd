"""The page of a study in a real browser: it asks for nothing, complains of nothing, and fits a phone."""

from __future__ import annotations

from pathlib import Path

import pytest

from stabilize.study.answer import RULES
from stabilize.study.claims import RULE, judge
from stabilize.study.page import page
from stabilize.study.results import Results
from tests.browser import CONTRAST, DESK, PHONE, Browser, needed
from tests.study.rows import row
from tests.study.test_page import KEYS

pytestmark = needed

STRATEGIES = ("post_ln", "post_ln+warmup", "pre_ln", "b2t", "deepnorm", "admin_closed_form", "hybrid_norm_star")


def study() -> Results:
    """As many strategies, depths and rates as a shipped study has, with numbers of many sizes."""
    rows = []
    for place, strategy in enumerate(STRATEGIES):
        for depth in (3, 6, 12, 18):
            for rate in (5e-4, 1e-3, 2e-3, 4e-3):
                for seed in (1, 2, 3):
                    fate = ("stuck", "diverged", "crashed")[seed - 1] if "post" in strategy and depth > 6 else "trained"
                    values = {"strategy": strategy, "depth": depth, "learning_rate": rate, "seed": seed}
                    numbers = {
                        "val_nll": 2 + depth / 10 + seed / 30 + place / 5,
                        "test_bleu": 90 - 3 * depth - place,
                        **{
                            f"{stack}_gradient_ratio": 10.0 ** (-place * depth / 12) for stack in ("encoder", "decoder")
                        },
                        **{f"{stack}_similarity_centered": 0.5 + place / 20 for stack in ("encoder", "decoder")},
                        **{f"{stack}_effective_depth": depth - place for stack in ("encoder", "decoder")},
                    }
                    rows.append(row(len(rows), fate, **values, **numbers))
    tests = [
        {
            "depth": str(depth),
            "strategy": strategy,
            "learning_rate": "0.001",
            "bleu": "28.123456",
            "bootstrap_half_width": "1.23456",
            "p_bootstrap": "0.000999" if place else "",
            "p_randomization": "0.0001" if place else "",
            "signature": "nrefs:1|bs:1000|seed:12345|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0",
        }
        for depth in (3, 6)
        for place, strategy in enumerate(STRATEGIES)
    ]
    return Results("Which stabiliser trains?", KEYS, rows, RULES["strategies"](rows, KEYS), (), tests)


@pytest.fixture(scope="module", params=["study", "claims"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = study() if request.param == "study" else Results("Which hold?", KEYS, [], [RULE], judge([]))
    path = tmp_path_factory.mktemp("page") / f"{request.param}.html"
    path.write_text(page(results), encoding="utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_it_fits_and_asks_for_nothing(browser: Browser, written: Path, width: int, dark: bool, tmp_path: Path) -> None:
    browser.open(written, width, dark)
    assert browser.value("document.documentElement.scrollWidth") == width
    assert browser.value("document.querySelectorAll('svg:not([aria-label])').length") == 0
    ratio, element = browser.value(CONTRAST)
    assert ratio >= 4.5, element
    # No word of a picture reaches out of it.
    outside = """[...document.querySelectorAll('svg text')].filter(text => {
      const [own, all] = [text.getBoundingClientRect(), text.closest('svg').getBoundingClientRect()];
      return own.left < all.left - 1 || own.right > all.right + 1;
    }).map(text => text.textContent)"""
    assert browser.value(outside) == []
    assert browser.screenshot(tmp_path / "page.png").stat().st_size > 10_000
    assert browser.requests() == [written.resolve().as_uri()]
    assert browser.complaints() == []
