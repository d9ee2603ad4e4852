"""Named models: parameter counts, descriptions, gradients and their table in the documentation."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria.models import EquilibriumClassifier, describe_model
from equilibria.models.registry import model_outline, parameter_count
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
    assert parameter_count(model_outline(name)) == COUNTS[name]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 8), (1, 28), (3, 32)])
def test_small_models_accept_small_images(name: str, channels: int, size: int) -> None:
    torch.manual_seed(0)
    model = eq.create_model(name, in_channels=channels, num_classes=4).eval()
    assert parameter_count(model) < 150_000
    with torch.no_grad():
        logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, 4)
    assert logits.isfinite().all()
    if isinstance(model, EquilibriumClassifier):
        assert model.last_solution is not None
        assert model.last_solution.converged.all()


@pytest.mark.parametrize("name", eq.list_models())
def test_models_are_described_without_being_built(name: str) -> None:
    description = describe_model(name)
    assert description.parameters > 0
    assert description.card.summary
    assert description.card.paper
    assert sum(part.parameters for part in description.parts) == description.parameters
    outline = model_outline(name)
    assert all(parameter.is_meta for parameter in outline.parameters())


CLASSIFIERS = [
    name
    for name in eq.list_models()
    if "num_classes" in eq.models.model_options(name) and not name.startswith("few-shot")
]


def fraction(name: str) -> torch.nn.Module:
    """Build a preset with few channels."""
    options = eq.models.model_options(name)
    defaults = {key: value for key, value in options.items() if value is not None}
    shrunk = {key: SHRUNK[key](value) for key, value in defaults.items() if key in SHRUNK}
    if name.startswith(("resnet", "node", "anode", "conv4", "dncnn", "deq-restorer")):
        shrunk = {"channels": 4} if "depth" in options else {}
    if name.startswith("reflection"):
        shrunk = {key: (5,) * len(options.get(key, ())) for key in ("filters", "units")}
        if "stages" in options:
            stages = [(patch, 5, 2) for patch, _, _ in options["stages"]]
            shrunk = {"units": shrunk["units"], "stages": stages}
    if "final_channels" in options:
        shrunk |= {"final_channels": 8, "head_channels": 2}
    if "num_classes" in options:
        shrunk |= {"num_classes": 3}
    torch.manual_seed(0)
    return eq.create_model(name, **shrunk)


def assert_finite_gradients(model: torch.nn.Module) -> None:
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", [n for n in CLASSIFIERS if "imagenet" not in n])
def test_narrow_presets_have_finite_gradients(name: str) -> None:
    model, options = fraction(name), eq.models.model_options(name)
    size = options.get("image_size") or 32
    model(torch.randn(2, options["in_channels"], size, size)).square().sum().backward()
    assert_finite_gradients(model)


@pytest.mark.parametrize("name", [n for n in eq.list_models() if "imagenet" not in n])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_finite_for_blank_inputs(name: str, training: bool) -> None:
    """A batch of noise, black, constant and faint images in single precision.

    In evaluation mode a black image can make all features zero.
    """
    options = eq.models.model_options(name)
    model = fraction(name).train(training)
    latent = getattr(model, "latent_dim", None) if "decoder" in name else None
    size = options.get("image_size") or 32
    shape = (options["in_channels"], size, size) if latent is None else (latent,)
    noise = torch.rand(6, *shape)
    levels = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 0.0])
    strengths = torch.tensor([1.0, 0.0, 0.0, 1e-5, 1e-12, 1e-25])
    ones = [1] * len(shape)
    batch = levels.view(-1, *ones) + strengths.view(-1, *ones) * noise
    with warnings.catch_warnings():
        # A solve may stop early for a faint image.
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        model(batch).square().sum().backward()
    assert_finite_gradients(model)


def test_table_of_models_in_the_documentation_is_current() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = invoke("models", "--markdown").output
    assert table in page, "run `equilibria models --markdown` and paste the table"
