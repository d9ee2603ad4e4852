"""Start of a training: its recipe, whether it resumes a run, and its initial weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from equilibria.images import images_of
from equilibria.training.checkpoints import Checkpoints
from equilibria.training.experiment import Experiment
from equilibria.training.files import checksum, read_weights
from equilibria.training.folder import RunError, RunFolder
from equilibria.training.recipe import Recipe, RecipeError, load_recipe


@dataclass(frozen=True)
class RunPlan:
    """Recipe for a run folder, and whether it resumes a run.

    Attributes:
        recipe: The recipe.
        resume: Whether the run in the folder continues.
        earlier: Recipe of the run so far, if it is given more epochs.
        from_beginning: Whether the run ended before its first checkpoint, and starts again.

    Examples:
        >>> from pathlib import Path
        >>> from equilibria.training.planning import plan_run
        >>> plan = plan_run("digits-opteq", ["training.epochs=2"], Path("runs/planned"))
        >>> plan.recipe.training.epochs, plan.resume
        (2, False)
    """

    recipe: Recipe
    resume: bool
    earlier: Recipe | None = None
    from_beginning: bool = False


def plan_run(
    recipe: str | Path | Recipe | None,
    overrides: Sequence[str],
    output: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    epochs: str | int | None = None,
) -> RunPlan:
    """Decide which recipe to follow in a folder, without changing files.

    Args:
        recipe: The recipe. None uses that of the run in `output`, which continues, or starts from
            the beginning if it ended before its first checkpoint.
        overrides: Changes of the recipe, as "key=value".
        output: Folder of the run.
        resume: Whether to continue a run in `output`.
        overwrite: Whether to replace a run in `output`.
        epochs: Total number of epochs, or "+5" for five epochs more than the run in `output` has.
            The first epochs do not depend on this, and the schedule starts again after them
            (`TrainingSettings`).

    Raises:
        RunError: If there is no run to continue, or it cannot be continued as requested.
        RecipeError: If the recipe is missing or not valid.

    Examples:
        >>> from pathlib import Path
        >>> from equilibria.training.planning import plan_run
        >>> plan_run("digits-opteq", ["training.epochs=2"], Path("runs/new")).resume
        False
    """
    run = RunFolder(output)
    adds_epochs, count = _epochs(epochs)
    if adds_epochs and overwrite:
        raise ValueError(
            f"epochs={epochs} continues the run that overwrite replaces: use only one of them"
        )
    continues = resume or adds_epochs
    if recipe is None and not continues:
        raise RecipeError(
            "nothing to train: give a recipe (`equilibria recipes` lists them) or images, or "
            "--resume (resume=True) with the folder of a run"
        )
    is_run = continues and run.is_run()
    if not is_run and (recipe is None or adds_epochs):
        raise RunError(f"there is no run in {output} to continue: give its folder, or a recipe")
    has_work = is_run and run.holds_work()
    if has_work or recipe is None:
        run.require_parts()
    from_beginning = is_run and not Checkpoints(run.checkpoints).present()
    if from_beginning and run.weights.is_file():
        raise RunError(
            f"{run.checkpoints} holds no checkpoint to continue from: start a new run with the "
            f"weights of this one (--from {output})"
        )
    if from_beginning and adds_epochs:
        raise RunError(
            f"the run in {output} has no checkpoint, so that epochs={epochs} cannot extend it: "
            "start it from the beginning with --resume (resume=True)"
        )
    if from_beginning and recipe is None:
        run.require_own_config()
    chosen = recipe
    if not isinstance(chosen, Recipe):
        chosen = load_recipe(run.config if chosen is None else chosen, overrides)
    elif overrides:
        raise TypeError(
            "overrides need a recipe given by name or file: for a Recipe, use dataclasses.replace"
        )
    if count is None or not has_work or from_beginning:
        training = chosen.training if count is None else replace(chosen.training, epochs=count)
        return RunPlan(replace(chosen, training=training), continues, from_beginning=from_beginning)
    present = load_recipe(run.config).training
    so_far = replace(chosen.training, epochs=present.epochs, continued_at=present.continued_at)
    earlier = replace(chosen, training=so_far)
    total = present.epochs + count if adds_epochs else count
    if total < present.epochs:
        raise RunError(
            f"epochs must be at least {present.epochs}, the number of epochs of the run in "
            f"{output}, got {total}: for fewer, start another run in a new folder"
        )
    if total == present.epochs:
        return RunPlan(earlier, continues, from_beginning=from_beginning)
    longer = replace(so_far, epochs=total, continued_at=(*present.continued_at, present.epochs))
    return RunPlan(replace(chosen, training=longer), continues, earlier)


def _epochs(value: str | int | None) -> tuple[bool, int | None]:
    """Parse the option `epochs`: whether epochs are to be added, and how many."""
    if value is None:
        return False, None
    match = re.fullmatch(r"(\+?)([1-9]\d{0,8})", str(value))
    if match is None:
        raise ValueError(f"epochs must be a number, such as 20, or +5 for five more, got {value!r}")
    return bool(match[1]), int(match[2])


def open_run(
    plan: RunPlan,
    experiment: Experiment,
    output: Path,
    *,
    overwrite: bool = False,
    start_from: str | Path | None = None,
) -> RunFolder:
    """Open and lock the folder of a run, and initialize the weights of its model.

    Args:
        plan: Result of `plan_run`.
        experiment: The experiment.
        output: Folder of the run.
        overwrite: Whether to replace a run in `output`.
        start_from: Folder of a run whose weights initialize the model; `run.json` records it as
            "started_from". A run that starts from the beginning again uses the same weights as the
            first time.

    Examples:
        >>> from pathlib import Path
        >>> from equilibria.training.experiment import Experiment
        >>> from equilibria.training.planning import open_run, plan_run
        >>> plan, folder = plan_run("digits-opteq", [], Path("runs/a")), Path("runs/a")
        >>> run = open_run(plan, Experiment.of(plan.recipe), folder)
        >>> run.close()
        >>> (folder / "run.json").is_file()
        True
    """
    facts = experiment.facts()
    origin = RunFolder(output).facts().get("started_from") if plan.from_beginning else None
    if start_from is None and origin is not None:
        facts["started_from"] = initialize_from(experiment.model, origin["run"])
        if facts["started_from"]["weights"] != origin["weights"]:
            raise RunError(
                f"the weights of {origin['run']} have changed since the run in {output} was "
                "started with them: start a new run in another folder"
            )
    if start_from is not None:
        facts["started_from"] = initialize_from(experiment.model, start_from)
    return RunFolder.opened(
        output,
        plan.recipe.as_data(),
        facts,
        resume=plan.resume,
        overwrite=overwrite,
        earlier=None if plan.earlier is None else plan.earlier.as_data(),
    )


def initialize_from(model: nn.Module, folder: str | Path) -> dict[str, Any]:
    """Initialize a model with the weights of a finished run.

    If the numbers of classes differ, parameters whose shape depends on it do not change. Neither
    does the normalization of images.

    Args:
        model: Model of an experiment.
        folder: Folder of the run.

    Returns:
        The "run", the checksum of its "weights", and the names of the "new" parameters, which
        keep their values.

    Raises:
        FileNotFoundError: If the run has no weights.
        ValueError: If the weights do not fit the model.
    """
    run = RunFolder(Path(folder))
    if not run.weights.is_file():
        raise FileNotFoundError(
            f"{run.weights} is missing: give the folder of a finished run to start from"
        )
    weights = read_weights(run.weights)
    initial = model.state_dict()
    weights |= {name: initial[name] for name in initial if name.startswith("normalize.")}
    images = images_of(model)
    classes = (
        len(run.facts().get("images", {}).get("class_names", ())),
        0 if images is None else images.num_classes,
    )
    new, problems = [], []
    for name, parameter in model.named_parameters():
        weight = weights.get(name, parameter)
        if _differ_by(classes, weight.shape, parameter.shape):
            new.append(name)
            weights[name] = initial[name]
        elif weight.shape != parameter.shape:
            problems.append(
                f"{name} is {_size(weight)} in the run, {_size(parameter)} in the model"
            )
    if not problems:
        unmatched = model.load_state_dict(weights, strict=False)
        problems += [f"{name} is missing in the run" for name in unmatched.missing_keys]
        problems += [f"{name} is missing in the model" for name in unmatched.unexpected_keys]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"the weights of {run.path} do not fit the model: {problems[0]}{more}")
    return {"run": str(run.path), "weights": checksum(run.weights.read_bytes()), "new": new}


def _differ_by(classes: tuple[int, int], source: Sequence[int], target: Sequence[int]) -> bool:
    """Whether two shapes differ only in one dimension, which is the number of classes."""
    pairs = [pair for pair in zip(source, target, strict=False) if pair[0] != pair[1]]
    return len(source) == len(target) and pairs == [classes]


def _size(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape)) or "a number"
