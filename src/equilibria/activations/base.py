"""What an activation is to an equilibrium network: a proximal operator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Activation(ABC):
    """An elementwise, non-decreasing, Lipschitz σ, which makes it a proximal operator.

        σ = prox_f = (I + ∂f)⁻¹,    f = S* − ½y²,    S(a) = ∫₀ᵃ σ,    S*(y) = sup_a (ay − S(a))

    f is convex if and only if L_σ ≤ 1; S* is always convex. An activation is a value: frozen,
    hashable, equal to another of the same class and options. A subclass with options is itself a
    frozen dataclass.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def lipschitz(self) -> float:
        """L_σ, the smallest constant with |σ(a) − σ(b)| ≤ L_σ |a − b|."""

    @abstractmethod
    def __call__(self, a: Tensor) -> Tensor:
        """σ(a)."""

    @abstractmethod
    def derivative(self, a: Tensor) -> Tensor:
        """σ′(a), in [0, L_σ]; at a kink the value that automatic differentiation takes."""

    @abstractmethod
    def primitive(self, a: Tensor) -> Tensor:
        """S(a) = ∫₀ᵃ σ."""

    @abstractmethod
    def penalty(self, y: Tensor) -> Tensor:
        """f(y) of every element, +∞ outside the (closed) domain."""

    @abstractmethod
    def minimal_subgradient(self, y: Tensor, gradient: Tensor) -> Tensor:
        """The element of least norm of gradient + ∂f(y), +∞ outside the domain.

        With `gradient` = ∇(½‖y‖² + E)(y) it vanishes exactly where y is stationary, that is where
        y = σ(−∇E(y)).
        """

    def conjugate(self, y: Tensor) -> Tensor:
        """S*(y) = f(y) + ½y² of every element, +∞ outside the domain."""
        return self.penalty(y) + y.square() / 2
