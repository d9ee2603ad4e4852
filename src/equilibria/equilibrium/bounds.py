"""Lipschitz constants of a fixed-point map."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from equilibria.energies.bounds import Given

N = TypeVar("N")


class StepBounds(Generic[N]):
    """Bounds on the Lipschitz constants of a cell's `step`. None means "not known".

    A number is a float, a scalar tensor, or a tensor with one entry per sample. A function in place
    of a number is called on first access.

    Args:
        contraction: Upper bound q on the Lipschitz constant in the state. For q < 1 the
            equilibrium is unique.
        input: Upper bound on the Lipschitz constant in the input, at any state.

    Examples:
        >>> cell = eq.EnergyCell(eq.Quadratic(eq.Dense(2, 2, norm="bound", zeta=0.5)))
        >>> cell.limits.contraction
        0.25
    """

    def __init__(self, contraction: Given[N] = None, input: Given[N] = None) -> None:
        self._contraction: Any = contraction
        self._input: Any = input

    @property
    def contraction(self) -> N | None:
        """Upper bound on the Lipschitz constant of the cell's step in the state."""
        if callable(self._contraction):
            self._contraction = self._contraction()
        return self._contraction  # type: ignore[no-any-return]

    @property
    def input(self) -> N | None:
        """Upper bound on the Lipschitz constant of the cell's step in the input."""
        if callable(self._input):
            self._input = self._input()
        return self._input  # type: ignore[no-any-return]
