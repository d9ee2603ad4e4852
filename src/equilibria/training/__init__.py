"""Training of models: one call that does everything, and its parts."""

from equilibria.training.api import train
from equilibria.training.checkpoints import CheckpointWarning
from equilibria.training.distributed import ProcessLostError
from equilibria.training.files import DamagedFileError, load_weights, save_weights
from equilibria.training.folder import RunError, RunFolder
from equilibria.training.loop import NonFiniteError, fit
from equilibria.training.metrics import EpochMetrics
from equilibria.training.packed import pack
from equilibria.training.recipe import Recipe, RecipeError, list_recipes, load_recipe
from equilibria.training.settings import TrainingSettings
from equilibria.training.sizes import ModelSizeError, size_limit
from equilibria.training.tuning import tune

__all__ = [
    "CheckpointWarning",
    "DamagedFileError",
    "EpochMetrics",
    "ModelSizeError",
    "NonFiniteError",
    "ProcessLostError",
    "Recipe",
    "RecipeError",
    "RunError",
    "RunFolder",
    "TrainingSettings",
    "fit",
    "list_recipes",
    "load_recipe",
    "load_weights",
    "pack",
    "save_weights",
    "size_limit",
    "train",
    "tune",
]
