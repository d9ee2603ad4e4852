"""Comparison of attacks with those of Foolbox, an independent implementation."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import equilibria as eq
from equilibria.inputs import attack
from tests.inputs.digit_models import digit_classifier, digits

STEPS = 20


@pytest.fixture(scope="module")
def foolbox() -> Any:
    with warnings.catch_warnings():
        # Foolbox imports from a deprecated module of SciPy.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            import foolbox
        except ImportError:
            pytest.skip("NO FOOLBOX: pip install foolbox to compare attacks with it")
    return foolbox


def with_exact_gradient(kind: str) -> Any:
    """Return a model with exact gradients. Foolbox uses the gradient rule of the model."""
    model: Any = copy.deepcopy(digit_classifier(kind))
    if kind.startswith("opteq"):
        model.layer.solving = model.layer.solving.changed(gradient=eq.Implicit())
    return model


@pytest.mark.parametrize("kind", ["opteq", "resnet"])
@pytest.mark.parametrize(("norm", "eps"), [("l2", 0.6), ("linf", 0.06)])
def test_pgd_is_at_least_as_strong_as_that_of_foolbox(
    foolbox: Any, kind: str, norm: Any, eps: float
) -> None:
    """Foolbox's PGD runs with its default steps and with longer ones, which suit few steps better.

    The margin allows for chance: either attack may find the worse image of a single digit.
    """
    model = with_exact_gradient(kind)
    images, labels = digits(100)
    ours = attack(model, images, labels, norm=norm, eps=eps, steps=STEPS)
    theirs = {"l2": foolbox.attacks.L2PGD, "linf": foolbox.attacks.LinfPGD}[norm]
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    for options in ({}, {"rel_stepsize": 2.5 / STEPS}):
        torch.manual_seed(0)
        _, adversarial, success = theirs(steps=STEPS, **options)(
            wrapped, images, labels, epsilons=eps
        )
        with torch.no_grad():
            loss = F.cross_entropy(model(adversarial), labels)
        assert bool(ours.distance.max() <= torch.tensor(eps))
        assert float(ours.loss.mean()) >= 0.97 * float(loss)
        assert ours.robust_accuracy <= 1 - float(success.double().mean()) + 0.02


@pytest.mark.slow
def test_adversarial_training_by_jiio_withstands_foolbox(foolbox: Any) -> None:
    images, labels = digits(100)
    robust = {}
    for kind in ("opteq", "opteq-jiio"):
        model = with_exact_gradient(kind)
        wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
        torch.manual_seed(0)
        theirs = foolbox.attacks.L2PGD(steps=STEPS, rel_stepsize=2.5 / STEPS)
        _, _, success = theirs(wrapped, images, labels, epsilons=0.6)
        robust[kind] = 1 - float(success.double().mean())
        ours = attack(model, images, labels, norm="l2", eps=0.6, steps=STEPS).robust_accuracy
        assert robust[kind] >= ours - 0.01, "our attack overestimates the robustness"
    assert robust["opteq-jiio"] > robust["opteq"] + 0.1


@pytest.mark.parametrize("kind", ["opteq", "resnet"])
@pytest.mark.parametrize(("norm", "eps"), [("l2", 0.6), ("linf", 0.06)])
def test_fgsm_agrees_with_that_of_foolbox(foolbox: Any, kind: str, norm: Any, eps: float) -> None:
    """Both take one step, without clipping.

    Images with almost no loss are left out, because Foolbox's gradient is rounding there.
    """
    model = with_exact_gradient(kind)
    images, labels = digits(100)
    ours = attack(model, images, labels, norm=norm, eps=eps, method="fgsm", clip=(-9.0, 9.0))
    theirs = {"l2": foolbox.attacks.FGM, "linf": foolbox.attacks.FGSM}[norm]
    wrapped = foolbox.PyTorchModel(model, bounds=(-9, 9), device="cpu")
    _, adversarial, _ = theirs()(wrapped, images, labels, epsilons=eps)
    clear = (ours.initial_loss > 1e-3).nonzero().squeeze(1)
    assert len(clear) >= 15
    near = (ours.images[clear] - adversarial[clear]).abs() <= 1e-2 * eps
    assert float(near.double().mean()) > 0.99
