"""Training by one call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from equilibria.data import DataSet, from_dataset
from equilibria.plugins import Paths, import_parts
from equilibria.training.experiment import Experiment, trained_model
from equilibria.training.folder import RunFolder
from equilibria.training.metrics import EpochMetrics, StepProgress
from equilibria.training.planning import open_run, plan_run
from equilibria.training.processes import choose_device, denormals_as_zero
from equilibria.training.progress import TrainingDisplay, both, notes, summary
from equilibria.training.recipe import Recipe, recipe_for, with_given_data


@denormals_as_zero()
def train(
    recipe: str | Path | Recipe | None = None,
    *overrides: str,
    data: DataSet | Dataset[Any] | None = None,
    output: str | Path = "equilibria-run",
    resume: bool = False,
    overwrite: bool = False,
    epochs: int | str | None = None,
    start_from: str | Path | None = None,
    device: str = "auto",
    imports: Paths = (),
    progress: bool = True,
    on_epoch: Callable[[EpochMetrics], None] | None = None,
    on_step: Callable[[StepProgress], None] | None = None,
) -> nn.Module:
    """Train a model according to a recipe, or on a folder of images or a data set.

        model = eq.train("digits-opteq", "training.epochs=2", output="runs/mine")
        model = eq.train("photos/", output="runs/mine")
        model = eq.train(data=dataset, output="runs/mine")

    Args:
        recipe: Recipe: its name, a YAML file, or an object. Alternatively a folder of images with
            one folder per class, or a table of files and labels (CSV), for which a recipe is
            chosen. None with `resume` and without `data` uses the recipe of the run in `output`.
        overrides: Changes of the recipe, as "key=value".
        data: Data that replace those of the recipe; without a recipe one is chosen. A map-style
            `torch.utils.data.Dataset`, or a `DataSet`, for example from `eq.data.from_dataset`.
        output: Folder of the run.
        resume: Continue from the last checkpoint in `output`. A run that ended before its first
            checkpoint starts from the beginning.
        overwrite: Replace the run in `output`.
        epochs: Total number of epochs, or "+5" for five epochs more than the run in `output` has
            (see `continued_at` of `TrainingSettings` for the learning rate).
        start_from: Folder of a run whose weights initialize the model. If the number of classes
            differs, the last layer is initialized at random.
        device: Device to train on; "auto" uses an accelerator if there is one.
        imports: Files or modules with custom parts, which are imported first
            (`equilibria.plugins`).
        progress: Print a summary of the run and its progress to stderr: a bar on a terminal,
            otherwise one line per epoch.
        on_epoch: Callback with the metrics of an epoch; an exception it raises ends the training.
        on_step: Callback after each step; an exception it raises ends the training.

    Returns:
        The trained model in evaluation mode, as returned by `equilibria.load`.

    Raises:
        RunError: If `output` cannot be used as requested, for example if it holds a run but neither
            `resume` nor `overwrite` is set.
        RecipeError: If the recipe is not valid.

    Examples:
        >>> few = ["data.options.train_samples=64", "training.epochs=1"]
        >>> model = eq.train("digits-opteq", *few, output="runs/mine", progress=False)
        >>> model.images.class_names[:3]
        ('0', '1', '2')
    """
    from rich.console import Console

    import_parts(imports)
    folder, adds_epochs = Path(output), str(epochs).startswith("+")
    continues = recipe is None and (resume or adds_epochs) and RunFolder(folder).is_run()
    dataset = from_dataset(data) if isinstance(data, Dataset) else data
    if isinstance(recipe, Recipe):
        recipe = recipe if dataset is None else with_given_data(recipe)
    elif dataset is not None and not continues:
        recipe, overrides = recipe_for(dataset, recipe, overrides), ()
    chosen_device = choose_device(device)
    plan = plan_run(recipe, overrides, folder, resume=resume, overwrite=overwrite, epochs=epochs)
    experiment = Experiment.of(plan.recipe, dataset)
    run = open_run(plan, experiment, folder, overwrite=overwrite, start_from=start_from)
    console = Console(stderr=True, highlight=False, quiet=not progress)
    for line in (*notes(plan, run), *summary(experiment, run, chosen_device)):
        console.print(line, markup=False, soft_wrap=True)
    display = TrainingDisplay(console, plan.recipe.training.epochs)
    with display.progress:
        experiment.train(
            run,
            chosen_device,
            on_epoch=both(display.on_epoch, on_epoch),
            on_step=both(display.on_step, on_step),
            on_read=display.on_read,
        )
    return trained_model(output, device=device).model
