"""Radii at a loose tolerance are at most those of the exact equilibrium."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.data import dataset_card, load_dataset
from equilibria.models.pretrained import pretrained_cards
from tests.certificates.certified_bank import FAMILIES, images, random_model

CERTIFIED = [
    *("digits-certified", "digits-opteq"),
    pytest.param("mnist-certified", marks=pytest.mark.slow),
    pytest.param("cifar10-certified", marks=pytest.mark.slow),
]
IMAGES = 1000


def exact_certificate(model: nn.Module, x: Tensor) -> eq.certificates.Certificate:
    """Certify in float64 at a tolerance of 1e-12."""
    wide = copy.deepcopy(model).double()
    with eq.solving(wide, tolerance=1e-12, max_iterations=5000):
        return eq.certify(wide, x.double())


def check(model: nn.Module, x: Tensor, tolerances: tuple[float | None, ...]) -> None:
    exact = exact_certificate(model, x)
    for tolerance in tolerances:
        with eq.solving(model, tolerance=tolerance):
            loose = eq.certify(model, x)
        is_certain = loose.certified_class
        assert is_certain.any()
        assert exact.certified_class[is_certain].all()
        assert torch.equal(loose.prediction[is_certain], exact.prediction[is_certain])
        assert (loose.radius <= exact.radius).all()


def test_every_certified_pretrained_model_is_checked() -> None:
    certain = {
        name for name, card in pretrained_cards().items() if "class_certain" in card.certificate
    }
    assert certain == {getattr(name, "values", [name])[0] for name in CERTIFIED}


@pytest.mark.parametrize("name", CERTIFIED)
def test_radii_of_pretrained_models_are_below_the_exact_radii(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Uses the test images of the package, or 1,000 of the real data set."""
    data = pretrained_cards()[name].data
    root: Path | None = None
    if data != "digits":
        root = request.getfixturevalue("real_data")
        if dataset_card(data).find(root) is None:
            pytest.skip(f"NO REAL DATA: {data} is not below {root}")
    source = load_dataset(data, root).test
    x, _ = source.fetch(torch.arange(min(IMAGES, len(source))))
    check(eq.load(name), x, (None, 1e-2))


@pytest.mark.parametrize("family", FAMILIES)
def test_radii_of_random_models_are_below_the_exact_radii(family: str) -> None:
    check(random_model(family, 3, 0.7), images(24), (1e-6, 1e-3))
