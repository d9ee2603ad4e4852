"""The models of the papers, each a short file that reads like its paper."""

from equilibria.models import presets as _presets  # noqa: F401  (registers the named models)
from equilibria.models.classifier import EquilibriumClassifier
from equilibria.models.deep_opteq import DeepOptEqCell, DeepOptEqObjective, UnitLayer, deep_opteq
from equilibria.models.opteq import OptEqCell, opteq, opteq_cell
from equilibria.models.registry import (
    create_model,
    list_models,
    model_options,
    model_summary,
    register_model,
)
from equilibria.models.theory import (
    ProximalReport,
    deep_opteq_of_network,
    is_proximal,
    universal_hidden_units,
)

__all__ = [
    "DeepOptEqCell",
    "DeepOptEqObjective",
    "EquilibriumClassifier",
    "OptEqCell",
    "ProximalReport",
    "UnitLayer",
    "create_model",
    "deep_opteq",
    "deep_opteq_of_network",
    "is_proximal",
    "list_models",
    "model_options",
    "model_summary",
    "opteq",
    "opteq_cell",
    "register_model",
    "universal_hidden_units",
]
