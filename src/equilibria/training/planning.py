"""What a training begins with: a recipe, or a run that goes on, and the weights of another run."""

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
    """What is followed in a folder.

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
    """What the run followed until now, if it is given more epochs."""
    from_beginning: bool = False
    """Whether the run in the folder was ended before its first checkpoint, and starts again."""


def plan_run(
    recipe: str | Path | Recipe | None,
    overrides: Sequence[str],
    output: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    epochs: str | int | None = None,
) -> RunPlan:
    """What to follow, without touching anything.

    recipe: None for that of the run in `output`, which goes on; if it was ended before its first
        checkpoint, it starts from the beginning.
    epochs: how many in all, or "+5" for five more than the run in `output` was to have. Its own are
        as they would have been, and the schedule starts anew after them (`TrainingSettings`).

    Examples:
        >>> from pathlib import Path
        >>> from equilibria.training.planning import plan_run
        >>> plan_run("digits-opteq", ["training.epochs=2"], Path("runs/new")).resume
        False
    """
    run = RunFolder(output)
    is_more, count = _epochs(epochs)
    if is_more and overwrite:
        raise ValueError(f"epochs {epochs} go on with the run that overwrite replaces: take one")
    goes_on = resume or is_more
    if recipe is None and not goes_on:
        raise RecipeError(
            "name a recipe to train (`equilibria recipes` lists them) or images to train on, or "
            "--resume (resume=True) with the folder of a run"
        )
    is_run = goes_on and run.is_run()
    if not is_run and (recipe is None or is_more):
        raise RunError(f"there is no run in {output} to go on with: name its folder, or a recipe")
    there = is_run and run.holds_work()
    if there or recipe is None:
        run.require_parts()
    from_beginning = is_run and not Checkpoints(run.checkpoints).present()
    if from_beginning and run.weights.is_file():
        raise RunError(
            f"{run.checkpoints} holds no checkpoint to go on from: start a new run with the "
            f"weights of this one (--from {output})"
        )
    if from_beginning and is_more:
        raise RunError(
            f"the run in {output} has no checkpoint that epochs {epochs} could be added to: "
            "--resume (resume=True) starts it from the beginning"
        )
    if from_beginning and recipe is None:
        run.require_own_config()
    chosen = recipe
    if not isinstance(chosen, Recipe):
        chosen = load_recipe(run.config if chosen is None else chosen, overrides)
    elif overrides:
        raise TypeError("overrides are for a recipe by name or file: change the object instead")
    if count is None or not there or from_beginning:
        given = chosen.training if count is None else replace(chosen.training, epochs=count)
        return RunPlan(replace(chosen, training=given), goes_on, from_beginning=from_beginning)
    present = load_recipe(run.config).training
    so_far = replace(chosen.training, epochs=present.epochs, continued_at=present.continued_at)
    earlier = replace(chosen, training=so_far)
    total = present.epochs + count if is_more else count
    if total < present.epochs:
        raise RunError(
            f"the run in {output} is one of {present.epochs} epochs: it can have more of them, but "
            "not fewer; start another run in a new folder"
        )
    if total == present.epochs:
        return RunPlan(earlier, goes_on, from_beginning=from_beginning)
    longer = replace(so_far, epochs=total, continued_at=(*present.continued_at, present.epochs))
    return RunPlan(replace(chosen, training=longer), goes_on, earlier)


def _epochs(asked: str | int | None) -> tuple[bool, int | None]:
    """Whether they are to be added, and how many."""
    if asked is None:
        return False, None
    found = re.fullmatch(r"(\+?)([1-9]\d{0,8})", str(asked))
    if found is None:
        raise ValueError(f"epochs is a number, such as 20, or +5 for five more, not {asked!r}")
    return bool(found[1]), int(found[2])


def open_run(
    plan: RunPlan,
    experiment: Experiment,
    output: Path,
    *,
    overwrite: bool = False,
    start_from: str | Path | None = None,
) -> RunFolder:
    """The folder, locked for the experiment.

    start_from: a run whose weights the model takes; `run.json` records it as "started_from". A run
        that starts from the beginning again takes the weights that it was first started with.

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
    begun = RunFolder(output).facts().get("started_from") if plan.from_beginning else None
    if start_from is None and begun is not None:
        facts["started_from"] = take_weights(experiment.model, begun["run"])
        if facts["started_from"]["weights"] != begun["weights"]:
            raise RunError(
                f"the weights of {begun['run']} have changed since the run in {output} was started "
                "with them: start a new run in another folder"
            )
    if start_from is not None:
        facts["started_from"] = take_weights(experiment.model, start_from)
    return RunFolder.opened(
        output,
        plan.recipe.as_data(),
        facts,
        resume=plan.resume,
        overwrite=overwrite,
        earlier=None if plan.earlier is None else plan.earlier.as_data(),
    )


def take_weights(model: nn.Module, folder: str | Path) -> dict[str, Any]:
    """Give a model, as an experiment makes it, the weights of a finished run; say what it did.

    Where the numbers of classes differ, parameters that have one of them as a dimension stay as
    they are: "new" names them. Anything else that does not fit is an error. The normalization of
    images stays that of the model's own data.
    """
    run = RunFolder(Path(folder))
    if not run.weights.is_file():
        raise FileNotFoundError(
            f"{run.weights} is missing: name the folder of a finished run to start from"
        )
    found = read_weights(run.weights)
    own = model.state_dict()
    found |= {name: own[name] for name in own if name.startswith("normalize.")}
    images = images_of(model)
    classes = (
        len(run.facts().get("images", {}).get("class_names", ())),
        0 if images is None else images.num_classes,
    )
    new, problems = [], []
    for name, here in model.named_parameters():
        there = found.get(name, here)
        if _differ_by(classes, there.shape, here.shape):
            new.append(name)
            found[name] = own[name]
        elif there.shape != here.shape:
            problems.append(f"{name} is {_size(there)} there and {_size(here)} here")
    if not problems:
        unmatched = model.load_state_dict(found, strict=False)
        problems += [f"{name} is missing there" for name in unmatched.missing_keys]
        problems += [f"{name} is unknown here" for name in unmatched.unexpected_keys]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"the weights of {run.path} do not fit the model: {problems[0]}{more}")
    return {"run": str(run.path), "weights": checksum(run.weights.read_bytes()), "new": new}


def _differ_by(classes: tuple[int, int], there: Sequence[int], here: Sequence[int]) -> bool:
    """Whether two shapes differ in one dimension alone, and there by the numbers of classes."""
    pairs = [pair for pair in zip(there, here, strict=False) if pair[0] != pair[1]]
    return len(there) == len(here) and pairs == [classes]


def _size(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape)) or "a number"
