"""Adversarial training and the evaluation under attack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import equilibria as eq
from equilibria.data import Batches, load_digits
from equilibria.inputs import AttackSettings, attack
from equilibria.inputs.attacks import adversarial_images
from equilibria.tasks import AdversarialClassification
from equilibria.training import TrainingSettings, fit
from equilibria.training.experiment import Experiment
from equilibria.training.recipe import recipe_from_data


def small_opteq() -> eq.models.EquilibriumClassifier:
    torch.manual_seed(0)
    return eq.create_model("opteq-small", in_channels=1, channels=8, width=8, pool=4)


def batch(count: int = 8) -> tuple[Tensor, Tensor]:
    split = load_digits().train
    return split.images[:count], split.labels[:count]


@pytest.mark.parametrize("method", ["fgsm", "pgd", "jiio"])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_training_step_uses_the_adversarial_images(method: Any, norm: Any) -> None:
    images, labels = batch()
    model = small_opteq().eval()  # In training mode, BatchNorm would change between the attacks.
    eps = 0.5 if norm == "l2" else 0.05
    steps = None if method == "fgsm" else 3
    task = AdversarialClassification(eps=eps, norm=norm, method=method, steps=steps)
    attacked = attack(model, images, labels, eps=eps, norm=norm, method=method, steps=steps)
    step = task.training_step(model, images, labels)
    assert float(step.loss.detach()) == pytest.approx(float(attacked.loss.mean()), rel=1e-3)
    assert float(step.loss.detach()) > float(attacked.initial_loss.mean())
    assert (int(step.samples), int(step.correct)) == (8, int((~attacked.success).sum()))
    step.loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    # Training uses the last iterate of a search, while an attack returns the worst one.
    settings = AttackSettings(eps=eps, norm=norm, method=method, steps=steps)
    near = adversarial_images(model, images, labels, settings)
    F.cross_entropy(model(near), labels).backward()  # type: ignore[no-untyped-call]
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(gradients, expected, strict=True))


def test_model_is_attacked_in_evaluation_mode() -> None:
    """Running statistics are updated once per step, by the training pass."""
    images, labels = batch()
    model = small_opteq()
    AdversarialClassification(eps=0.5, steps=3).training_step(model, images, labels)
    counts = [b for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts
    assert {int(count) for count in counts} == {1}
    assert model.training


def test_only_the_training_pass_is_recorded() -> None:
    """A Jacobian penalty must not include the equilibria of the attack."""
    images, labels = batch()
    model = small_opteq()
    with eq.solving(model, record="equilibria") as record:
        AdversarialClassification(eps=0.5, steps=3).training_step(model, images, labels)
    assert len(record.equilibria) == 1


def test_clean_method_is_ordinary_training() -> None:
    images, labels = batch()
    model = small_opteq().eval()
    step = AdversarialClassification(eps=0.5, method="clean").training_step(model, images, labels)
    expected = F.cross_entropy(model(images), labels)
    torch.testing.assert_close(step.loss, expected)


def test_evaluation_reports_the_accuracy_under_attack() -> None:
    model = small_opteq()
    images, labels = batch(30)
    batches = [(images[:20], labels[:20]), (images[20:], labels[20:])]
    whole = AdversarialClassification(eps=0.1, attack_steps=3).evaluate(model, batches)
    attacked = attack(model, images, labels, eps=0.1, steps=3)
    assert (whole.samples, len(whole.values["robust"])) == (30, 30)
    assert whole.accuracy == pytest.approx(attacked.accuracy)
    assert whole.figures["robust_accuracy"] == pytest.approx(attacked.robust_accuracy)
    assert whole.loss == pytest.approx(float(attacked.loss.mean()), rel=1e-3)
    assert whole.score == whole.figures["robust_accuracy"]
    assert set(whole.figures) == {"accuracy", "robust_accuracy"}
    assert whole.figures["accuracy"] == whole.accuracy
    assert whole.solves.share_converged == 1
    part = AdversarialClassification(eps=0.1, attack_steps=3, attack_share=0.25)
    assert len(part.evaluate(model, batches).values["robust"]) == 5 + 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": -1.0}, "eps must not be"),
        ({"eps": 1.0, "method": "cw"}, "method must be one of clean, fgsm, pgd, jiio"),
        ({"eps": 1.0, "norm": "l3"}, "norm must be"),
        ({"eps": 1.0, "steps": 0}, "steps must be at least 1"),
        ({"eps": 1.0, "attack_steps": 0}, "steps must be at least 1"),
        ({"eps": 1.0, "attack_method": "cw"}, "method must be one of"),
        ({"eps": 1.0, "attack_share": 0.0}, "attack_share must be in"),
        ({"eps": 1.0, "label_smoothing": 1.0}, "label_smoothing must be in"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdversarialClassification(**options)


def test_normalized_images_are_rejected() -> None:
    images, labels = batch()
    with pytest.raises(ValueError, match="images must be within clip"):
        AdversarialClassification(eps=1.0).training_step(small_opteq(), 2 * images, labels)


def test_recipe_may_normalize_in_the_model() -> None:
    """The model normalizes, so the task gets images in [0, 1] and the budget is in pixels."""
    recipe = {
        "model": {"name": "opteq-small", "options": {"channels": 8, "width": 8, "pool": 4}},
        "data": {"name": "digits", "normalize": True, "options": {"train_samples": 64}},
        "training": {"epochs": 1},
        "task": {"name": "adversarial", "options": {"eps": 0.5, "steps": 2, "attack_steps": 2}},
    }
    experiment = Experiment.of(recipe_from_data(recipe))
    images, labels = experiment.some_test_images(16)
    assert 0 <= images.min() < images.max() <= 1
    step = experiment.task.training_step(experiment.model, images, labels)
    assert step.loss.isfinite()
    assert getattr(experiment.model, "normalize", None) is not None


@pytest.mark.slow
def test_adversarial_training_makes_a_model_robust() -> None:
    data = load_digits()
    judge = AdversarialClassification(eps=0.8, attack_steps=5, attack_share=0.3)
    robust = {}
    for method, steps in (("clean", None), ("pgd", 3), ("jiio", 4)):
        model = small_opteq()
        task = AdversarialClassification(eps=0.8, method=method, steps=steps)  # type: ignore[arg-type]
        settings = TrainingSettings(
            epochs=2, learning_rate=0.02, tolerance=1e-2, gradient="one_step"
        )
        fit(model, task, data.train, settings)
        robust[method] = judge.evaluate(model, Batches(data.test, 150)).score
    assert robust["pgd"] > robust["clean"] + 0.1
    assert robust["jiio"] > robust["clean"] + 0.1
