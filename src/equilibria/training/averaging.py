"""Moving average of the weights of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Exponential moving average of the trained parameters of a model.

    In update n the decay is min(decay, (1 + n)/(10 + n)), so that the first weights are forgotten.

    Args:
        model: The model.
        decay: Decay in [0, 1); with 0 the average is the last weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = [p for p in model.parameters() if p.requires_grad] if decay else []
        self.values = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the current weights.

        Args:
            step: Number of the step, from 1.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value.lerp_(parameter.detach(), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[list[Tensor]]:
        """Put the average into the model for a `with` block; yields the weights of the model."""
        trained = [parameter.detach().clone() for parameter in self.parameters]
        self.store(self.values)
        try:
            yield trained
        finally:
            self.store(trained)

    @torch.no_grad()
    def store(self, values: Sequence[Tensor]) -> None:
        """Write values into the parameters of the model."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
