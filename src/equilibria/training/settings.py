"""The numbers that a training run depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """AdamW with a linear warm-up, then a cosine down to zero.

    clip_norm: the largest norm of the gradient; longer ones are scaled down to it.
    seed: of the order of samples and of augmentation. The model's initial weights come from torch's
        own generator: call `torch.manual_seed` before making the model.
    """

    epochs: int
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    warmup_epochs: float = 1.0
    clip_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number, not {value}")
        for name in ("weight_decay", "warmup_epochs"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
