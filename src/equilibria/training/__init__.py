"""Training: in one call, or recipe, loop, checkpoints and run folders one by one."""

from equilibria.training.api import (
    ClassMap,
    Prediction,
    evaluate,
    load,
    predict,
    predictions,
    train,
)
from equilibria.training.checkpoints import Checkpoints, CheckpointWarning
from equilibria.training.distributed import Place, ProcessLostError, joined_group
from equilibria.training.elsewhere import on_other_data
from equilibria.training.experiment import (
    Experiment,
    RecipeModel,
    fitting_options,
    trained,
    trained_model,
)
from equilibria.training.files import (
    DamagedFileError,
    json_text,
    load_weights,
    read_weights,
    save_weights,
    sealed_json,
    unsealed,
    write_atomically,
)
from equilibria.training.folder import RunError, RunFolder
from equilibria.training.loop import NonFiniteError, fit
from equilibria.training.metrics import EpochMetrics, StepProgress, TensorBoardLog
from equilibria.training.packed import kept_latents, pack
from equilibria.training.planning import Plan, open_run, plan_run
from equilibria.training.processes import ALONE, Processes, choose_device, denormals_as_zero, now
from equilibria.training.recipe import (
    Recipe,
    RecipeError,
    find_recipe,
    list_recipes,
    load_recipe,
    recipe_from_data,
    with_overrides,
)
from equilibria.training.settings import TrainingSettings
from equilibria.training.sizes import ModelSizeError, size_limit
from equilibria.training.tuning import tune

__all__ = [
    "ALONE",
    "CheckpointWarning",
    "Checkpoints",
    "ClassMap",
    "DamagedFileError",
    "EpochMetrics",
    "Experiment",
    "ModelSizeError",
    "NonFiniteError",
    "Place",
    "Plan",
    "Prediction",
    "ProcessLostError",
    "Processes",
    "Recipe",
    "RecipeError",
    "RecipeModel",
    "RunError",
    "RunFolder",
    "StepProgress",
    "TensorBoardLog",
    "TrainingSettings",
    "choose_device",
    "denormals_as_zero",
    "evaluate",
    "find_recipe",
    "fit",
    "fitting_options",
    "joined_group",
    "json_text",
    "kept_latents",
    "list_recipes",
    "load",
    "load_recipe",
    "load_weights",
    "now",
    "on_other_data",
    "open_run",
    "pack",
    "plan_run",
    "predict",
    "predictions",
    "read_weights",
    "recipe_from_data",
    "save_weights",
    "sealed_json",
    "size_limit",
    "train",
    "trained",
    "trained_model",
    "tune",
    "unsealed",
    "with_overrides",
    "write_atomically",
]
