"""The optimiser and its learning rate."""

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
    return torch.optim.AdamW(groups, lr=settings.learning_rate)


def warmup_cosine(step: int, *, steps: int, warmup: int) -> float:
    """The share of the full learning rate at a step: up along a line, down along a cosine to 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
