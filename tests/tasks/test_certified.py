"""Training for certificates: the loss, the figures, and what is refused."""

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


def test_the_loss_is_that_of_the_worst_logits_within_reach() -> None:
    model, (images, labels) = small_network(), batch()
    task = CertifiedClassification(eps=0.3, temperature=2.0)
    found = task.training_step(model, images, labels).values["loss"]
    logits, rows = model(images), F.normalize(model.head.direction, dim=1)
    reach = 0.3 * torch.cdist(rows, rows)[labels]
    torch.testing.assert_close(
        found, F.cross_entropy(2 * (logits + reach), labels, reduction="none")
    )
    found.mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert model.head.direction.grad is not None


def test_without_reach_it_is_cross_entropy() -> None:
    model, (images, labels) = small_network(), batch()
    task = CertifiedClassification(eps=0.0, radius=0.1, temperature=1.0)
    losses = task.training_step(model, images, labels).values["loss"]
    torch.testing.assert_close(losses, F.cross_entropy(model(images), labels, reduction="none"))


def test_figures_count_what_is_right_within_a_radius() -> None:
    model, (images, labels) = small_network(), batch(60)
    task = CertifiedClassification(eps=0.3, radius=0.1, radii=RADII)
    found = task.evaluate(model, [(images[:40], labels[:40]), (images[40:], labels[40:])])
    sure = eq.certify(model.eval(), images)
    right = (sure.prediction == labels) & sure.certified_class
    for name, radius in {"certified_accuracy": 0.1, "certified_at_0.05": 0.05}.items():
        share = float((right & (sure.radius >= radius)).double().mean())
        assert found.figures[name] == pytest.approx(share)
    assert found.score == found.figures["certified_accuracy"]
    assert found.figures["certified_at_0.2"] <= found.figures["certified_at_0.05"]
    assert found.figures["certified_at_0.05"] <= found.accuracy


def test_other_models_can_be_judged_by_it_and_not_trained() -> None:
    images, labels = batch()
    model = eq.create_model("opteq-small", in_channels=1, num_classes=3, channels=4, width=4)
    task = create_task("certified", eps=0.1)
    with pytest.raises(TypeError, match="how steep their margins are"):
        task.training_step(model, images, labels)
    assert 0 <= task.evaluate(model, [(images, labels)]).score <= 1


@pytest.mark.parametrize(
    "options", [{"eps": -1.0}, {"temperature": 0.0}, {"radii": [0.1, -0.1]}, {"radius": 0.0}]
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"eps|temperature|radii|radius"):
        create_task("certified", **options)
