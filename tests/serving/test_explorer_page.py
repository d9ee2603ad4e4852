"""The page of `equilibria explore` with the models of the package."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest
import requests
from starlette.applications import Starlette

from tests.program import invoke
from tests.report.browser import PHONE, Browser, chromium, find_chromium
from tests.serving.running import running

MODERN_PHONE = (390, 844)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of the explorer, as `equilibria explore` serves it."""
    apps: list[Starlette] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("equilibria.serving.run_server", lambda app, *_, **__: apps.append(app))
        result = invoke("explore", "--port", 0)
    assert result.exit_code == 0, result.output
    with running(apps[0]) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with chromium(executable) as session:
        yield session


def test_first_model_is_confident_in_its_first_sample(address: str) -> None:
    first, *_ = requests.get(f"{address}/explorer/models", timeout=60).json()
    content = base64.b64decode(first["samples"][0].split(",")[1])
    answer = requests.post(f"{address}/predict", data=content, timeout=60).json()
    assert answer["label"] == "0"
    assert answer["confidence"] > 0.9


def test_class_bars_add_up_to_100_percent(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.until("document.querySelector('#shares .bar')")
    bars = "[...document.querySelectorAll('#shares .bar')]"
    texts = browser.value(f"{bars}.map(bar => bar.lastChild.textContent)")
    assert len(texts) == 10
    assert sum(round(10 * float(text.removesuffix(" %"))) for text in texts) == 1000
    widths = browser.value(f"{bars}.map(bar => parseFloat(bar.querySelector('i').style.width))")
    assert sum(widths) == pytest.approx(100, abs=0.01)


def test_the_least_likely_of_many_classes_share_a_bar(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.until("document.body.dataset.ready")
    browser.value("model = { ...model, classes: Array.from({ length: 100 }, (_, i) => `c${i}`) }")
    bars = browser.value("barsOf(model.classes.map((_, i) => (i + 0.5) / 5000))")
    assert [bar["label"] for bar in bars] == [*(f"c{i}" for i in range(91, 100)), "91 others"]
    assert sum(bar["value"] for bar in bars) == pytest.approx(1)
    assert browser.value("wholeNumbers([1 / 3, 1 / 3, 1 / 3], 1000)") == [334, 333, 333]


def test_the_hint_in_the_drawing_box_is_visible_while_it_is_empty(
    browser: Browser, address: str
) -> None:
    browser.open(address)
    browser.until("document.body.dataset.ready")
    visible = "document.getElementById('hint').checkVisibility()"
    assert browser.value("document.getElementById('hint').textContent") == "draw here"
    assert browser.value(visible)
    browser.value(
        "(() => { const box = pad.getBoundingClientRect(); pad.setPointerCapture = () => {};"
        "pad.dispatchEvent(new PointerEvent('pointerdown', "
        "{ clientX: box.left + 9, clientY: box.top + 9 })); })()"
    )
    assert not browser.value(visible)
    browser.value("document.getElementById('clear').click()")
    assert browser.value(visible)


@pytest.mark.parametrize("size", [MODERN_PHONE, PHONE], ids=["390x844", "360x740"])
def test_results_are_in_view_on_a_phone(
    browser: Browser, address: str, size: tuple[int, int]
) -> None:
    browser.open(address, size=size)
    browser.until("document.querySelector('#verdict strong')")
    assert last_line(browser, "#verdict strong") <= size[1]
    browser.value("document.getElementById('tab-fool').click()")
    browser.until("document.getElementById('held').textContent")
    assert last_line(browser, "#held") <= size[1]
    # Show the photograph itself instead of the results, which would take seconds.
    browser.value("photograph = () => Promise.resolve()")
    browser.value("document.getElementById('tab-photo').click()")
    for name in ("seen", "restored"):
        browser.value(f"document.getElementById('photo-{name}').src = 'explorer/photos/temple'")
    browser.until("document.getElementById('photo-restored').naturalWidth")
    assert last_line(browser, "#photo-after") <= size[1]
    assert browser.value("document.documentElement.scrollWidth") <= size[0]


def last_line(browser: Browser, selector: str) -> float:
    """Return the distance of the end of an element from the top of the page, in pixels."""
    box = f"document.querySelector('{selector}').getBoundingClientRect()"
    assert browser.value(f"{box}.height") > 0
    return float(browser.value(f"{box}.bottom"))
