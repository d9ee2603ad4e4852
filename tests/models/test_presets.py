"""The named models: their sizes, what they promise, and that the page about them is true."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria.models import EquilibriumClassifier, describe_model
from tests.models.small import SHRUNK
from tests.program import invoke

ROOT = Path(__file__).parents[2]

COUNTS = {
    "deep-opteq-199k": 199_162,
    "deep-opteq-162k": 161_878,
    "mopteq-1view-193k": 194_730,
    "popteq-193k": 194_730,
    "popteq-conv-276k": 277_674,
    "mopteq-480k": 483_978,
    "mopteq-1.9m": 1_926_410,
    "mopteq-8m": 7_845_450,
    "mopteq-imagenet-10m": 9_688_650,
    "geq-5m": 5_035_274,
    "geq-8m": 7_857_738,
    "geq-imagenet-6m": 5_807_972,
    "geq-imagenet-13m": 13_012_708,
    "resnet-18": 11_173_962,
    "resnet-50": 23_520_842,
    "resnet-18-imagenet": 11_689_512,
    "resnet-50-imagenet": 25_557_032,
    "mondeq-172k": 172_218,
    "mdeq-10m": 10_030_550,
}

SMALL = [
    *("opteq-small", "deep-opteq-small", "popteq-small", "mopteq-small", "geq-small"),
    *("mdeq-small", "mondeq-small", "node-small", "anode-small", "resnet-small"),
]


@pytest.mark.parametrize("name", list(COUNTS))
def test_parameter_counts(name: str) -> None:
    assert eq.models.parameter_count(eq.models.model_outline(name)) == COUNTS[name]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 8), (1, 28), (3, 32)])
def test_small_models_take_small_images(name: str, channels: int, size: int) -> None:
    torch.manual_seed(0)
    model = eq.create_model(name, in_channels=channels, num_classes=4).eval()
    assert eq.models.parameter_count(model) < 150_000
    with torch.no_grad():
        logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, 4)
    assert logits.isfinite().all()
    if isinstance(model, EquilibriumClassifier):
        assert model.last_solution is not None
        assert model.last_solution.converged.all()


@pytest.mark.parametrize("name", eq.list_models())
def test_a_model_is_described_without_being_built(name: str) -> None:
    found = describe_model(name)
    assert found.parameters > 0
    assert found.card.summary
    assert found.card.paper
    assert sum(part.parameters for part in found.parts) == found.parameters
    outline = eq.models.model_outline(name)
    assert all(parameter.is_meta for parameter in outline.parameters())


CLASSIFIERS = [
    name
    for name in eq.list_models()
    if "num_classes" in eq.models.model_options(name) and not name.startswith("few-shot")
]


@pytest.mark.parametrize("name", [n for n in CLASSIFIERS if "imagenet" not in n])
def test_all_presets_run_at_a_fraction_of_their_width(name: str) -> None:
    """The structure of every preset, with few channels: one forward and one backward pass."""
    options = eq.models.model_options(name)
    shrink = {key: SHRUNK[key](value) for key, value in options.items() if key in SHRUNK}
    if name.startswith(("resnet", "node", "anode")):
        shrink = {}
        if "depth" in options:
            shrink = {"channels": 4}
    if "final_channels" in options:
        shrink |= {"final_channels": 8, "head_channels": 2}
    torch.manual_seed(0)
    model = eq.create_model(name, num_classes=3, **shrink)
    loss = model(torch.randn(2, 3, 32, 32)).square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_page_of_models_is_up_to_date() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = invoke("models", "--markdown").output
    assert table in page, "run `equilibria models --markdown` and paste the table"
