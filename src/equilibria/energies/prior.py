"""What a feature regularizer is: a prior R(z) with its gradient and, at best, its prox."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class Regularizer(ABC):
    """A prior R(z) on the feature z.

    A regularizer is a value: frozen, without parameters. `step` is how it enters a fixed-point map
    (Theorem 4): the proximal operator where there is one, else a gradient step z − γ∇R(z).
    """

    couples_batch: ClassVar[bool] = False
    """Whether R relates the samples of a batch to each other: inference then depends on it."""
    convex: ClassVar[bool] = True
    """Without convexity an equilibrium is only stationary for the objective with R."""

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """R(z) of each sample; one number where R couples the batch."""

    @abstractmethod
    def gradient(self, z: Tensor) -> Tensor:
        """∇R(z)."""

    def proximal(self, z: Tensor, gamma: float) -> Tensor | None:
        """argmin_u γR(u) + ½‖u − z‖², or None where it has no closed form."""
        return None

    def step(self, z: Tensor, gamma: float) -> Tensor:
        """T_R(z): the proximal operator, or a gradient step."""
        proximal = self.proximal(z, gamma)
        return z - gamma * self.gradient(z) if proximal is None else proximal
