"""Advice for solves that failed."""

from __future__ import annotations

import torch

from equilibria.context import Context, State
from equilibria.energies import curvature
from equilibria.energies.compose import Sum
from equilibria.equilibrium.cell import Cell
from equilibria.equilibrium.energy_cell import EnergyCell
from equilibria.gradients.capabilities import described


class Diagnosis:
    """Remedy for a failed solve, computed on first access.

    Computing it takes several evaluations of the map with a graph. State and context are released
    afterwards.

    Args:
        cell: Cell that was solved.
        state: Final state of the solve.
        context: Tensors that the map read besides the state in the last evaluation.
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
        # Copies and pickles of a solution must not contain the cell.
        return {"_solve": None, "_text": self._text}


def diagnose(cell: Cell, state: State, context: Context) -> str:
    """Return advice for a solve that ended at `state` without converging.

    Plain steps on an energy contract where its Hessian has a norm below 1. If the curvature of a
    term exceeds 1, the result names the term and its curvature. Otherwise, and for cells that
    replace `step`, it is the cell's `remedy`.

    Args:
        cell: Cell that was solved.
        state: Final state of the solve.
        context: Tensors that the map read besides the state in the last evaluation.

    Returns:
        A short remedy; empty if nothing is known.
    """
    if not isinstance(cell, EnergyCell) or described(cell, "linearize") is None:
        return cell.remedy
    name, steepness = _steepest_term(cell, state, context)
    if not abs(steepness) > 1:
        return cell.remedy
    prefix = f"{cell.remedy}, or " if cell.remedy else ""
    cause = f"the term {name!r} has a curvature of about {steepness:.3g}"
    if steepness < 0:
        return (
            f"{prefix}bound the norm of W (norm='bound'): {cause}, and below −1 the objective is "
            "not convex"
        )
    return (
        f"{prefix}use solver='auto', which minimizes the objective where plain steps fail, or "
        f"raise its max_iterations: {cause}, and plain steps need a total below 1"
    )


def _steepest_term(cell: EnergyCell, state: State, context: Context) -> tuple[str, float]:
    """Return the name and curvature of the term whose curvature has the largest magnitude."""
    energy = cell.energy
    parts = (
        [(name, term, context.parts[name]) for name, term in energy.named_terms()]
        if isinstance(energy, Sum)
        else [(energy.name, energy, context)]
    )
    curvatures = {name: curvature(term, state, part) for name, term, part in parts}
    steepest = max(curvatures, key=lambda name: abs(curvatures[name]))
    return steepest, curvatures[steepest]
