"""Facts about a map that gradient rules use beyond its step: one function for each.

Each function uses the method of that name if the cell has one, and else a correct default.
"""

from __future__ import annotations

from typing import Any

from equilibria.context import Context, State
from equilibria.gradients.base import Linearization, Map, Symmetry


def described(cell: object, name: str) -> Any:
    """Return the member of `cell` that describes its step under this name, or None.

    A cell whose `step` was replaced on the instance has none: its methods describe the step of its
    class.
    """
    return None if "step" in vars(cell) else getattr(cell, name, None)


def linearize(cell: Map, state: State, context: Context) -> Linearization:
    """Evaluate T(y; x) for a backward solve, with S for `Symmetry.WEIGHTED`.

    A cell may define `linearize(state, context)` where both come out of one evaluation.
    """
    own = described(cell, "linearize")
    if own is not None:
        return own(state, context)  # type: ignore[no-any-return]
    weighted = cell.symmetry is Symmetry.WEIGHTED
    weight = symmetry_weight(cell, state, context) if weighted else None
    return Linearization(cell.step(state, context), weight)


def symmetry_weight(cell: Map, state: State, context: Context) -> State:
    """Return S = σ′(pre-activation) ≥ 0 of a cell of `Symmetry.WEIGHTED`.

    Raises:
        TypeError: If the cell has no `symmetry_weight(state, context)`.
    """
    own = getattr(cell, "symmetry_weight", None)
    if own is None:
        raise TypeError(
            f"{type(cell).__name__} states Symmetry.WEIGHTED without a symmetry_weight method: "
            "define symmetry_weight(self, state, context), or state Symmetry.NONE"
        )
    return own(state, context)  # type: ignore[no-any-return]


def simplify(cell: Map, context: Context) -> Context:
    """Return the context for approximate gradient rules; by default as it is.

    A cell may define `simplify(context)` and detach what hardly changes a gradient.
    """
    own = described(cell, "simplify")
    return context if own is None else own(context)
