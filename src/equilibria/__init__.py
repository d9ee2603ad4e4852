"""Equilibria: networks whose output is the minimizer of an explicit hidden objective.

These are the names that most programs need; the rest is in the rooms, as `eq.energies.L1`,
`eq.solvers.SAM` or `eq.operators.SeparableConv2d`.
"""

from importlib import import_module
from typing import Any
from warnings import warn

from equilibria.context import Context, State
from equilibria.energies import (
    Energy,
    FeatureRegularizer,
    GaussianKernel,
    Input,
    Quadratic,
    energy_term,
)
from equilibria.equilibrium import (
    Cell,
    EnergyCell,
    EquilibriumLayer,
    Solving,
    fixed_point,
    solving,
)
from equilibria.gradients import Implicit, OneStep, Phantom, Unrolled
from equilibria.inputs import Box, L2Ball, LinfBall, attack, optimize_input, restore
from equilibria.models import create_model, list_models, register_model
from equilibria.operators import AveragePool, Conv2d, Dense, LinearOperator
from equilibria.solvers import (
    Accelerated,
    Anderson,
    Auto,
    Broyden,
    ConvergenceError,
    ConvergenceWarning,
    Picard,
    Solution,
    Status,
)
from equilibria.training import evaluate, load, predict, train

__version__ = "0.1.0"

__all__ = [
    "Accelerated",
    "Anderson",
    "Auto",
    "AveragePool",
    "Box",
    "Broyden",
    "Cell",
    "Context",
    "Conv2d",
    "ConvergenceError",
    "ConvergenceWarning",
    "Dense",
    "Energy",
    "EnergyCell",
    "EquilibriumLayer",
    "FeatureRegularizer",
    "GaussianKernel",
    "Implicit",
    "Input",
    "L2Ball",
    "LinearOperator",
    "LinfBall",
    "OneStep",
    "Phantom",
    "Picard",
    "Quadratic",
    "Solution",
    "Solving",
    "State",
    "Status",
    "Unrolled",
    "__version__",
    "attack",
    "create_model",
    "energy_term",
    "evaluate",
    "fixed_point",
    "list_models",
    "load",
    "optimize_input",
    "predict",
    "register_model",
    "restore",
    "solving",
    "train",
]

_ROOMS = (
    "activations",
    "energies",
    "equilibrium",
    "gradients",
    "inputs",
    "models",
    "operators",
    "solvers",
)
_RENAMED = {
    "FeatureRegulariser": "FeatureRegularizer",
    "Regulariser": "Regularizer",
    "get_adjoint": "get_gradient",
    "list_adjoints": "list_gradients",
    "register_adjoint": "register_gradient",
}


def __getattr__(name: str) -> Any:
    """Names of before version 0.2, most of which are in their rooms alone now."""
    present = _RENAMED.get(name, name)
    for room in ("", *_ROOMS):
        place = f"equilibria.{room}".rstrip(".")
        module = import_module(place)
        if present in module.__all__:
            warn(
                f"equilibria.{name} is now {place}.{present}; the old name works until version 0.3",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(module, present)
    raise AttributeError(f"module 'equilibria' has no attribute {name!r}")
