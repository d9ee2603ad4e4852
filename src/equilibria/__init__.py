"""Equilibria: networks whose output is the minimizer of an explicit hidden objective.

This package contains the most common names. All others are in its subpackages, for example
`eq.energies.L1`, `eq.solvers.SAM` or `eq.operators.SeparableConv2d`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # For type checkers. At run time, names (and torch) are imported when they are first used.
    from equilibria import activations as activations
    from equilibria import analysis as analysis
    from equilibria import certificates as certificates
    from equilibria import compiled as compiled
    from equilibria import context as context
    from equilibria import data as data
    from equilibria import energies as energies
    from equilibria import equilibrium as equilibrium
    from equilibria import exports as exports
    from equilibria import gradients as gradients
    from equilibria import images as images
    from equilibria import inference as inference
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
    from equilibria.certificates import certify
    from equilibria.compiled import compile
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
    from equilibria.inference import evaluate, load, predict
    from equilibria.inputs import Box, L2Ball, LinfBall, attack, optimize_input
    from equilibria.models import create_model, list_models, register_model
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
    from equilibria.training import train

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
    "compile",
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

_ROOMS = (
    "plugins",
    "registry",
    "images",
    "context",
    "operators",
    "activations",
    "energies",
    "solvers",
    "gradients",
    "equilibrium",
    "models",
    "certificates",
    "inputs",
    "restoration",
    "tasks",
    "data",
    "training",
    "compiled",
    "inference",
    "exports",
    "analysis",
    "report",
    "serving",
    "papers",
    "cli",
)
"""Subpackages in the order of their dependencies, so that a name lookup imports few of them."""


def __getattr__(name: str) -> Any:
    """Import a subpackage, or a public name from its subpackage, when it is first used."""
    if name in _ROOMS:
        return import_module(f"equilibria.{name}")
    for room in _ROOMS if name in __all__ else ():
        module = import_module(f"equilibria.{room}")
        if name in getattr(module, "__all__", ()):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AttributeError(f"module 'equilibria' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
