"""What to do about a solve that failed."""

from __future__ import annotations

import torch

from equilibria.context import Context, State
from equilibria.energies import curvature
from equilibria.energies.compose import Sum
from equilibria.equilibrium.cell import Cell
from equilibria.equilibrium.energy_cell import EnergyCell
from equilibria.gradients.capabilities import described


class Diagnosis:
    """The remedy for one failed solve, computed when it is first read.

    The computation costs several evaluations of the map with a graph, which most failures need
    not pay. The state and the context are released afterwards.

    Args:
        cell: Cell that was solved.
        state: State that the solve ended at.
        context: Context of the last evaluation.
    """

    def __init__(self, cell: Cell, state: State, context: Context) -> None:
        self._solve: tuple[Cell, State, Context] | None = (cell, state, context)
        self._text = ""

    def __call__(self) -> str:
        """Return the remedy; empty if nothing is known."""
        if self._solve is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._text, self._solve = diagnose(*self._solve), None
        return self._text

    def __getstate__(self) -> dict[str, object]:
        # A copy or a pickle of a solution holds no second cell.
        return {"_solve": None, "_text": self._text}


def diagnose(cell: Cell, state: State, context: Context) -> str:
    """Return what to do about a solve that ended at `state`.

    Plain steps on an energy contract where ‖∇²E‖ < 1: if a term is steeper than that, the result
    names the term and its curvature. Otherwise it is the cell's own `remedy`, as it is for a cell
    that replaces `step`, about which the terms say nothing.

    Args:
        cell: Cell that was solved.
        state: State that the solve ended at.
        context: Context of the last evaluation.

    Returns:
        The remedy in a few words; empty if nothing is known.
    """
    if not isinstance(cell, EnergyCell) or described(cell, "linearize") is None:
        return cell.remedy
    name, steepness = _steepest_term(cell, state, context)
    if not abs(steepness) > 1:
        return cell.remedy
    own = f"{cell.remedy}, or " if cell.remedy else ""
    found = f"the term {name!r} has a curvature of about {steepness:.3g}"
    if steepness < 0:
        return (
            f"{own}bound the norm of W (norm='bound'): {found}, and below −1 the objective is not "
            "convex"
        )
    return (
        f"{own}use solver='auto', which descends on the objective where plain steps fail, or raise "
        f"its max_iterations: {found}, and plain steps bear 1 in all"
    )


def _steepest_term(cell: EnergyCell, state: State, context: Context) -> tuple[str, float]:
    """Return the name and the curvature of the term with the curvature largest in size."""
    energy = cell.energy
    parts = (
        [(name, term, context.parts[name]) for name, term in energy.named_terms()]
        if isinstance(energy, Sum)
        else [(energy.name, energy, context)]
    )
    curvatures = {name: curvature(term, state, part) for name, term, part in parts}
    steepest = max(curvatures, key=lambda name: abs(curvatures[name]))
    return steepest, curvatures[steepest]
