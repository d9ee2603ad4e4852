"""The two spaces that OptEq can be iterated in."""

from __future__ import annotations

from typing import Any, Literal

from equilibria.equilibrium import Cell
from equilibria.models.opteq.cells import DeepOptEqCell, OptEqCell, UnitLayer
from equilibria.operators import LinearOperator


def optimal_space(channels: int, width: int) -> Literal["y", "z"]:
    """The smaller of the two spaces: y has the middle width, z the channels of the feature."""
    return "z" if width > channels else "y"


def opteq_cell(
    W: LinearOperator, U: LinearOperator, *, space: Literal["y", "z"] = "y", **options: Any
) -> Cell:
    """OptEq's cell in the space where it is iterated; both have the same feature z*.

    Its options are those of `OptEqCell`.

    Examples:
        >>> W, U = eq.Dense(3, 4, norm="bound"), eq.Dense(2, 4)
        >>> from equilibria.models.opteq.spaces import opteq_cell
        >>> in_y, in_z = (opteq_cell(W, U, space=space) for space in ("y", "z"))
        >>> features = [eq.EquilibriumLayer(cell=cell)(torch.ones(1, 2)) for cell in (in_y, in_z)]
        >>> torch.allclose(*features, atol=1e-3)
        True
    """
    if space == "y":
        return OptEqCell(W, U, **options)
    return DeepOptEqCell([UnitLayer(W, U, **options)])
