"""Equilibria: networks whose output is the minimizer of an explicit hidden objective.

These are the names that most programs need; the rest is in the rooms, as `eq.energies.L1`,
`eq.solvers.SAM` or `eq.operators.SeparableConv2d`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any
from warnings import warn

if TYPE_CHECKING:
    # For type checkers; a program imports a name when it first uses it, and torch with it.
    from equilibria import activations as activations
    from equilibria import context as context
    from equilibria import data as data
    from equilibria import energies as energies
    from equilibria import equilibrium as equilibrium
    from equilibria import exports as exports
    from equilibria import gradients as gradients
    from equilibria import inputs as inputs
    from equilibria import models as models
    from equilibria import operators as operators
    from equilibria import papers as papers
    from equilibria import plugins as plugins
    from equilibria import registry as registry
    from equilibria import report as report
    from equilibria import restoration as restoration
    from equilibria import serving as serving
    from equilibria import solvers as solvers
    from equilibria import tasks as tasks
    from equilibria import training as training
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
    from equilibria.exports import export
    from equilibria.gradients import Implicit, OneStep, Phantom, Unrolled
    from equilibria.inputs import Box, L2Ball, LinfBall, attack, optimize_input
    from equilibria.models import (
        certify,
        create_model,
        list_models,
        register_model,
    )
    from equilibria.operators import AveragePool, Conv1d, Conv2d, Dense, LinearOperator
    from equilibria.report import explain
    from equilibria.restoration import restore
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

__version__ = "0.2.0"

__all__ = [
    "Accelerated",
    "Anderson",
    "Auto",
    "AveragePool",
    "Box",
    "Broyden",
    "Cell",
    "Context",
    "Conv1d",
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
    "certify",
    "create_model",
    "energy_term",
    "evaluate",
    "explain",
    "export",
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

_LOWER_ROOMS = (
    *(
        "plugins",
        "registry",
        "context",
        "operators",
        "activations",
        "energies",
        "solvers",
        "gradients",
    ),
    *("equilibrium", "models", "inputs", "restoration"),
)
"""From the ground up: a room imports those below it, so that a search loads none in vain."""
_ROOMS = (
    *_LOWER_ROOMS,
    "tasks",
    "data",
    "training",
    "exports",
    "report",
    "serving",
    "papers",
    "cli",
)
_RENAMED = {
    "FeatureRegulariser": "FeatureRegularizer",
    "Regulariser": "Regularizer",
    "get_adjoint": "get_gradient",
    "list_adjoints": "list_gradients",
    "register_adjoint": "register_gradient",
}


def __getattr__(name: str) -> Any:
    """Rooms and names, imported when they are first used, and names of before version 0.2.

    Most of the latter are in their rooms alone now.
    """
    if name in _ROOMS:
        return import_module(f"equilibria.{name}")
    present = _RENAMED.get(name, name)
    rooms = _ROOMS if present in __all__ else _LOWER_ROOMS
    for room in () if name.startswith("_") else rooms:
        module = import_module(f"equilibria.{room}")
        if present in getattr(module, "__all__", ()):
            break
    else:
        raise AttributeError(f"module 'equilibria' has no attribute {name!r}")
    if name in __all__:
        globals()[name] = getattr(module, name)
    else:
        place = "equilibria" if present in __all__ else module.__name__
        warn(
            f"equilibria.{name} is now {place}.{present}; the old name works until version 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
    return getattr(module, present)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
