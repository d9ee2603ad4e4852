"""Solvers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from equilibria.registry import Registry
from equilibria.solvers.accelerated import Accelerated
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.anderson_type_one import AndersonTypeOne
from equilibria.solvers.auto import Auto
from equilibria.solvers.base import Solver
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.picard import Picard

_solvers: Registry[Solver[Any]] = Registry("solver")
_solvers.register("picard", Picard)
_solvers.register("accelerated", Accelerated)
_solvers.register("anderson", Anderson)
_solvers.register("anderson1", AndersonTypeOne)
_solvers.register("broyden", Broyden)
_solvers.register("auto", Auto)


def register_solver(
    name: str, factory: Callable[..., Solver[Any]], *, replace: bool = False
) -> None:
    """Make a solver available by name; `factory` takes the solver's options as keywords."""
    _solvers.register(name, factory, replace=replace)


def list_solvers() -> list[str]:
    return _solvers.names()


def get_solver(solver: str | Solver[Any], **options: Any) -> Solver[Any]:
    """The solver called by a name, with options; a solver passes through."""
    if isinstance(solver, Solver):
        return solver
    return _solvers.create(solver, **options)
