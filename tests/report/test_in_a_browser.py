"""The page in a real browser: it asks for nothing, complains of nothing, and fits a phone."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from stabilize.report import page, read
from tests.browser import CONTRAST, DESK, PHONE, Browser, needed
from tests.report.folders import POST_NORM, config, learnt, write_run

pytestmark = needed

LONG = "Donaudampfschifffahrtsgesellschaftskapitänsmützenabzeichenverleihungsurkundenpapier" * 2


@pytest.fixture(scope="module", params=[1, 2, 9])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of one, two and nine runs, with long words, pictures, lost numbers and warnings."""
    folder = tmp_path_factory.mktemp("runs")
    runs = []
    for number in range(request.param):
        settings = config(POST_NORM if number % 2 else None, seed=number)
        settings["comment"] = LONG * 3
        rows = [*learnt(1e-6 if number % 2 else 0.5), {"step": 99, "train/nll": float("nan"), "a/" + LONG: 1.0}]
        run = write_run(
            folder / f"2026-11-29_23-21-07_ac1{number}", settings, rows, [(LONG, LONG, LONG), ("a", "b", "")]
        )
        (run / "figures").mkdir()
        Figure(figsize=(7, 4)).savefig(run / "figures" / "similarity_matrix_centered_encoder.png")
        runs.append(read(run))
    path = folder / "report.html"
    path.write_text(page(runs), encoding="utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_it_fits_and_asks_for_nothing(browser: Browser, report: Path, width: int, dark: bool, tmp_path: Path) -> None:
    browser.open(report, width, dark)
    assert browser.value("document.documentElement.scrollWidth") == width
    browser.value("document.querySelectorAll('details').forEach(element => element.open = true)")
    assert browser.value("document.documentElement.scrollWidth") == width
    broken = "[...document.images].filter(image => !image.alt || !image.complete || !image.naturalWidth).length"
    assert browser.value(broken) == 0
    assert browser.value("document.images.length") > 0
    assert browser.value("document.querySelectorAll('svg:not([aria-label])').length") == 0
    ratio, element = browser.value(CONTRAST)
    assert ratio >= 4.5, element
    assert browser.screenshot(tmp_path / "page.png").stat().st_size > 10_000
    assert browser.requests() == [report.resolve().as_uri()]
    assert browser.complaints() == []


def test_the_browser_notices_what_the_page_must_not_do(browser: Browser, tmp_path: Path) -> None:
    """The check checks: a page that asks, complains and is too wide is found out."""
    page = tmp_path / "bad.html"
    page.write_text("<img src='other.png'><div style='width:900px'>x</div><script>console.error('no')</script>")
    browser.open(page, PHONE)
    assert len(browser.requests()) == 2
    assert browser.complaints()
    assert browser.value("document.documentElement.scrollWidth") > PHONE
    assert base64.b64decode(browser.call("Page.captureScreenshot")["data"]).startswith(b"\x89PNG")
