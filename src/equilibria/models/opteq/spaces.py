"""OptEq in y-space and in z-space."""

from __future__ import annotations

from typing import Any, Literal

from equilibria.equilibrium import Cell
from equilibria.models.opteq.cells import DeepOptEqCell, OptEqCell, UnitLayer
from equilibria.operators import LinearOperator


def optimal_space(channels: int, width: int) -> Literal["y", "z"]:
    """Return the space with the smaller state: "y", or "z" for the features z = Wᵀy/μ.

    Args:
        channels: Channels of z.
        width: Channels of y.
    """
    return "z" if width > channels else "y"


def opteq_cell(
    W: LinearOperator, U: LinearOperator, *, space: Literal["y", "z"] = "y", **options: Any
) -> Cell:
    """Build OptEq's cell with the state y, or with the feature z = Wᵀy/μ as its state.

    The feature at the equilibrium is the same.

    Args:
        W: Operator from z to y.
        U: Operator from x to y.
        space: Space of the state, "y" or "z".
        options: Options of `OptEqCell`.

    Examples:
        >>> W, U = eq.Dense(3, 4, norm="bound"), eq.Dense(2, 4)
        >>> from equilibria.models.opteq.spaces import opteq_cell
        >>> cells = [opteq_cell(W, U, space=space) for space in ("y", "z")]
        >>> features = [eq.EquilibriumLayer(cell=cell)(torch.ones(1, 2)) for cell in cells]
        >>> torch.allclose(*features, atol=1e-3)
        True
    """
    if space == "y":
        return OptEqCell(W, U, **options)
    return DeepOptEqCell([UnitLayer(W, U, **options)])
