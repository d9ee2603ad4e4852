"""The restorer that a trained model is, and the damage that it undoes."""

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
    """Whether a model restores by a search for latents, not by a forward pass."""
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
    """Return the restorer that a trained model is.

    Args:
        model: The model.
        task: What it was trained for. A model trained to restore answers at once, or searches with
            the options of its evaluation if it is a generator.
        channels: Number of color channels that the model takes.
        tile: Side in pixels of the tiles of large pictures, for a model that takes any size.
        stop_at_noise: End a search where noise explains what is left; without a ridge.
        prior: Density of the latents that are searched for, in place of the ridge.
        seed: Of the random starts of a search.
        search: Options of `restore`, in place of those of the task.

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
        given = [*search, *["stop_at_noise"] * stop_at_noise, *["prior"] * (prior is not None)]
        if given:
            raise ValueError(
                f"{type(model).__name__} restores without a search: leave out {', '.join(given)}"
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
    """Return the damage that is undone: the one asked for, or what a model was trained to undo.

    Args:
        model: The model.
        task: What it was trained for.
        name: Name of a damage; that of the task if None.
        options: Options of the damage.

    Raises:
        ValueError: If there is no such damage, or the model cannot undo it.

    Examples:
        >>> model = eq.load("mnist-generator")
        >>> from equilibria.tasks.restoring import chosen_damage
        >>> chosen_damage(model, eq.tasks.Reconstruction(), "denoise", noise=0.1)
        Denoising(noise=0.1)
    """
    own = task.damage if isinstance(task, ImageRestoration) else None
    if name is None:
        if own is None:
            raise ValueError(f"name what is to be undone: --task {', '.join(list_damages())}")
        unknown = [option for option in options if not hasattr(own, option)]
        if unknown:
            raise ValueError(f"{own} has no {', '.join(unknown)}: name another --task for it")
        return replace(own, **options) if is_dataclass(own) else own
    chosen = get_damage(name, **options)
    if own is not None and type(own) is not type(chosen) and not is_generator(model):
        raise ValueError(
            f"the run was trained to undo {own}, not {chosen}: only a generator can do what it was "
            "not trained for"
        )
    return chosen
