"""Training: the loop, its settings and metrics, checkpoints and run folders."""

from equilibria.training.checkpoint import (
    Checkpoints,
    CheckpointWarning,
    TrainingState,
    atomic_writer,
    load_weights,
    save_weights,
    stored_shapes,
    write_atomically,
)
from equilibria.training.device import choose_device
from equilibria.training.distributed import (
    Place,
    ProcessGroup,
    ProcessLostError,
    joined_group,
)
from equilibria.training.experiment import Experiment, build_model, fitting_options, trained
from equilibria.training.loop import NonFiniteError, train
from equilibria.training.metrics import EpochMetrics, StepProgress
from equilibria.training.optimizer import (
    build_optimizer,
    learning_rate_share,
    parameter_groups,
)
from equilibria.training.processes import ALONE, Processes
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
from equilibria.training.run import RunFolder
from equilibria.training.settings import TrainingSettings
from equilibria.training.tuning import tune
from equilibria.training.tuning_report import (
    Measurement,
    Setting,
    TuningReport,
    explain_none,
    recommend,
)
from equilibria.training.whole_batch import SharedBatchWarning

__all__ = [
    "ALONE",
    "CheckpointWarning",
    "Checkpoints",
    "DataRecipe",
    "EpochMetrics",
    "Experiment",
    "Measurement",
    "ModelRecipe",
    "NonFiniteError",
    "Place",
    "ProcessGroup",
    "ProcessLostError",
    "Processes",
    "Recipe",
    "RecipeError",
    "RunFolder",
    "Setting",
    "SharedBatchWarning",
    "StepProgress",
    "TaskRecipe",
    "TrainingSettings",
    "TrainingState",
    "TuningReport",
    "atomic_writer",
    "build_model",
    "build_optimizer",
    "choose_device",
    "explain_none",
    "find_recipe",
    "fitting_options",
    "joined_group",
    "learning_rate_share",
    "list_recipes",
    "load_recipe",
    "load_weights",
    "parameter_groups",
    "recipe_from_data",
    "recommend",
    "save_weights",
    "stored_shapes",
    "train",
    "trained",
    "tune",
    "write_atomically",
]
