"""What an activation is to an equilibrium network, a proximal operator; activations by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar, overload

import torch
from torch import Tensor

from equilibria.registry import Registry

_MOST_HALVINGS = 100


@dataclass(frozen=True)
class Activation(ABC):
    """An elementwise, non-decreasing, Lipschitz σ, which makes it a proximal operator.

        σ = prox_f = (I + ∂f)⁻¹,    f = S* − ½y²,    S(a) = ∫₀ᵃ σ,    S*(y) = sup_a (ay − S(a))

    f is convex if and only if L_σ ≤ 1; S* is always convex. An activation is a value: frozen,
    hashable, equal to another of the same class and options. A subclass with options is itself a
    frozen dataclass.

    Examples:
        >>> relu = eq.activations.get_activation("relu")
        >>> a = torch.tensor([-1.0, 2.0])
        >>> relu(a), relu.derivative(a), relu.lipschitz
        (tensor([0., 2.]), tensor([0., 1.]), 1.0)
    """

    name: ClassVar[str]

    @property
    def lipschitz(self) -> float:
        """L_σ, the smallest constant with |σ(a) − σ(b)| ≤ L_σ |a − b|: 1, as for most."""
        return 1.0

    @abstractmethod
    def __call__(self, a: Tensor) -> Tensor:
        """σ(a)."""

    def overwrite(self, a: Tensor) -> Tensor:
        """σ(a) where a is of no more use: in its memory, if that is possible."""
        return self(a)

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

    def prox_argument(self, v: Tensor, step: Tensor) -> Tensor:
        """The a with s·a + (1−s)σ(a) = v for a step 0 < s ≤ 1: then σ(a) = prox_{sf}(v).

        The left side rises at least as fast as s·a: Newton's method in a bracket of the solution,
        which is halved where Newton's step leaves it.
        """
        a = v
        excess = step * a + (1 - step) * self(a) - v
        reach = excess.abs() / step
        low, high = a - reach, a + reach
        precision = 4 * torch.finfo(v.dtype).eps
        for _ in range(_MOST_HALVINGS):
            low, high = torch.where(excess <= 0, a, low), torch.where(excess >= 0, a, high)
            newton = a - excess / (step + (1 - step) * self.derivative(a))
            inside = (newton > low) & (newton < high)
            following = torch.where(inside, newton, (low + high) / 2)
            done = bool(((following - a).abs() <= precision * a.abs()).all())
            a = following
            if done:
                break
            excess = step * a + (1 - step) * self(a) - v
        return a

    def conjugate(self, y: Tensor) -> Tensor:
        """S*(y) = f(y) + ½y² of every element, +∞ outside the domain."""
        return self.penalty(y) + y.square() / 2


A = TypeVar("A", bound=Activation)

_ACTIVATIONS: Registry[Activation] = Registry("activation", Activation)


@overload
def register_activation(target: type[A], *, replace: bool = False) -> type[A]: ...


@overload
def register_activation(
    target: str | None = None, *, replace: bool = False
) -> Callable[[type[A]], type[A]]: ...


def register_activation(
    target: type[A] | str | None = None, *, replace: bool = False
) -> type[A] | Callable[[type[A]], type[A]]:
    """Make an activation class available by name: a decorator, with or without arguments.

    The name is the class's own `name`; one given here becomes the class's `name` if it has none.
    A name that is taken is an error unless `replace` is true.

    Examples:
        >>> @eq.activations.register_activation
        ... class Mine(eq.activations.ReLU):
        ...     name = "mine"
        >>> eq.activations.get_activation("mine")(torch.tensor([-1.0]))
        tensor([0.])
    """

    def register(cls: type[A]) -> type[A]:
        own: str | None = getattr(cls, "name", None)
        name = target if isinstance(target, str) else own
        if name is None:
            raise ValueError(f"{cls.__name__} needs a name: set the class attribute `name`")
        if own is not None and name != own:
            raise ValueError(f"{cls.__name__} is called {own!r}, and cannot be {name!r} as well")
        _ACTIVATIONS.register(name, cls, replace=replace)
        cls.name = name
        return cls

    return register(target) if isinstance(target, type) else register


get_activation = _ACTIVATIONS.resolve
list_activations = _ACTIVATIONS.names
