"""The explorer in a browser, and the requests it sends."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import requests
import torch
from PIL import Image

from equilibria.cli.explore import CLASSIFIERS
from equilibria.data import image_to_tensor, load_digits
from equilibria.models import pretrained_cards
from equilibria.serving import Limits
from equilibria.serving.explorer import explorer_app
from equilibria.serving.exploring import Explored
from equilibria.training.experiment import trained_model
from tests.program import invoke
from tests.report.browser import PHONE, Browser, chromium, find_chromium
from tests.serving.running import png, running

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an explorer with an OptEq and a MOptEqs."""
    explored = []
    for recipe in ("digits-opteq", "digits-mopteq"):
        folder = tmp_path_factory.mktemp("runs") / recipe
        options = ("training.epochs=2", "model.options.channels=8", "--output", folder)
        result = invoke("train", recipe, *options)
        assert result.exit_code == 0, result.output
        explored.append(Explored(recipe, trained_model(folder)))
    with running(explorer_app(explored, Limits(seconds=600))) as url:
        yield url


@pytest.fixture(scope="module")
def digit() -> bytes:
    return png(load_digits().test.images[3])


def post(address: str, path: str, content: bytes, **values: object) -> requests.Response:
    return requests.post(f"{address}/explorer/{path}", data=content, params=values, timeout=120)  # type: ignore[arg-type]


def test_error_bounds_and_objective_decrease_along_a_solve(address: str, digit: bytes) -> None:
    result = post(address, "follow", digit, solver="picard", tolerance=1e-6).json()
    steps = result["steps"]
    assert len(steps) > 2
    assert all(later["error"] < former["error"] for former, later in pairwise(steps))
    objective = [step["objective"] for step in steps]
    assert all(later <= former + 1e-9 * abs(former) for former, later in pairwise(objective))
    assert sum(steps[-1]["shares"]) == pytest.approx(1, abs=1e-5)
    assert result["answer"]["label"] == str(max(range(10), key=lambda k: steps[-1]["shares"][k]))


def test_knobs_change_the_solve(address: str, digit: bytes) -> None:
    default = post(address, "follow", digit, solver="picard", tolerance=1e-5).json()
    slow = post(address, "follow", digit, solver="picard", tolerance=1e-5, alpha=0.3).json()
    assert len(slow["steps"]) > len(default["steps"])
    coarse = post(address, "follow", digit, solver="picard", tolerance=0.3).json()
    assert len(coarse["steps"]) < len(default["steps"])


def test_attacks_within_the_radius_do_not_change_the_class(address: str, digit: bytes) -> None:
    large = post(address, "fool", digit, eps=3.0, method="pgd").json()
    assert large["distance"] <= 3.0
    radius = large["before"]["radius"]
    assert radius > 1e-4
    small = post(address, "fool", digit, eps=0.99 * radius).json()
    assert small["promised"]
    assert not small["changed"]


@pytest.mark.parametrize(
    "name", [name for name, card in pretrained_cards().items() if card.task in CLASSIFIERS]
)
def test_all_included_classifiers_can_be_explored(name: str) -> None:
    """The explorer shows the last layer of reflection networks with several layers."""
    explored = Explored(name, trained_model(name))
    image = torch.rand(explored.run.images.image_shape, generator=torch.Generator().manual_seed(0))
    result = explored.follow(image, {"tolerance": 1e-5}, "auto")
    shares = result["steps"][-1]["shares"]
    assert max(shares) == pytest.approx(result["answer"]["confidence"], abs=1e-2)
    for knob in explored.knobs:
        assert explored.follow(image, {knob.name: (knob.least + knob.most) / 2}, "picard")["steps"]


@pytest.mark.parametrize(
    ("path", "values", "status", "message"),
    [
        ("follow", {"tolerance": "nan"}, 400, "tolerance must be a number"),
        ("follow", {"solver": "magic"}, 400, "no solver 'magic'"),
        ("follow", {"alpha": "7"}, 400, "alpha must be a number"),
        ("follow", {"model": "../../etc"}, 404, "no model"),
        ("fool", {"eps": "-1"}, 400, "eps must be a number"),
        ("photo", {"noise": "9"}, 400, "noise must be a number"),
    ],
)
def test_invalid_parameters_are_rejected(
    address: str, digit: bytes, path: str, values: dict[str, str], status: int, message: str
) -> None:
    response = post(address, path, digit, **values)
    assert response.status_code == status
    assert message in response.json()["error"]


