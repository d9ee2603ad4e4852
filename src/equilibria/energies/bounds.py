"""Bounds on the derivatives of an energy term, which add and scale like the term."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

N = TypeVar("N")
"""Number type of a bound: float for bounds by construction, Tensor for computed ones."""
P = TypeVar("P")


class UnitBound(NamedTuple):
    """Row norms per unit of a quadratic energy E with −∇²E = WWᵀ and ∇E linear in the input x.

    The shapes of the tensors broadcast with the state.
    """

    input: Tensor
    """Norm of each unit's row of the derivative with respect to x."""
    state: Tensor
    """Norm of each unit's row of W."""


Given: TypeAlias = N | Callable[[], N | None] | None
"""A number, a function that computes it on first access, or None for "not known"."""


class Bounds(Generic[N]):
    """Bounds on the derivatives of an energy E(y; x) at every state y. None means "not known".

    Bounds of a sum are the sum of the bounds, and bounds of a multiple are the multiple:
    `a.bounds(...) + b.bounds(...)`, `bounds * factor`.

    A number is a float, a scalar tensor, or a tensor with one entry per sample if the bound depends
    on the input. A function in place of a number is called on first access, so that unused norms
    are never computed.

    Args:
        curvature: Upper bound on ‖∇²E‖.
        concavity: Upper bound on the eigenvalues of −∇²E, 0 for a convex energy; by default equal
            to `curvature`. With an activation of Lipschitz constant at most 1 the hidden objective
            1ᵀf(y) + ½‖y‖² + E(y; x) is (1 − concavity)-strongly convex.
        input: Upper bound on the Lipschitz constant of ∇E in the input, at any state and input.
        units: One `UnitBound` per tensor of the state, for quadratic energies.

    Examples:
        >>> bounds = 0.5 * eq.energies.Bounds(2.0, concavity=0.0)
        >>> bounds.curvature, bounds.concavity, bounds.input
        (1.0, 0.0, None)
        >>> (bounds * -1).concavity  # a negative multiple of a convex energy is concave
        1.0
    """

    def __init__(
        self,
        curvature: Given[N] = None,
        concavity: Given[N] = None,
        input: Given[N] = None,
        units: Given[Sequence[UnitBound]] = None,
    ) -> None:
        self._curvature: Any = curvature
        self._concavity: Any = concavity
        if concavity is None:
            self._concavity = (lambda: self.curvature) if callable(curvature) else curvature
        self._input: Any = input
        self._units: Any = units

    @property
    def curvature(self) -> N | None:
        """Upper bound on ‖∇²E‖, the norm of the energy's Hessian in the state."""
        if callable(self._curvature):
            self._curvature = self._curvature()
        return self._curvature  # type: ignore[no-any-return]

    @property
    def concavity(self) -> N | None:
        """Upper bound on the eigenvalues of −∇²E, the energy's negative Hessian in the state."""
        if callable(self._concavity):
            concavity = self._concavity()
            self._concavity = self.curvature if concavity is None else concavity
        return self._concavity  # type: ignore[no-any-return]

    @property
    def input(self) -> N | None:
        """Upper bound on the Lipschitz constant of the energy's gradient ∇E in the input."""
        if callable(self._input):
            self._input = self._input()
        return self._input  # type: ignore[no-any-return]

    @property
    def units(self) -> Sequence[UnitBound] | None:
        """One `UnitBound` per tensor of the state."""
        if callable(self._units):
            self._units = self._units()
        return self._units  # type: ignore[no-any-return]

    def __add__(self, other: Bounds[N]) -> Bounds[N]:
        def units() -> Sequence[UnitBound] | None:
            summands = all_known([self.units, other.units])
            if summands is None:
                return None
            return [
                UnitBound(a.input + b.input, torch.hypot(a.state, b.state))
                for a, b in zip(*summands, strict=True)
            ]

        return Bounds(
            self._joined(other, operator.add, "curvature"),
            self._joined(other, operator.add, "concavity"),
            self._joined(other, operator.add, "input"),
            units,
        )

    def __mul__(self, factor: float | Tensor) -> Bounds[N]:
        def size(name: str) -> Any:
            def scaled() -> Any:
                bound: Any = getattr(self, name)
                return None if bound is None else abs(factor * bound)

            return scaled

        def concavity() -> Any:
            if not factor >= 0:
                return None  # concavity defaults to the curvature
            bound: Any = self.concavity
            return None if bound is None else factor * bound

        def units() -> Sequence[UnitBound] | None:
            number, bounds = float(factor), self.units
            if bounds is None or number < 0:
                return None
            return [UnitBound(number * u.input, math.sqrt(number) * u.state) for u in bounds]

        return Bounds(size("curvature"), concavity, size("input"), units)

    __rmul__ = __mul__

    def beside(self, other: Bounds[N]) -> Bounds[N]:
        """Return bounds of E₁(y₁; x) + E₂(y₂; x), two branches of the state that share x."""

        def units() -> Sequence[UnitBound] | None:
            branches = all_known([self.units, other.units])
            return None if branches is None else [unit for units in branches for unit in units]

        return Bounds(
            self._joined(other, _maximum, "curvature"),
            self._joined(other, _maximum, "concavity"),
            self._joined(other, _hypot, "input"),
            units,
        )

    def __repr__(self) -> str:
        names = ("curvature", "concavity", "input")
        return f"Bounds({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    def _joined(self, other: Bounds[N], join: Callable[[Any, Any], Any], name: str) -> Any:
        """Join one number of both bounds, lazily if either is not computed yet."""

        def joined() -> Any:
            a, b = getattr(self, name), getattr(other, name)
            return None if a is None or b is None else join(a, b)

        is_lazy = callable(getattr(self, f"_{name}")) or callable(getattr(other, f"_{name}"))
        return joined if is_lazy else joined()


def all_known(values: Iterable[P | None]) -> list[P] | None:
    """Return the values as a list, or None if any of them is None."""
    collected = list(values)
    known = [value for value in collected if value is not None]
    return known if len(known) == len(collected) else None


def _maximum(a: Any, b: Any) -> Any:
    return torch.maximum(a, b) if isinstance(a, Tensor) else max(a, b)


def _hypot(a: Any, b: Any) -> Any:
    return torch.hypot(a, b) if isinstance(a, Tensor) else math.hypot(a, b)
