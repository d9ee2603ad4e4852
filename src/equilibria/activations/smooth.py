"""Smooth activations. If σ saturates, f has an infinite slope at the end of its domain."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from equilibria.activations.base import Activation, register_activation
from equilibria.activations.dilogarithm import dilogarithm_exp, softplus, softplus_primitive
from equilibria.context.state import at_least_float32


@dataclass(frozen=True)
class SmoothActivation(Activation):
    """Base class of smooth activations σ, which have an inverse on an open interval.

    The penalty f, with σ = prox_f, has the derivative f′(y) = σ⁻¹(y) − y. σ does not reach the ends
    of the interval, but its rounded value does: tanh(50) is 1. There ∂f is defined as the half line
    that starts at f′ of the nearest number inside, so that a saturated state counts as stationary
    if a point that rounds to it is.
    """

    lower: ClassVar[float] = -math.inf
    upper: ClassVar[float] = math.inf

    @abstractmethod
    def penalty_derivative(self, y: Tensor) -> Tensor:
        """Return the derivative f′(y) of the penalty f, with σ = prox_f, for y inside the domain.

        Args:
            y: State, of any shape.
        """

    def minimal_subgradient(self, y: Tensor, gradient: Tensor) -> Tensor:
        low, high = _nearest_inside(self.lower, self.upper, y.dtype)
        inside = torch.where(
            y <= self.lower, low, torch.where(y >= self.upper, high, at_least_float32(y))
        )
        result = at_least_float32(gradient) + self.penalty_derivative(inside)
        result = torch.where(y <= self.lower, result.clamp(max=0), result)
        result = torch.where(y >= self.upper, result.clamp(min=0), result)
        outside = (y < self.lower) | (y > self.upper)
        return torch.where(outside, math.inf, result).to(gradient.dtype)


@register_activation
@dataclass(frozen=True)
class Tanh(SmoothActivation):
    """Tanh: σ = tanh, with primitive S = log cosh.

    The conjugate is S*(y) = ½[(1+y) log(1+y) + (1−y) log(1−y)] on [−1, 1].

    Examples:
        >>> eq.activations.Tanh().penalty(torch.tensor([0.0, 2.0]))  # f of tanh = prox_f
        tensor([0., inf])
    """

    name: ClassVar[str] = "tanh"
    lower: ClassVar[float] = -1.0
    upper: ClassVar[float] = 1.0

    def __call__(self, a: Tensor) -> Tensor:
        return torch.tanh(a)

    def derivative(self, a: Tensor) -> Tensor:
        return 1 - torch.tanh(a).square()

    def primitive(self, a: Tensor) -> Tensor:
        wide = at_least_float32(a)
        return (wide - logsigmoid(2 * wide) - math.log(2)).to(a.dtype)

    def penalty(self, y: Tensor) -> Tensor:
        wide = at_least_float32(y)
        return ((_xlogx(1 + wide) + _xlogx(1 - wide) - wide.square()) / 2).to(y.dtype)

    def penalty_derivative(self, y: Tensor) -> Tensor:
        return torch.atanh(y) - y


@register_activation
@dataclass(frozen=True)
class Sigmoid(SmoothActivation):
    """Sigmoid: σ(a) = 1/(1+e⁻ᵃ), with primitive S(a) = log(1+eᵃ) − log 2.

    The conjugate is S*(y) = y log y + (1−y) log(1−y) + log 2.

    Examples:
        >>> eq.activations.Sigmoid()(torch.tensor([0.0]))
        tensor([0.5000])
    """

    name: ClassVar[str] = "sigmoid"
    lower: ClassVar[float] = 0.0
    upper: ClassVar[float] = 1.0
    lipschitz: ClassVar[float] = 0.25

    def __call__(self, a: Tensor) -> Tensor:
        return torch.sigmoid(a)

    def derivative(self, a: Tensor) -> Tensor:
        y = torch.sigmoid(a)
        return y * (1 - y)

    def primitive(self, a: Tensor) -> Tensor:
        return (softplus(at_least_float32(a)) - math.log(2)).to(a.dtype)

    def penalty(self, y: Tensor) -> Tensor:
        wide = at_least_float32(y)
        return (math.log(2) + _xlogx(wide) + _xlogx(1 - wide) - wide.square() / 2).to(y.dtype)

    def penalty_derivative(self, y: Tensor) -> Tensor:
        return torch.logit(y) - y


@register_activation
@dataclass(frozen=True)
class Softplus(SmoothActivation):
    """Softplus: σ(a) = log(1 + eᵃ), with primitive −Li₂(−eᵃ) − π²/12, Li₂ the dilogarithm.

    It is prox_f with f(y) = Li₂(e⁻ʸ) − π²/12 on y ≥ 0.

    Examples:
        >>> eq.activations.Softplus()(torch.tensor([0.0]))  # ln 2
        tensor([0.6931])
    """

    name: ClassVar[str] = "softplus"
    lower: ClassVar[float] = 0.0

    def __call__(self, a: Tensor) -> Tensor:
        return softplus(a)

    def derivative(self, a: Tensor) -> Tensor:
        return torch.sigmoid(a)

    def primitive(self, a: Tensor) -> Tensor:
        return softplus_primitive(at_least_float32(a)).to(a.dtype)

    def penalty(self, y: Tensor) -> Tensor:
        value = dilogarithm_exp(at_least_float32(y).clamp(min=0)) - math.pi**2 / 12
        return torch.where(y < 0, math.inf, value).to(y.dtype)

    def penalty_derivative(self, y: Tensor) -> Tensor:
        return torch.log(-torch.expm1(-y))


def _xlogx(x: Tensor) -> Tensor:
    """Return x log x: 0 at x = 0, +∞ at x < 0."""
    entropy: Tensor = torch.special.entr(x)
    return -entropy


def _nearest_inside(lower: float, upper: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the normal numbers of `dtype` inside the domain that are nearest to its ends."""
    number = torch.finfo(dtype)
    low = lower + number.tiny if lower == 0 else lower * (1 - number.eps / 2)
    return low, upper * (1 - number.eps / 2)
