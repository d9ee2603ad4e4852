"""Equilibria as users get it: the default solver and gradient rule of a layer.

One default is off: solves do not test for a minimum, because the peers have no such test. It costs
a few products with the Hessian unless the layer knows that its objective is convex.
"""

from __future__ import annotations

import inspect
from typing import Any

import equilibria as eq
from benchmarks.problems import MAX_ITERATIONS

NAME = "Equilibria"


def default_name(kind: str) -> str:
    """Return the default of a layer for `kind`, "solver" or "gradient"."""
    names = {"solver": eq.solvers.list_solvers, "gradient": eq.gradients.list_gradients}[kind]()
    default = str(inspect.signature(eq.EquilibriumLayer).parameters[kind].default)
    return "auto" if "auto" in names else default


def solver_label(layer: eq.EquilibriumLayer, name: str | None = None) -> str:
    """Name of the solver; for "auto", also the solver that it chose in the last solve."""
    name = name or default_name("solver")
    used = str(getattr(layer.last_solution, "solver", "")).lower()
    return f"{name} → {used}" if name == "auto" and used else name


def gradient_label(layer: eq.EquilibriumLayer) -> str:
    """Name of the gradient rule and method of the last backward solve."""
    used = getattr(layer.last_backward, "method", "")
    return f"{default_name('gradient')} → {used}" if used else default_name("gradient")


def layer(
    cell: eq.Cell,
    *,
    tolerance: float,
    backward_tolerance: float = 1e-5,
    solver: str | None = None,
    **options: Any,
) -> eq.EquilibriumLayer:
    """Return a layer with the default or named solver and the default gradient rule."""
    return eq.EquilibriumLayer(
        cell=cell,
        solver=eq.solvers.get_solver(
            solver or default_name("solver"),
            tolerance=tolerance,
            max_iterations=options.pop("max_iterations", MAX_ITERATIONS),
            check_minimum=False,
        ),
        gradient=eq.gradients.get_gradient(
            default_name("gradient"),
            tolerance=backward_tolerance,
            max_iterations=MAX_ITERATIONS,
        ),
        **options,
    )
