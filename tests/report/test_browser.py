"""Pages in a browser: no console messages, no network requests, all pictures drawn."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from equilibria.report import report_page
from tests.program import invoke
from tests.report.browser import PHONE, WIDE, Browser, chromium, find_chromium
from tests.report.pages import report

LOOKS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"dark": True},
    "phone": {"size": PHONE},
    "without scripts": {"scripts": False},
}
RUNS = ("opteq", "geq", "mopteq")
PICTURES = "[...document.images]"
CHARTS = "[...document.querySelectorAll('svg')]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("NO BROWSER: apt-get install chromium to test pages in a browser")
    with chromium(executable) as opened:
        yield opened


def check(browser: Browser, page: Path, **look: Any) -> None:
    """Check a page: complete, no messages, fits the screen, all pictures drawn and described."""
    browser.open(page, **look)
    assert browser.complaints() == []
    assert browser.requests() == []
    # The expressions below need scripts even if those of the page are disabled.
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.value(f"{PICTURES}.filter(i => !(i.complete && i.naturalWidth > 0)).length") == 0
    assert browser.value(f"{PICTURES}.filter(i => i.alt.length < 10).length") == 0
    assert browser.value(f"{PICTURES}.length") > 5
    sizes = f"{CHARTS}.map(c => c.getBoundingClientRect())"
    assert browser.value(f"{sizes}.filter(b => b.width < 200 || b.height < 150).length") == 0
    curves = "c => [...c.querySelectorAll('path')].some(p => p.getTotalLength() > 10)"
    assert browser.value(f"{CHARTS}.filter(c => !({curves})(c)).length") == 0
    assert browser.value(f"{CHARTS}.length") >= 2
    width = look.get("size", WIDE)[0]
    assert browser.value("document.documentElement.scrollWidth") <= width
    screenshot = Image.open(io.BytesIO(browser.screenshot())).convert("L")
    low, high = screenshot.getextrema()
    assert high - low > 150, "the page is empty"
    background = screenshot.getpixel((2, 2))
    assert background < 60 if look.get("dark") else background > 200


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of an untrained model."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(report_page([report(width=8)], "footer"), encoding="utf-8")
    return file


@pytest.mark.parametrize("look", LOOKS)
def test_page_is_shown_in_all_looks(browser: Browser, page: Path, look: str) -> None:
    check(browser, page, **LOOKS[look])


def test_charts_take_the_colors_of_the_page(browser: Browser, page: Path) -> None:
    colors = []
    for dark in (False, True):
        browser.open(page, dark=dark)
        colors.append(browser.value("getComputedStyle(document.querySelector('svg text')).fill"))
    assert colors[0] != colors[1]


def test_contributions_open_without_scripts(browser: Browser, page: Path) -> None:
    browser.open(page)
    visible = "document.querySelector('.terms').checkVisibility()"
    assert browser.value(visible) is False
    browser.value("document.querySelector('details').open = true")
    assert browser.value(visible) is True
    assert browser.value("document.querySelector('.bar i').getBoundingClientRect().height") > 1


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Reports and explanations of trained runs, and one report of all of them."""
    folder = tmp_path_factory.mktemp("runs")
    for name in RUNS:
        trained = invoke(
            *("train", f"digits-{name}", "training.epochs=2", "--report"),
            *("--output", folder / name),
        )
        assert trained.exit_code == 0, trained.output
        explained = invoke("explain", folder / name, "--samples", 6)
        assert explained.exit_code == 0, explained.output
    comparison = folder / "all.html"
    runs = [folder / name for name in RUNS]
    result = invoke("report", *runs, "--quick", "--output", comparison)
    assert result.exit_code == 0, result.output
    written = [folder / n / f"{p}.html" for n in RUNS for p in ("report", "explanation")]
    return [*written, comparison]


@pytest.mark.slow
def test_pages_of_trained_runs_are_shown(browser: Browser, pages: list[Path]) -> None:
    for file in pages:
        for look in ("light", "dark", "phone"):
            check(browser, file, **LOOKS[look])
