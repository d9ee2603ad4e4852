"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from equilibria.training.settings import TrainingSettings


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights decay; biases, scales and other parameters of at most one dimension do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    groups = parameter_groups(model, settings.weight_decay)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            groups,
            lr=settings.learning_rate,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
        )
    if settings.optimizer == "adam":
        return torch.optim.Adam(groups, lr=settings.learning_rate)
    return torch.optim.AdamW(groups, lr=settings.learning_rate)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, settings: TrainingSettings, step: int, steps_per_epoch: int
) -> float:
    """Set the learning rate for a step of the optimizer, the first being 0, and return it."""
    rate = settings.learning_rate * learning_rate_share(settings, step, steps_per_epoch)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def learning_rate_share(settings: TrainingSettings, step: int, steps_per_epoch: int) -> float:
    """The share of the full learning rate at a step, the first being 0."""
    steps = settings.epochs * steps_per_epoch
    warmup = round(settings.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    if settings.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if settings.schedule == "polynomial":
        return float((1 - progress) ** settings.power)
    if settings.schedule == "step":
        epoch = step // steps_per_epoch
        return float(settings.decay ** sum(epoch >= milestone for milestone in settings.milestones))
    return 1.0
