"""Solutions of cells whose equilibrium is a formula."""

from __future__ import annotations

import torch

from equilibria.context import Context, State
from equilibria.context.state import Packing
from equilibria.solvers import Solution
from equilibria.solvers.convergence import final_status
from equilibria.solvers.method import Method

METHOD = "closed form"
"""Name of the solver in a `Solution`."""


@torch.no_grad()
def closed_form_solution(method: Method, state: State, context: Context) -> Solution:
    """Return the solution of an equilibrium that was computed by a formula.

    Residuals are 0, because none is measured; `layer.objective(x).residual(state)` measures one.

    Args:
        method: Solver of the layer, whose tolerance the solution reports.
        state: The equilibrium.
        context: Tensors that the formula read.

    Returns:
        A solution with one iteration per sample. Samples that are not finite have diverged.
    """
    rows = Packing.of(state).pack(state)
    finite = rows.sum(dim=1).isfinite()
    nothing = torch.zeros_like(rows[:, 0])
    return Solution(
        state=state,
        status=final_status(finite, finite),
        residual=nothing,
        absolute_residual=nothing,
        iterations=torch.ones_like(finite, dtype=torch.int64),
        evaluations=1,
        sample_evaluations=len(rows),
        tolerance=method.tolerance,
        solver=METHOD,
        epsilon=torch.finfo(rows.dtype).eps,
        context=context,
    )
