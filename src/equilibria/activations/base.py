"""Base class of activations, which are proximal operators, and the registry of their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar, overload

import torch
from torch import Tensor

from equilibria.registry import Registry

_MAX_NEWTON_STEPS = 100


@dataclass(frozen=True)
class Activation(ABC):
    """Base class of activations: elementwise, non-decreasing and Lipschitz functions σ.

    Such a function is a proximal operator:

        σ = prox_f = (I + ∂f)⁻¹,    f = S* − ½y²,    S(a) = ∫₀ᵃ σ,    S*(y) = sup_a (ay − S(a))

    f is convex if and only if L_σ ≤ 1; S* is always convex. Activations are frozen and hashable,
    and are equal if their class and options are. A subclass with options must be a frozen
    dataclass.

    Examples:
        >>> relu = eq.activations.get_activation("relu")
        >>> a = torch.tensor([-1.0, 2.0])
        >>> relu(a), relu.derivative(a), relu.lipschitz
        (tensor([0., 2.]), tensor([0., 1.]), 1.0)
    """

    name: ClassVar[str]

    @property
    def lipschitz(self) -> float:
        """Lipschitz constant of the activation σ: the smallest L with |σ(a) − σ(b)| ≤ L |a − b|.

        The default is 1.
        """
        return 1.0

    @abstractmethod
    def __call__(self, a: Tensor) -> Tensor:
        """Return σ(a).

        Args:
            a: Pre-activations, of any shape.
        """

    def overwrite(self, a: Tensor) -> Tensor:
        """Return the activation σ(a), computed in place if that is supported.

        Args:
            a: Pre-activations that are no longer needed.
        """
        return self(a)

    @abstractmethod
    def derivative(self, a: Tensor) -> Tensor:
        """Return the slope σ′(a), from 0 to the Lipschitz constant of the activation.

        At a kink it is the value of automatic differentiation.

        Args:
            a: Pre-activations, of any shape.
        """

    @abstractmethod
    def primitive(self, a: Tensor) -> Tensor:
        """Return the primitive S(a) = ∫₀ᵃ σ of the activation σ for every element.

        Args:
            a: Pre-activations, of any shape.
        """

    @abstractmethod
    def penalty(self, y: Tensor) -> Tensor:
        """Return the penalty f(y), with σ = prox_f, for every element; +∞ outside the domain.

        The domain includes its ends.

        Args:
            y: State, of any shape.
        """

    @abstractmethod
    def minimal_subgradient(self, y: Tensor, gradient: Tensor) -> Tensor:
        """Return the element of gradient + ∂f(y) with the smallest norm, f the penalty.

        It is +∞ outside the domain of f. For `gradient` = ∇(½‖y‖² + E)(y), with an energy E, it is
        zero exactly where y is stationary: y = σ(−∇E(y)).

        Args:
            y: State, of any shape.
            gradient: Gradient of the smooth part at y, of the same shape.
        """

    def prox_argument(self, v: Tensor, step: Tensor) -> Tensor:
        """Return a with s·a + (1−s)σ(a) = v, so that σ(a) = prox_{sf}(v), f the penalty.

        Computed by Newton's method in a bracket of the solution, which is bisected where Newton's
        step leaves it.

        Args:
            v: Argument of the proximal operator.
            step: Step size s in (0, 1], of a shape that broadcasts to `v`.
        """
        a = v
        excess = step * a + (1 - step) * self(a) - v
        reach = excess.abs() / step
        low, high = a - reach, a + reach
        precision = 4 * torch.finfo(v.dtype).eps
        for _ in range(_MAX_NEWTON_STEPS):
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
        """Return S*(y) = f(y) + ½y², the convex conjugate of the primitive, for every element.

        It is +∞ outside the domain of the penalty f.

        Args:
            y: State, of any shape.
        """
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
    """Register an activation class by name; a decorator, with or without arguments.

    Args:
        target: The class, if used without arguments. Otherwise a name for a class without the
            attribute `name`; by default the class's `name`.
        replace: Whether to replace an activation of the same name.

    Returns:
        The class, or a decorator.

    Raises:
        ValueError: If the name is taken or missing, or differs from the class's `name`.

    Examples:
        >>> @eq.activations.register_activation
        ... class Mine(eq.activations.ReLU):
        ...     name = "mine"
        >>> eq.activations.get_activation("mine")(torch.tensor([-1.0]))
        tensor([0.])
    """

    def register(cls: type[A]) -> type[A]:
        declared: str | None = getattr(cls, "name", None)
        name = target if isinstance(target, str) else declared
        if name is None:
            raise ValueError(f"{cls.__name__} needs a name: set the class attribute `name`")
        if declared is not None and name != declared:
            raise ValueError(
                f"{cls.__name__} has the name {declared!r} and cannot be registered as {name!r}: "
                "change its attribute `name`"
            )
        _ACTIVATIONS.register(name, cls, replace=replace)
        cls.name = name
        return cls

    return register(target) if isinstance(target, type) else register


get_activation = _ACTIVATIONS.resolve
list_activations = _ACTIVATIONS.names
