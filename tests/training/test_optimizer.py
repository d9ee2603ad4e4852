"""Training settings, parameter groups and learning rate schedules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.training.settings import (
    TrainingSettings,
    build_optimizer,
    learning_rate_share,
    parameter_groups,
)


def test_biases_and_vectors_have_no_weight_decay() -> None:
    model = eq.create_model("opteq-small", in_channels=1)
    decaying, without_decay = parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], without_decay["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() > 1 for parameter in decaying["params"])
    assert any(parameter is model.head.classifier.bias for parameter in without_decay["params"])
    assert any(parameter is model.head.classifier.weight for parameter in decaying["params"])
    grouped = {id(p) for group in (decaying, without_decay) for p in group["params"]}
    assert grouped == {id(p) for p in model.parameters()}


def test_frozen_parameters_are_in_no_group() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert parameter_groups(model, 0.1)[1]["params"] == []


def test_weight_decay_changes_only_weights() -> None:
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


def shares(steps: int, **settings: object) -> list[float]:
    chosen = TrainingSettings(**{"epochs": 10, "warmup_epochs": 1.0, **settings})
    return [learning_rate_share(chosen, step, 10) for step in range(steps)]


def test_the_cosine_schedule_warms_up_and_falls_to_zero() -> None:
    rates = shares(101)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0)
    assert rates[55] == pytest.approx(0.5)
    assert shares(1, warmup_epochs=0.0) == [1]


def test_other_schedules() -> None:
    steps = shares(100, schedule="step", milestones=(5, 8), decay=0.1, warmup_epochs=0.0)
    assert (steps[49], steps[50], steps[79]) == (1, 0.1, 0.1)
    assert steps[80] == pytest.approx(0.01)
    polynomial = shares(101, schedule="polynomial", power=2.0, warmup_epochs=0.0)
    assert polynomial[50] == pytest.approx(0.25)
    assert polynomial[100] == 0
    assert set(shares(100, schedule="constant", warmup_epochs=0.0)) == {1}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)],
)
def test_optimizers_by_name(name: str, kind: type[torch.optim.Optimizer]) -> None:
    settings = TrainingSettings(epochs=1, optimizer=name, momentum=0.8, learning_rate=0.3)  # type: ignore[arg-type]
    optimizer = build_optimizer(nn.Linear(2, 2), settings)
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer.param_groups[0].get("momentum", 0.8) == 0.8


def test_tolerances_are_interpolated_logarithmically() -> None:
    settings = TrainingSettings(epochs=3, tolerance=1e-1, final_tolerance=1e-3)
    assert [settings.tolerance_in(epoch) for epoch in (1, 2, 3)] == pytest.approx(
        [1e-1, 1e-2, 1e-3]
    )
    assert TrainingSettings(epochs=3, tolerance=0.5).tolerance_in(3) == 0.5
    assert TrainingSettings(epochs=3).tolerance_in(1) == 1e-2
    assert TrainingSettings(epochs=3, tolerance=None).tolerance_in(1) is None


@pytest.mark.parametrize(
    "invalid",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"clip_norm": -1.0},
        {"weight_decay": -0.1},
        {"warmup_epochs": -1.0},
        {"accumulate": 0},
        {"momentum": 1.0},
        {"optimizer": "rmsprop"},
        {"schedule": "linear"},
        {"milestones": (), "schedule": "step"},
        {"tolerance": 0.0},
        {"final_tolerance": 1e-3, "tolerance": None},
        {"gradient": "exact"},
    ],
)
def test_invalid_settings_raise(invalid: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(invalid))):
        TrainingSettings(**{"epochs": 1, **invalid})
