"""Equilibria: networks whose output is the minimiser of an explicit hidden objective."""

from equilibria.activations import (
    Activation,
    get_activation,
    list_activations,
    register_activation,
)
from equilibria.adjoints import (
    GradientRule,
    Implicit,
    OneStep,
    Phantom,
    Symmetry,
    Unrolled,
    get_adjoint,
    list_adjoints,
    register_adjoint,
)
from equilibria.context import Context, State
from equilibria.energies import Energy, Input, Quadratic, energy_term
from equilibria.equilibrium import Cell, EnergyCell, EquilibriumLayer
from equilibria.models import (
    EquilibriumClassifier,
    create_model,
    list_models,
    model_options,
    model_summary,
    register_model,
)
from equilibria.objective import EnergyObjective, NoObjectiveError, Objective
from equilibria.operators import (
    AveragePool,
    Compose,
    Conv2d,
    Dense,
    Identity,
    LinearOperator,
    as_operator,
)
from equilibria.solvers import (
    Accelerated,
    Anderson,
    ConvergenceError,
    ConvergenceWarning,
    Picard,
    Solution,
    Solver,
    Status,
    get_solver,
    list_solvers,
    register_solver,
)

__version__ = "0.1.0"

__all__ = [
    "Accelerated",
    "Activation",
    "Anderson",
    "AveragePool",
    "Cell",
    "Compose",
    "Context",
    "Conv2d",
    "ConvergenceError",
    "ConvergenceWarning",
    "Dense",
    "Energy",
    "EnergyCell",
    "EnergyObjective",
    "EquilibriumClassifier",
    "EquilibriumLayer",
    "GradientRule",
    "Identity",
    "Implicit",
    "Input",
    "LinearOperator",
    "NoObjectiveError",
    "Objective",
    "OneStep",
    "Phantom",
    "Picard",
    "Quadratic",
    "Solution",
    "Solver",
    "State",
    "Status",
    "Symmetry",
    "Unrolled",
    "__version__",
    "as_operator",
    "create_model",
    "energy_term",
    "get_activation",
    "get_adjoint",
    "get_solver",
    "list_activations",
    "list_adjoints",
    "list_models",
    "list_solvers",
    "model_options",
    "model_summary",
    "register_activation",
    "register_adjoint",
    "register_model",
    "register_solver",
]
