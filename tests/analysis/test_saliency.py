"""Grad-CAM, compared with closed forms, and gradients in the image."""

from __future__ import annotations

import pytest
import torch

import equilibria as eq
from equilibria.analysis import grad_cam
from equilibria.analysis.saliency import input_gradient
from equilibria.models import EquilibriumClassifier
from tests.analysis.classifiers import small_classifier


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


def test_input_gradient_matches_finite_differences_of_the_margin() -> None:
    classifier = small_classifier().double()
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    classes, rivals = torch.tensor([0, 3]), torch.tensor([2, 1])
    direction = torch.randn_like(images)

    def margins(at: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = classifier(at)
        return (logits.gather(1, classes[:, None]) - logits.gather(1, rivals[:, None]))[:, 0]

    with eq.solving(classifier, tolerance=1e-12, gradient=eq.Implicit(tolerance=1e-12)):
        gradient = input_gradient(classifier, images, classes, rivals)
        ends = [margins(images + step * direction) for step in (1e-6, -1e-6)]
    along = (gradient * direction).flatten(1).sum(dim=1)
    torch.testing.assert_close(along, (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-7)
