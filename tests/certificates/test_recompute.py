"""`certify` agrees with a computation from the weights alone, in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.models.pretrained import SHIPPED
from equilibria.models.reflection.orthonormal import orthonormal_network
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


@pytest.mark.parametrize(
    "options",
    [
        {"image_size": 16, "stages": [[4, 8, 3], [4, 8, 2]], "units": [5]},
        {"image_size": 6, "units": [7, 9, 4], "center": 0.4},
    ],
)
def test_radii_of_orthonormal_reflections_agree(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = orthonormal_network(in_channels=3, num_classes=4, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    images = torch.rand(8, 3, options["image_size"], options["image_size"])
    tensors = {key: value.double().numpy() for key, value in model.state_dict().items()}
    check(model.double(), images, radii(tensors, "", options, images.numpy()))


@pytest.mark.parametrize("name", ["mnist-certified", "cifar10-certified"])
def test_radii_on_real_data_agree_with_those_of_the_weights_alone(
    real_data: Path, name: str
) -> None:
    check_shipped(name)
