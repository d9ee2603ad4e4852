"""Where the weights of a trained model are: in a run, in a file, or in the package."""

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
    """Where a trained model comes from."""

    recipe: Recipe
    """As it is evaluated."""
    file: Path
    images: Mapping[str, Any]
    """Data for `ImageSpec.from_data`; empty if the run does not say."""


def source_of(place: str | Path, weights: Weights = "last") -> WeightsSource:
    """A run by its folder, a file that `pack` wrote, or a trained model of the package by name."""
    path, cards = Path(place), pretrained_cards()
    if not path.exists():
        if str(place) not in cards:
            raise FileNotFoundError(
                f"there is no run {place}, and no trained model of that name"
                f"{nearest(place, cards)} Name the folder of a finished run, as `equilibria "
                f"train` writes one, or a trained model: {', '.join(cards)}"
            )
        path = pretrained_file(str(place))
    if not path.is_file():
        run = RunFolder(path)
        recipe, file = _weights_of(run, weights)
        return WeightsSource(recipe, file, run.facts().get("images", {}))
    if weights == "best":
        raise ValueError(f"{path} holds the weights of one epoch: there are no best among them")
    described = header_of(path)
    return WeightsSource(recipe_from_data(described["recipe"]), path, described["images"])


def _weights_of(run: RunFolder, weights: Weights) -> tuple[Recipe, Path]:
    """The recipe of a run, as it is evaluated, and the file of its weights."""
    checkpoints = Checkpoints(run.checkpoints)
    if not run.config.is_file():
        raise FileNotFoundError(
            f"{run.config} is missing: name the folder of a finished run, as `equilibria train` "
            f"writes one, or a trained model ({', '.join(pretrained_cards())})"
        )
    run.require_parts()
    recipe = run.recipe()
    file = run.weights if weights == "last" else checkpoints.best
    if weights == "last" and not run.is_finished():
        file = _newest(run, checkpoints, recipe)
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing: the run had no validation images (data.validation) to find the "
            "best epoch with"
        )
    check_run_file(file, run.path)
    tolerance = recipe.training.evaluation_tolerance
    if tolerance is not None and "tolerance" in model_options(recipe.model.name):
        options = {**recipe.model.options, "tolerance": tolerance}
        recipe = replace(recipe, model=replace(recipe.model, options=options))
    return recipe, file


def _newest(run: RunFolder, checkpoints: Checkpoints, recipe: Recipe) -> Path:
    """The weights of the newest sound checkpoint of a run that was interrupted."""
    found = checkpoints.newest_sound()
    if found is None:
        raise FileNotFoundError(
            f"{run.weights} is missing, and there is no sound checkpoint to take in its place: "
            "name the folder of a finished run, as `equilibria train` writes one"
        )
    epoch, file = found
    warn_caller(
        f"{run.path} is not finished: these are its weights after epoch {epoch} of "
        f"{recipe.training.epochs} ({file})",
        CheckpointWarning,
    )
    return file
