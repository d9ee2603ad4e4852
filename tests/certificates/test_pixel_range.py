"""The L∞ radius among images with pixels in [0, 1] holds, and is larger for black and white."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.certificates.pixel_range import radius_in_range
from equilibria.models.reflection.model import ReflectionNetwork, reflection_network
from tests.certificates.certified_bank import random_model


def drawings(count: int) -> Tensor:
    """Return images of 4×4 pixels most of which are black or white."""
    return (4 * torch.rand(count, 1, 4, 4) - 1.5).clamp(0, 1)


def linear_network(seed: int) -> ReflectionNetwork:
    """Return a reflection network with W = 0: its logits are those of its head."""
    torch.manual_seed(seed)
    sizes = {"image_size": 4, "in_channels": 1, "num_classes": 3, "units": (4,)}
    model = reflection_network(**sizes, solving=eq.Solving(tolerance=1e-6)).double().eval()
    with torch.no_grad():
        for parameter in model.layer.cell.parameters():
            parameter.zero_()
    return model


def exact_radius(model: ReflectionNetwork, image: Tensor, label: int) -> float:
    """Return the L∞ distance in [0, 1] at which a linear model changes its class, by bisection.

    The smallest margin within ε is attained at a corner of the box.
    """
    with torch.no_grad():
        rows, x = model.head.rows, image.flatten()
        low, high = 0.0, 1.0
        for _ in range(60):
            eps = 0.5 * (low + high)
            worst = math.inf
            for other in range(len(rows)):
                g = rows[label] - rows[other]
                corner = torch.where(g > 0, (x - eps).clamp_min(0), (x + eps).clamp_max(1))
                margin = g @ corner + model.head.bias[label] - model.head.bias[other]
                worst = min(worst, float(margin) if other != label else math.inf)
            low, high = (eps, high) if worst > 0 else (low, eps)
    return low


def test_radii_of_a_linear_model_are_below_the_exact_ones_and_above_root_n() -> None:
    gains = []
    for seed in range(5):
        model, x = linear_network(seed), drawings(8).double()
        certificate = eq.certify(model, x, refine=True)
        for i in certificate.certified_class.nonzero().flatten().tolist():
            label = int(certificate.prediction[i])
            radius = float(certificate.radius_linf_in_range[i])
            assert radius <= exact_radius(model, x[i], label) * (1 + 1e-9)
            gains.append(radius / float(certificate.radius_linf[i]))
    assert len(gains) > 20
    assert min(gains) >= 1
    assert sorted(gains)[len(gains) // 2] > 1.2


@pytest.mark.parametrize("family", ["dense", "opteq-y", "geq-fixed", "reflection"])
def test_attacks_and_corners_within_the_radius_do_not_change_a_class(family: str) -> None:
    torch.manual_seed(0)
    model, x = random_model(family, 8, 0.7).double(), drawings(12).double()
    with eq.solving(model, tolerance=1e-9):
        certificate = eq.certify(model, x, refine=True)
        radii, classes = certificate.radius_linf_in_range, certificate.prediction
        assert bool((radii >= certificate.radius_linf).all())
        chosen = (radii > certificate.radius_linf).nonzero().flatten().tolist()[:2]
        assert len(chosen) == 2
        for i in chosen:
            image, label, eps = x[i : i + 1], classes[i : i + 1], float(radii[i])
            attacked = eq.attack(
                model, image, label, norm="linf", eps=eps, method="pgd", clip=(0, 1), loss="margin"
            )
            assert attacked.robust_accuracy == 1
            corners = (image + eps * torch.randn(200, 1, 4, 4).sign()).clamp(0, 1).double()
            with torch.no_grad():
                assert bool((model(corners).argmax(dim=1) == label).all())


def test_other_images_and_radii_do_not_change() -> None:
    """Images with pixels outside [0, 1] keep their radius, and without `refine` so do all."""
    model, x = random_model("reflection", 3, 0.6), drawings(6)
    x[::2] = x[::2] + 0.1
    plain, refined = eq.certify(model, x), eq.certify(model, x, refine=True)
    assert torch.equal(plain.radius_linf_in_range, plain.radius_linf)
    assert torch.equal(refined.radius_linf, plain.radius_linf)
    is_outside = (x.flatten(1) > 1).any(dim=1)
    assert bool(is_outside.any())
    kept = refined.radius_linf_in_range == plain.radius_linf
    assert bool(kept[is_outside].all())
    assert not bool(kept[~is_outside].all())
    assert torch.equal(refined.radius, plain.radius)


def test_a_class_that_changes_at_the_center_is_no_proof() -> None:
    """At the center of every box another class is certified, within any distance."""
    model, x = random_model("reflection", 3, 0.6), drawings(4)
    certificate = eq.certify(model, x)

    def other_class(images: Tensor) -> eq.certificates.Certificate:
        result = eq.certify(model, images)
        result.prediction.add_(1)
        result.radius.fill_(9.0)
        return result

    assert torch.equal(radius_in_range(other_class, x, certificate), certificate.radius_linf)
