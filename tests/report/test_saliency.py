"""Grad-CAM, compared with closed forms."""

from __future__ import annotations

import pytest
import torch

import equilibria as eq
from equilibria.models import EquilibriumClassifier
from equilibria.report import grad_cam
from equilibria.report.saliency import overlaid


def classifier(pool: int = 1) -> EquilibriumClassifier:
    torch.manual_seed(0)
    model = eq.create_model(
        "geq-small", channels=8, widths=(8, 8), in_channels=1, num_classes=3, pool=pool
    )
    assert isinstance(model, EquilibriumClassifier)
    return model.double()


def test_grad_cam_behind_global_pooling_weights_channels_by_the_head() -> None:
    """The logits are W·mean(z) + b, so α_k = W_ck / pixels."""
    model, images = classifier().train(), torch.rand(4, 1, 8, 8, dtype=torch.float64)
    classes = torch.tensor([0, 2, 1, 2])
    maps = grad_cam(model, images, classes)
    assert model.training
    model.eval()
    with torch.no_grad():
        feature = model.features(images)
        weights = model.head.classifier.weight[classes]
        expected = torch.einsum("bk,bkhw->bhw", weights, feature).relu() / 64
        predicted = model(images).argmax(dim=1)
    torch.testing.assert_close(maps, expected)
    torch.testing.assert_close(grad_cam(model, images), grad_cam(model, images, predicted))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_grad_cam_behind_local_pooling_uses_mean_weights() -> None:
    model, images = classifier(pool=2).eval(), torch.rand(2, 1, 8, 8, dtype=torch.float64)
    classes = torch.tensor([1, 0])
    with torch.no_grad():
        feature = model.features(images)
        weights = model.head.classifier.weight[classes].reshape(2, 8, 4).mean(dim=2) / 16
    expected = torch.einsum("bk,bkhw->bhw", weights, feature).relu()
    torch.testing.assert_close(grad_cam(model, images, classes), expected)


def test_model_without_equilibrium_is_an_error() -> None:
    model = eq.create_model("resnet-small", in_channels=1)
    with pytest.raises(TypeError, match="no equilibrium layer"):
        grad_cam(model, torch.rand(1, 1, 8, 8))


def test_overlaid_images_show_the_map_in_color() -> None:
    maps = torch.zeros(2, 2, 2)
    maps[0, 0, 0] = 3.0
    drawn = overlaid(torch.zeros(2, 1, 8, 8), maps)
    assert drawn.shape == (2, 3, 8, 8)
    assert 0 <= float(drawn.min()) <= float(drawn.max()) <= 1
    corner, opposite = drawn[0, :, 0, 0], drawn[0, :, -1, -1]
    assert corner[0] > corner[2]  # red
    assert opposite[2] >= opposite[0]  # bluish
    assert torch.equal(drawn[1, :, 0, 0], drawn[1, :, 4, 5])  # a map of zeros has one color
