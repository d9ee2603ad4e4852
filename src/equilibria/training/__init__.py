"""Training: in one call, or recipe, loop, checkpoints and run folders one by one."""

from equilibria.training.api import ClassMap, Prediction, evaluate, load, predict, train
from equilibria.training.distributed import (
    Place,
    ProcessGroup,
    ProcessLostError,
    joined_group,
)
from equilibria.training.experiment import Experiment, fitting_options, trained
from equilibria.training.files import (
    Checkpoints,
    CheckpointWarning,
    RunFolder,
    atomic_writer,
    json_text,
    load_weights,
    save_weights,
    stored_shapes,
    write_atomically,
)
from equilibria.training.loop import NonFiniteError, fit
from equilibria.training.metrics import EpochMetrics, StepProgress, TensorBoardLog
from equilibria.training.processes import ALONE, Processes, choose_device
from equilibria.training.recipe import (
    DataRecipe,
    ModelRecipe,
    Recipe,
    RecipeError,
    TaskRecipe,
    find_recipe,
    list_recipes,
    load_recipe,
    recipe_from_data,
)
from equilibria.training.settings import (
    TrainingSettings,
    build_optimizer,
    learning_rate_share,
    parameter_groups,
)
from equilibria.training.synchronized import SharedBatchWarning
from equilibria.training.tuning import (
    Measurement,
    TuningReport,
    explain_none,
    recommend,
    tune,
)

__all__ = [
    "ALONE",
    "CheckpointWarning",
    "Checkpoints",
    "ClassMap",
    "DataRecipe",
    "EpochMetrics",
    "Experiment",
    "Measurement",
    "ModelRecipe",
    "NonFiniteError",
    "Place",
    "Prediction",
    "ProcessGroup",
    "ProcessLostError",
    "Processes",
    "Recipe",
    "RecipeError",
    "RunFolder",
    "SharedBatchWarning",
    "StepProgress",
    "TaskRecipe",
    "TensorBoardLog",
    "TrainingSettings",
    "TuningReport",
    "atomic_writer",
    "build_optimizer",
    "choose_device",
    "evaluate",
    "explain_none",
    "find_recipe",
    "fit",
    "fitting_options",
    "joined_group",
    "json_text",
    "learning_rate_share",
    "list_recipes",
    "load",
    "load_recipe",
    "load_weights",
    "parameter_groups",
    "predict",
    "recipe_from_data",
    "recommend",
    "save_weights",
    "stored_shapes",
    "train",
    "trained",
    "tune",
    "write_atomically",
]
