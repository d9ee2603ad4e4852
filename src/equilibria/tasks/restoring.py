"""Restorers from trained models, and the damage that they restore."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Any

from torch import nn

from equilibria.inputs import Prior
from equilibria.inputs.latents import generator_of, is_generator
from equilibria.restoration import Damage, get_damage, list_damages
from equilibria.restoration.learned import GeneratorRestorer, LearnedRestorer, ModelRestorer
from equilibria.tasks.base import Task
from equilibria.tasks.images import ImageRestoration, Reconstruction


def searches_latents(model: nn.Module, task: Task) -> bool:
    """Whether a model restores by a search for latents instead of a forward pass."""
    return not isinstance(task, ImageRestoration) or is_generator(model)


def restorer_of(
    model: nn.Module,
    task: Task,
    *,
    channels: int | None = None,
    tile: int | None = None,
    stop_at_noise: bool = False,
    prior: Prior | None = None,
    seed: int = 0,
    **search: Any,
) -> ModelRestorer:
    """Return a restorer that uses a trained model.

    Args:
        model: The model.
        task: Task that it was trained for. A model for restoration is applied once; if it is a
            generator, its latents are searched with the options of the task's evaluation.
        channels: Number of color channels that the model accepts.
        tile: Side in pixels of the tiles of large pictures, for a model that accepts any size.
        stop_at_noise: End a search once the misfit is at most the expected norm of the noise; this
            disables the ridge.
        prior: Prior of the latents, which replaces the ridge.
        seed: Seed of the random starts of a search.
        **search: Options of `restore`, which override those of the task.

    Raises:
        ValueError: If an option of a search is given for a model that does not search.

    Examples:
        >>> from equilibria.models.restorers.model import deq_restorer
        >>> from equilibria.tasks.restoring import restorer_of
        >>> model = deq_restorer(in_channels=1, channels=8)
        >>> type(restorer_of(model, eq.tasks.ImageRestoration())).__name__
        'LearnedRestorer'
    """
    if not searches_latents(model, task):
        unused = [*search, *["stop_at_noise"] * stop_at_noise, *["prior"] * (prior is not None)]
        if unused:
            raise ValueError(
                f"{type(model).__name__} restores without a search: leave out {', '.join(unused)}"
            )
        return LearnedRestorer(model, channels, tile)
    options: dict[str, Any] = {}
    if isinstance(task, ImageRestoration):
        options = task.evaluation_options()
    elif isinstance(task, Reconstruction):
        options = {"ridge": task.ridge}
    if stop_at_noise:
        options["ridge"] = 0.0
    if prior is not None:
        options |= {"ridge": 0.0, "prior": prior}
    return GeneratorRestorer(
        generator_of(model), channels, {**options, **search}, stop_at_noise, seed
    )


def chosen_damage(model: nn.Module, task: Task, name: str | None = None, **options: Any) -> Damage:
    """Return the requested damage, or by default the damage that a model was trained to restore.

    Args:
        model: The model.
        task: Task that it was trained for.
        name: Name of a damage; by default that of the task.
        **options: Options of the damage.

    Raises:
        ValueError: If there is no such damage, or the model cannot restore it.

    Examples:
        >>> model = eq.load("mnist-generator")
        >>> from equilibria.tasks.restoring import chosen_damage
        >>> chosen_damage(model, eq.tasks.Reconstruction(), "denoise", noise=0.1)
        Denoising(noise=0.1)
    """
    trained = task.damage if isinstance(task, ImageRestoration) else None
    if name is None:
        if trained is None:
            raise ValueError(
                "the model was not trained for one kind of damage: choose it by --task, one of "
                f"{', '.join(list_damages())}"
            )
        unknown = [option for option in options if not hasattr(trained, option)]
        if unknown:
            raise ValueError(
                f"{trained} has no option {', '.join(unknown)}: choose another damage by --task"
            )
        return replace(trained, **options) if is_dataclass(trained) else trained
    requested = get_damage(name, **options)
    if trained is not None and type(trained) is not type(requested) and not is_generator(model):
        raise ValueError(
            f"the model was trained for {trained} and cannot restore {requested}: only a generator "
            "restores damage that it was not trained for"
        )
    return requested