def test_all_views_in_a_browser(address: str, tmp_path: Path) -> None:
    executable = find_chromium()
    if executable is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    photo = tmp_path / "photo.jpg"
    Image.linear_gradient("L").resize((64, 48)).convert("RGB").save(photo)
    with chromium(executable) as browser:
        browser.open(address)
        browser.until("document.querySelector('#verdict strong')")
        assert browser.value("document.querySelectorAll('#samples button').length") == 12
        watch(browser)
        change_model(browser)
        attack_it(browser)
        restore(browser, photo)
        assert browser.complaints() == []
        assert all(url.startswith(address) for url in browser.requests())
        browser.open(address, size=PHONE, dark=True)
        browser.until("document.querySelector('#verdict strong')")
        assert browser.value("document.documentElement.scrollWidth") <= PHONE[0]


def watch(browser: Browser) -> None:
    """Move the slider through the iterations, and change the tolerance."""
    assert browser.value("document.querySelectorAll('#chart-residual polyline').length") == 2
    last = browser.value("document.getElementById('at').textContent")
    browser.value(
        "(s => { s.value = 0; s.dispatchEvent(new Event('input')); })"
        "(document.getElementById('step'))"
    )
    assert browser.value("document.getElementById('at').textContent") != last
    assert browser.value("document.getElementById('feature').naturalWidth") > 0
    before = browser.value("solve.steps.length")
    browser.value(
        "(t => { t.value = -1; t.dispatchEvent(new Event('input')); })"
        "(document.getElementById('tolerance'))"
    )
    browser.until(f"solve.steps.length < {before}")


def change_model(browser: Browser) -> None:
    browser.value(
        "(m => { m.value = 'digits-mopteq'; m.dispatchEvent(new Event('change')); })"
        "(document.getElementById('model'))"
    )
    browser.until("document.querySelector('input[name=diversity]')")
    browser.until("document.getElementById('verdict').textContent.includes('no certificate')")
    browser.value(
        "(m => { m.value = 'digits-opteq'; m.dispatchEvent(new Event('change')); })"
        "(document.getElementById('model'))"
    )
    browser.until("document.getElementById('verdict').textContent.includes('certified class')")


def attack_it(browser: Browser) -> None:
    browser.value("document.getElementById('tab-fool').click()")
    browser.until("document.getElementById('held').textContent")
    browser.value(
        "(e => { e.value = -3; e.dispatchEvent(new Event('input')); })"
        "(document.getElementById('eps'))"
    )
    browser.until("document.getElementById('held').textContent.includes('held')")


def restore(browser: Browser, photo: Path) -> None:
    browser.value("document.getElementById('tab-photo').click()")
    browser.give_file("#photo", photo)
    browser.until("document.getElementById('photo-bound').textContent.includes('gray levels')")
    assert "dB" in browser.value("document.getElementById('photo-after').textContent")
    assert browser.value("document.getElementById('photo-restored').naturalWidth") == 192


def test_restoration_sends_the_noisy_image_and_then_iterates(address: str) -> None:
    names = requests.get(f"{address}/explorer/photos", timeout=60).json()
    assert names == ["temple", "flower"]
    sample = requests.get(f"{address}/explorer/photos/flower", timeout=60).content
    picture = Image.open(io.BytesIO(sample)).resize((48, 32))
    content = io.BytesIO()
    picture.save(content, "PNG")
    response = post(address, "photo", content.getvalue(), noise=0.1)
    first, *steps = [json.loads(line) for line in response.text.splitlines()]
    assert first["before"] == pytest.approx(20, abs=1.5)
    assert [step["iteration"] for step in steps] == sorted(step["iteration"] for step in steps)
    assert steps[-1]["objective"] == min(step["objective"] for step in steps)
    assert steps[-1]["bound"] <= 1
    assert all("bound" not in step for step in steps[:-1])
    assert steps[-1]["after"] > first["before"] + 3
    assert requests.get(f"{address}/explorer/photos/no", timeout=60).status_code == 404
    assert post(address, "photo", b"no picture", noise=0.1).status_code == 400


def test_sample_images_are_exact(address: str) -> None:
    (first, *_) = requests.get(f"{address}/explorer/models", timeout=60).json()
    content = base64.b64decode(first["samples"][2].split(",")[1])
    sample = image_to_tensor(Image.open(io.BytesIO(content)))
    assert torch.equal(sample.float(), (load_digits().test.images[2] * 255).round())
