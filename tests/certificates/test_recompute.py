"""`certify` agrees with a computation from the weights alone, in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

import equilibria as eq
from equilibria.models.pretrained import SHIPPED
from equilibria.training.experiment import trained
from tests.certificates.recompute import radii, read


def check(model: nn.Module, images: Tensor, expected: tuple[np.ndarray, np.ndarray]) -> None:
    """Compare a model in float64 with classes and radii from elsewhere."""
    with eq.solving(model, tolerance=1e-10, max_iterations=2000):
        certificate = eq.certify(model, images.double())
    classes, radius = expected
    assert bool(certificate.certified_class.all())
    assert np.array_equal(certificate.prediction.numpy(), classes)
    certified = certificate.radius.numpy()
    assert bool((certified <= radius * (1 + 1e-12)).all())
    assert np.abs(certified - radius).max() < 1e-7


def check_shipped(name: str) -> None:
    experiment = trained(name)
    images, _ = experiment.some_test_images(60)
    expected = radii(*read(SHIPPED / f"{name}.safetensors"), images.numpy())
    check(experiment.model.double(), images, expected)


def test_radii_agree_with_those_of_the_weights_alone() -> None:
    check_shipped("digits-certified")


@pytest.mark.parametrize("name", ["mnist-certified"])
def test_radii_on_real_data_agree_with_those_of_the_weights_alone(
    real_data: Path, name: str
) -> None:
    check_shipped(name)
