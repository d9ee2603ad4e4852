"""Classifiers of the embedded digits, trained for a few seconds."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.data import load_digits
from equilibria.tasks import Classification
from equilibria.training import TrainingSettings, train


@functools.cache
def digit_classifier(kind: str) -> nn.Module:
    """An OptEq that trained with the one-step gradient, or a residual network."""
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
    train(model, Classification(), load_digits().train, settings)
    return model.eval()


def digits(count: int = 100) -> tuple[Tensor, Tensor]:
    test = load_digits().test
    return test.images[:count].clone(), test.labels[:count].clone()
