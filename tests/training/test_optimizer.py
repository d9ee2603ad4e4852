"""Settings, parameter groups and the schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.training import TrainingSettings, build_optimizer, parameter_groups, warmup_cosine


def test_biases_and_vectors_do_not_decay() -> None:
    model = eq.create_model("opteq-small", in_channels=1)
    decaying, free = parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() > 1 for parameter in decaying["params"])
    assert any(parameter is model.head.classifier.bias for parameter in free["params"])
    assert any(parameter is model.head.classifier.weight for parameter in decaying["params"])
    grouped = {id(p) for group in (decaying, free) for p in group["params"]}
    assert grouped == {id(p) for p in model.parameters()}


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert parameter_groups(model, 0.1)[1]["params"] == []


def test_decay_shrinks_weights_alone() -> None:
    model = nn.Linear(3, 3)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer = build_optimizer(
        model, TrainingSettings(epochs=1, learning_rate=0.1, weight_decay=0.5)
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), weight * (1 - 0.1 * 0.5))
    assert torch.equal(model.bias, bias)


def test_schedule_rises_then_falls_to_zero() -> None:
    rates = [warmup_cosine(step, steps=100, warmup=10) for step in range(101)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0)
    assert rates[55] == pytest.approx(0.5)
    assert warmup_cosine(0, steps=5, warmup=0) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"clip_norm": -1.0},
        {"weight_decay": -0.1},
        {"warmup_epochs": -1.0},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainingSettings(**{"epochs": 1, **wrong})
