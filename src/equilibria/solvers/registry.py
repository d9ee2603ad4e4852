"""Solvers by name."""

from __future__ import annotations

from typing import Any

from equilibria.registry import Registry
from equilibria.solvers.accelerated import Accelerated
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.anderson_type_one import AndersonTypeOne
from equilibria.solvers.auto import Auto
from equilibria.solvers.base import Solver
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.picard import Picard
from equilibria.solvers.sam import SAM

_solvers: Registry[Solver[Any]] = Registry(
    "solver",
    Solver,
    {
        "picard": Picard,
        "accelerated": Accelerated,
        "anderson": Anderson,
        "anderson1": AndersonTypeOne,
        "broyden": Broyden,
        "sam": SAM,
        "auto": Auto,
    },
)
register_solver = _solvers.register
list_solvers = _solvers.names
get_solver = _solvers.resolve
