"""Take the screenshots of docs/explorer.md: `python docs/site/explorer.py` in the repository."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import equilibria as eq  # noqa: E402
from equilibria.serving.explorer import explorer_app  # noqa: E402
from equilibria.serving.exploring import Explored  # noqa: E402
from tests.report.browser import PHONE, Browser, chromium, find_chromium  # noqa: E402
from tests.serving.running import running  # noqa: E402

SIZE = (1200, 920)
COLORS = 256
"""Number of colors of a picture, which limits its size in bytes."""
MARGIN = 20
BOTTOM = """Math.max(...Array.from(document.querySelectorAll("main > section:not([hidden])"))
    .map(section => section.getBoundingClientRect().bottom + window.scrollY))"""
MODELS = ("digits-opteq", "digits-certified")
DIGIT = 5


def choose_digit(browser: Browser) -> None:
    browser.value(f"document.querySelectorAll('#samples button')[{DIGIT}].click()")
    browser.until("document.querySelector('#panel-solve.waiting')")
    browser.until("!document.querySelector('#panel-solve.waiting')")


def solve(browser: Browser) -> None:
    browser.until("document.querySelector('#verdict strong')")
    choose_digit(browser)
    browser.value(
        "(s => { s.value = 2; s.dispatchEvent(new Event('input')); })"
        "(document.getElementById('step'))"
    )


def attack(browser: Browser) -> None:
    browser.value(
        f"(m => {{ m.value = {MODELS[1]!r}; m.dispatchEvent(new Event('change')); }})"
        "(document.getElementById('model'))"
    )
    choose_digit(browser)
    browser.value("document.getElementById('tab-fool').click()")
    browser.until("document.getElementById('held').textContent")
    browser.until("!document.querySelector('#panel-fool.waiting')")


def photo(browser: Browser) -> None:
    browser.value("document.getElementById('tab-photo').click()")
    browser.until("document.getElementById('photo-bound').textContent.includes('gray')")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--phone", action="store_true", help="Use the screen size of a phone.")
    parser.add_argument("--dark", action="store_true", help="Use dark colors.")
    options = parser.parse_args()
    program = find_chromium()
    assert program is not None, "Chromium is not installed: apt-get install chromium"
    explored = [Explored(name, eq.training.experiment.trained_model(name)) for name in MODELS]
    with running(explorer_app(explored)) as address, chromium(program) as browser:
        browser.open(address, size=PHONE if options.phone else SIZE, dark=options.dark)
        for scene in (solve, attack, photo):
            scene(browser)
            picture = options.output / f"explorer-{scene.__name__}.png"
            image = Image.open(io.BytesIO(browser.screenshot())).convert("RGB")
            end = int(browser.value(BOTTOM)) + MARGIN
            image = image.crop((0, 0, image.width, min(end, image.height)))
            image.quantize(COLORS).save(picture, optimize=True)
            print(picture)
        assert browser.complaints() == [], browser.complaints()


if __name__ == "__main__":
    main()
