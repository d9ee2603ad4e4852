"""What it costs to search for inputs: latents of a decoder, task vectors of few-shot learning."""

from __future__ import annotations

from dataclasses import replace

import torch

from equilibria.data import Batches
from equilibria.inputs.generation import decoder_of, find_latents
from equilibria.papers.clocks import clock_of
from equilibria.tasks import FewShot, Reconstruction
from equilibria.tasks.episodes import EpisodeBatch
from equilibria.training import Experiment

IMAGES = 32
EPISODES = 16
OWN = Reconstruction.engine
LATENT_SEARCHES = {
    "adam": ("adam", 40),
    "warm_adam": ("adam-warm", 40),
    "jiio_40": (OWN, 40),
    "jiio_100": (OWN, 100),
    "official": ("official", 40),
}
"""By the name of the measure: the engine and its iterations (JIIO, Table 3)."""


def latent_times(experiment: Experiment, device: torch.device) -> dict[str, float | None]:
    """Seconds an image of the searches for latents, and the losses that they reach."""
    task = experiment.task
    ridge = task.ridge if isinstance(task, Reconstruction) else 0.0
    decoder = decoder_of(experiment.model).eval()
    images = next(iter(Batches(experiment.test, IMAGES)))[0].to(device)
    clock = clock_of(device)
    found: dict[str, float | None] = {}
    # Whoever comes first pays for what torch sets up once: not one of those that are compared.
    find_latents(decoder, images, ridge=ridge, engine="adam", iterations=2)
    for name, (engine, iterations) in LATENT_SEARCHES.items():
        begin = clock()
        result = find_latents(decoder, images, ridge=ridge, engine=engine, iterations=iterations)
        found[f"{name}_seconds"] = (clock() - begin) / len(images)
        found[f"{name}_loss"] = float(result.loss.mean())
    return found


def inner_loop_times(experiment: Experiment, device: torch.device) -> dict[str, float | None]:
    """Seconds an episode until its task vector is found, and the loss of its support there."""
    task = experiment.task
    if not isinstance(task, FewShot):
        return {}
    model = experiment.model.eval()
    images, labels = next(iter(Batches(experiment.test, EPISODES)))
    episodes = EpisodeBatch.of(images.to(device), labels.to(device))
    clock = clock_of(device)
    found: dict[str, float | None] = {}
    task.adapt(model, episodes, iterations=2)  # untimed, as above
    for name, engine, iterations in (("adam", "adam", 20), ("jiio", task.engine, 40)):
        search = replace(task, engine=engine, engine_options={}, step_size=None)
        begin = clock()
        result = search.adapt(model, episodes, iterations=iterations)
        found[f"{name}_seconds"] = (clock() - begin) / len(images)
        found[f"{name}_loss"] = float(result.loss.mean())
    return found
