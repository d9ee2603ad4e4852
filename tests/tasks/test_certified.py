"""Certified training: the loss, the figures, and rejected models and options."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import equilibria as eq
from equilibria.models.reflection.model import ReflectionNetwork, reflection_network
from equilibria.tasks import CertifiedClassification, create_task

RADII = (0.05, 0.2)


def small_network() -> ReflectionNetwork:
    torch.manual_seed(0)
    return reflection_network(image_size=4, units=(6,), in_channels=1, num_classes=3)


def batch(count: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 1, 4, 4, generator=generator)
    return images, torch.arange(count) % 3


def test_loss_is_that_of_the_worst_logits_within_eps() -> None:
    model, (images, labels) = small_network(), batch()
    task = CertifiedClassification(eps=0.3, temperature=2.0)
    losses = task.training_step(model, images, labels).values["loss"]
    logits, rows = model(images), F.normalize(model.head.direction, dim=1)
    reach = 0.3 * torch.cdist(rows, rows)[labels]
    torch.testing.assert_close(
        losses, F.cross_entropy(2 * (logits + reach), labels, reduction="none")
    )
    losses.mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert model.head.direction.grad is not None


def test_loss_with_zero_eps_is_cross_entropy() -> None:
    model, (images, labels) = small_network(), batch()
    task = CertifiedClassification(eps=0.0, radius=0.1, temperature=1.0)
    losses = task.training_step(model, images, labels).values["loss"]
    torch.testing.assert_close(losses, F.cross_entropy(model(images), labels, reduction="none"))


def test_figures_count_certified_right_predictions() -> None:
    model, (images, labels) = small_network(), batch(60)
    task = CertifiedClassification(eps=0.3, radius=0.1, radii=RADII)
    evaluation = task.evaluate(model, [(images[:40], labels[:40]), (images[40:], labels[40:])])
    certificate = eq.certify(model.eval(), images)
    right = (certificate.prediction == labels) & certificate.certified_class
    for name, radius in {"certified_accuracy": 0.1, "certified_at_0.05": 0.05}.items():
        share = float((right & (certificate.radius >= radius)).double().mean())
        assert evaluation.figures[name] == pytest.approx(share)
    assert evaluation.score == evaluation.figures["certified_accuracy"]
    assert evaluation.figures["certified_at_0.2"] <= evaluation.figures["certified_at_0.05"]
    assert evaluation.figures["certified_at_0.05"] <= evaluation.accuracy


def test_model_without_margin_slopes_can_only_be_evaluated() -> None:
    images, labels = batch()
    model = eq.create_model("opteq-small", in_channels=1, num_classes=3, channels=4, width=4)
    task = create_task("certified", eps=0.1)
    with pytest.raises(TypeError, match="needs a model with Lipschitz constants of its margins"):
        task.training_step(model, images, labels)
    assert 0 <= task.evaluate(model, [(images, labels)]).score <= 1


@pytest.mark.parametrize(
    "options", [{"eps": -1.0}, {"temperature": 0.0}, {"radii": [0.1, -0.1]}, {"radius": 0.0}]
)
def test_invalid_options_are_rejected(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"eps|temperature|radii|radius"):
        create_task("certified", **options)
