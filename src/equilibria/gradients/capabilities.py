"""Optional methods of a cell for gradient rules, with a default for each.

Each function calls the method of that name if the cell has one, and otherwise uses the default.
"""

from __future__ import annotations

from typing import Any

from equilibria.context import Context, State
from equilibria.gradients.base import Linearization, Map, Symmetry


def described(cell: object, name: str) -> Any:
    """Return the member `name` of `cell` that describes its step, or None.

    The result is None if `step` was replaced on the instance, because the other members describe
    the step of the class.
    """
    return None if "step" in vars(cell) else getattr(cell, name, None)


def linearize(cell: Map, state: State, context: Context) -> Linearization:
    """Evaluate a cell's map at a state for a backward solve.

    The result includes the activation's slope S = σ′ for a cell of `Symmetry.WEIGHTED`. A cell can
    define `linearize(state, context)` to compute both in one evaluation.
    """
    method = described(cell, "linearize")
    if method is not None:
        return method(state, context)  # type: ignore[no-any-return]
    weighted = cell.symmetry is Symmetry.WEIGHTED
    weight = symmetry_weight(cell, state, context) if weighted else None
    return Linearization(cell.step(state, context), weight)


def symmetry_weight(cell: Map, state: State, context: Context) -> State:
    """Return the activation's slope S = σ′ ≥ 0 at the pre-activation of a state.

    It weights the inner product of backward solves for a cell of `Symmetry.WEIGHTED`.

    Raises:
        TypeError: If the cell has no `symmetry_weight(state, context)`.
    """
    method = getattr(cell, "symmetry_weight", None)
    if method is None:
        raise TypeError(
            f"{type(cell).__name__} declares Symmetry.WEIGHTED without a symmetry_weight method: "
            "define symmetry_weight(self, state, context), or set symmetry = Symmetry.NONE"
        )
    return method(state, context)  # type: ignore[no-any-return]


def simplify(cell: Map, context: Context) -> Context:
    """Return the tensors that approximate gradient rules differentiate besides the parameters.

    They are those that a step reads besides the state (the context), by default unchanged. A cell
    can define `simplify(context)` to detach some that hardly change the gradient.
    """
    method = described(cell, "simplify")
    return context if method is None else method(context)
