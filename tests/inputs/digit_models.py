"""Classifiers of the embedded digits, trained for a few seconds."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.data import load_digits
from equilibria.tasks import AdversarialClassification, Classification
from equilibria.training import TrainingSettings, fit


@functools.cache
def digit_classifier(kind: str) -> nn.Module:
    """Return an OptEq that was trained with the one-step gradient, or a residual network.

    "opteq-jiio" is the OptEq after adversarial training by JIIO (L2, 0.6).
    """
    if kind == "opteq-jiio":
        return _adversarially_trained(copy.deepcopy(digit_classifier("opteq")))
    torch.manual_seed(0)
    if kind == "opteq":
        model = eq.create_model("opteq-small", in_channels=1, channels=12, width=12, pool=4)
    else:
        model = eq.create_model("resnet-small", in_channels=1)
    settings = TrainingSettings(
        epochs=3,
        learning_rate=0.02,
        tolerance=1e-2,
        gradient="one_step" if kind == "opteq" else None,
    )
    fit(model, Classification(), load_digits().train, settings)
    return model.eval()


def _adversarially_trained(model: nn.Module) -> nn.Module:
    task = AdversarialClassification(eps=0.6, method="jiio", steps=10)
    settings = TrainingSettings(
        epochs=4, learning_rate=0.02, tolerance=1e-2, gradient="one_step", batch_size=64
    )
    fit(model, task, load_digits().train, settings)
    return model.eval()


def digits(count: int = 100) -> tuple[Tensor, Tensor]:
    test = load_digits().test
    return test.images[:count].clone(), test.labels[:count].clone()
