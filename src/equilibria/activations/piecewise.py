"""Piecewise linear activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu, softshrink

from equilibria.activations.base import Activation, register_activation
from equilibria.registry import check_positive


@register_activation
@dataclass(frozen=True)
class ReLU(Activation):
    """ReLU: σ(a) = max(a, 0) = prox_f, f the indicator of {y ≥ 0}, with primitive ½ max(a, 0)².

    Examples:
        >>> eq.activations.ReLU()(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """

    name: ClassVar[str] = "relu"

    def __call__(self, a: Tensor) -> Tensor:
        return torch.relu(a)

    def overwrite(self, a: Tensor) -> Tensor:
        return torch.relu_(a)

    def derivative(self, a: Tensor) -> Tensor:
        return (a > 0).to(a.dtype)

    def primitive(self, a: Tensor) -> Tensor:
        return torch.relu(a).square() / 2

    def penalty(self, y: Tensor) -> Tensor:
        return torch.where(y < 0, math.inf, 0 * y)

    def minimal_subgradient(self, y: Tensor, gradient: Tensor) -> Tensor:
        """Return `gradient` where y > 0 and min(gradient, 0) where y = 0.

        The subdifferential of the penalty, the indicator of {y ≥ 0}, is (−∞, 0] at 0.
        """
        result = torch.where(y == 0, gradient.clamp(max=0), gradient)
        return torch.where(y < 0, math.inf, result)


@register_activation
@dataclass(frozen=True)
class LeakyReLU(Activation):
    """Leaky ReLU: σ(a) = max(a, s·a) = prox_f with f(y) = ½(1/s − 1) min(y, 0)².

    Args:
        slope: Slope s for a < 0, in (0, 1].

    Examples:
        >>> eq.activations.LeakyReLU(slope=0.1)(torch.tensor([-1.0, 2.0]))
        tensor([-0.1000,  2.0000])
    """

    name: ClassVar[str] = "leaky_relu"
    slope: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.slope <= 1:
            raise ValueError(f"slope must be in (0, 1], got {self.slope}; for slope 0 use ReLU")

    def __call__(self, a: Tensor) -> Tensor:
        return leaky_relu(a, self.slope)

    def derivative(self, a: Tensor) -> Tensor:
        return torch.where(a > 0, torch.ones_like(a), self.slope)

    def primitive(self, a: Tensor) -> Tensor:
        return self(a) * a / 2

    def penalty(self, y: Tensor) -> Tensor:
        return y.clamp(max=0).square() * (self._curvature / 2)

    def minimal_subgradient(self, y: Tensor, gradient: Tensor) -> Tensor:
        return gradient + self._curvature * y.clamp(max=0)

    @property
    def _curvature(self) -> float:
        return 1 / self.slope - 1


@register_activation
@dataclass(frozen=True)
class SoftThreshold(Activation):
    """Soft thresholding: σ(a) = sign(a) max(|a| − λ, 0) = prox_f with f(y) = λ|y|.

    Args:
        threshold: Threshold λ > 0.

    Examples:
        >>> eq.activations.SoftThreshold(0.5)(torch.tensor([-1.0, 0.2, 2.0]))
        tensor([-0.5000,  0.0000,  1.5000])
    """

    name: ClassVar[str] = "soft_threshold"
    threshold: float = 0.1

    def __post_init__(self) -> None:
        check_positive(threshold=self.threshold)

    def __call__(self, a: Tensor) -> Tensor:
        return softshrink(a, self.threshold)

    def derivative(self, a: Tensor) -> Tensor:
        return (a.abs() > self.threshold).to(a.dtype)

    def primitive(self, a: Tensor) -> Tensor:
        return self(a).square() / 2

    def penalty(self, y: Tensor) -> Tensor:
        return self.threshold * y.abs()

    def minimal_subgradient(self, y: Tensor, gradient: Tensor) -> Tensor:
        """Return gradient + λ sign(y) where y ≠ 0, and σ(gradient) where y = 0.

        The subdifferential of the penalty λ|y|, λ the threshold, is [−λ, λ] at 0.
        """
        return torch.where(y == 0, self(gradient), gradient + self.threshold * y.sign())


@register_activation
@dataclass(frozen=True)
class IdentityActivation(Activation):
    """Identity: σ(a) = a, with penalty 0 and primitive ½a²; the equilibrium is linear.

    Examples:
        >>> eq.activations.IdentityActivation()(torch.tensor([-1.0, 2.0]))
        tensor([-1.,  2.])
    """

    name: ClassVar[str] = "identity"

    def __call__(self, a: Tensor) -> Tensor:
        return a

    def derivative(self, a: Tensor) -> Tensor:
        return torch.ones_like(a)

    def primitive(self, a: Tensor) -> Tensor:
        return a.square() / 2

    def penalty(self, y: Tensor) -> Tensor:
        return 0 * y

    def minimal_subgradient(self, y: Tensor, gradient: Tensor) -> Tensor:
        return gradient
