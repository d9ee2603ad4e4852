"""`certify` agrees with a computation from the weights alone, in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import equilibria as eq
from equilibria.models.pretrained import SHIPPED
from equilibria.training.experiment import trained
from tests.certificates.recompute import radii


def test_radii_agree_with_those_of_the_weights_alone() -> None:
    check("digits-certified")


def test_radii_on_real_data_agree_with_those_of_the_weights_alone(real_data: Path) -> None:
    check("mnist-certified")


def check(name: str) -> None:
    experiment = trained(name)
    images, _ = experiment.some_test_images(60)
    model = experiment.model.double()
    with eq.solving(model, tolerance=1e-10, max_iterations=2000):
        certificate = eq.certify(model, images.double())
    classes, expected = radii(SHIPPED / f"{name}.safetensors", images.numpy())
    assert np.array_equal(certificate.prediction.numpy(), classes)
    radius = certificate.radius.numpy()
    assert bool((radius <= expected * (1 + 1e-12)).all())
    assert np.abs(radius - expected).max() < 1e-7
