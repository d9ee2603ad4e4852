"""Sources of trained weights: a run, a file, or the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from equilibria.context.caller import warn_caller
from equilibria.models import model_options
from equilibria.models.pretrained import header_of, pretrained_cards, pretrained_file
from equilibria.registry import nearest
from equilibria.training.checkpoints import Checkpoints, CheckpointWarning
from equilibria.training.files import check_run_file
from equilibria.training.folder import RunFolder
from equilibria.training.recipe import Recipe, recipe_from_data

Weights: TypeAlias = Literal["last", "best"]


@dataclass(frozen=True)
class WeightsSource:
    """Recipe and weights of a trained model.

    Attributes:
        recipe: Recipe with the settings of evaluation.
        file: File of weights.
        images: Data for `ImageSpec.from_data`; empty if the run does not describe its images.
    """

    recipe: Recipe
    file: Path
    images: Mapping[str, Any]


def source_of(place: str | Path, weights: Weights = "last") -> WeightsSource:
    """Locate a trained model.

    Args:
        place: Folder of a run, a file written by `pack`, or the name of a pretrained model.
        weights: "last", or "best" for the weights of the epoch with the best validation score.

    Raises:
        FileNotFoundError: If there is no such model.
    """
    path, cards = Path(place), pretrained_cards()
    if not path.exists():
        if str(place) not in cards:
            raise FileNotFoundError(
                f"there is no run or pretrained model {place}{nearest(place, cards)} Give the "
                "folder of a finished run, as written by `equilibria train`, or a pretrained "
                f"model: {', '.join(cards)}"
            )
        path = pretrained_file(str(place))
    if not path.is_file():
        run = RunFolder(path)
        recipe, file = _weights_of(run, weights)
        return WeightsSource(recipe, file, run.facts().get("images", {}))
    if weights == "best":
        raise ValueError(
            f"{path} holds the weights of a single epoch: remove weights='best' (--best)"
        )
    described = header_of(path)
    return WeightsSource(recipe_from_data(described["recipe"]), path, described["images"])


def _weights_of(run: RunFolder, weights: Weights) -> tuple[Recipe, Path]:
    """Return the recipe of a run with the settings of evaluation, and the file of its weights."""
    checkpoints = Checkpoints(run.checkpoints)
    if not run.config.is_file():
        raise FileNotFoundError(
            f"{run.config} is missing: give the folder of a finished run, as written by "
            f"`equilibria train`, or a pretrained model ({', '.join(pretrained_cards())})"
        )
    run.require_parts()
    recipe = run.recipe()
    file = run.weights if weights == "last" else checkpoints.best
    if weights == "last" and not run.is_finished():
        file = _newest(run, checkpoints, recipe)
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing: the run has no best epoch, because it had no validation images "
            "(data.validation)"
        )
    check_run_file(file, run.path)
    tolerance = recipe.training.evaluation_tolerance
    if tolerance is not None and "tolerance" in model_options(recipe.model.name):
        options = {**recipe.model.options, "tolerance": tolerance}
        recipe = replace(recipe, model=replace(recipe.model, options=options))
    return recipe, file


def _newest(run: RunFolder, checkpoints: Checkpoints, recipe: Recipe) -> Path:
    """Return the weights of the newest intact checkpoint of an interrupted run."""
    newest = checkpoints.newest_intact()
    if newest is None:
        raise FileNotFoundError(
            f"{run.weights} is missing, and there is no intact checkpoint to use instead: give the "
            "folder of a finished run, as written by `equilibria train`"
        )
    epoch, file = newest
    warn_caller(
        f"{run.path} is not finished: using the weights after epoch {epoch} of "
        f"{recipe.training.epochs} ({file})",
        CheckpointWarning,
    )
    return file
