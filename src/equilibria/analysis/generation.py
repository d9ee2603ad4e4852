"""Samples and reconstructions of trained generators, and their quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from equilibria.data.batches import fetch_readable
from equilibria.data.source import evenly_spread
from equilibria.inputs import decode
from equilibria.inputs.latents import ExplicitGenerator, generator_of
from equilibria.models.generators.autoencoders import Autoencoder
from equilibria.models.generators.decoders import EquilibriumDecoder
from equilibria.models.generators.densities import fit_density
from equilibria.tasks import Reconstruction
from equilibria.tasks.image_quality import (
    FeatureNetwork,
    frechet_distance,
    picture_psnr,
    psnr,
    train_feature_network,
)
from equilibria.tasks.images import latents_of
from equilibria.training import load_weights, save_weights
from equilibria.training.experiment import Experiment, RecipeModel
from equilibria.training.packed import kept_latents

AnyDensity: TypeAlias = "str | Mapping[str, Any]"
"""Name of a density, or a mapping with a name and options."""
BATCH = 256
OnStep: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of the next step, the number of finished steps, and their total."""
FEATURE_IMAGES = 10_000
"""Largest number of training images for the classifier behind the FID."""


@dataclass(frozen=True)
class Reconstructions:
    """Quality of test images decoded from their latents."""

    latents_by: str
    """How the latents were computed: "encoder" or "JIIO"."""
    psnr: float
    median_psnr: float
    fid: float | None


@dataclass(frozen=True)
class Generation:
    """Measures of a generator."""

    model: str
    data: str
    density: str
    fitted_to: int
    """Number of training images whose latents the density was fitted to."""
    images: int
    """Number of reconstructed test images, and of samples that are compared with them."""
    sample_fid: float | None
    reconstructions: list[Reconstructions]
    features: str | None
    """Features between which the FID is measured; None if it was not measured."""


@dataclass(frozen=True)
class Samples:
    """Images drawn from a generator."""

    model: str
    trained_on: str
    """Name of the data set in the recipe."""
    images: Tensor


@dataclass(frozen=True)
class ReconstructedImages:
    """Test images, and their reconstructions from latents."""

    model: str
    originals: Tensor
    labels: Tensor
    images: Mapping[str, Tensor]
    """Reconstructions, by how their latents were computed."""
    psnr: Mapping[str, Sequence[float]]
    """PSNR of each of these images."""


@torch.no_grad()
def generate(
    experiment: Experiment,
    device: torch.device,
    *,
    folder: Path | None = None,
    samples: int = 64,
    density: AnyDensity | None = None,
    latents: int = 2000,
    images: int = 500,
    seed: int = 0,
    judge: bool = True,
    search: Reconstruction | None = None,
    known: Tensor | None = None,
    on_step: OnStep | None = None,
) -> tuple[Generation, Samples, ReconstructedImages]:
    """Fit a density to the latents of training images, sample from it, reconstruct test images.

    Args:
        experiment: Trained generator or autoencoder with its data.
        device: Device of the computation.
        folder: Folder of the run, where the classifier behind the FID is stored; without one it is
            trained on every call.
        samples: Number of samples to draw.
        density: Name of a density, or a mapping with a name and options; by default that of the
            run's task.
        latents: Number of training images whose latents the density is fitted to.
        images: Number of test images to reconstruct.
        seed: Seed of the density and of the samples.
        judge: Measure the FID, which needs a classifier.
        search: Task by which JIIO searches latents of an autoencoder; by default without a ridge.
        known: Latents of training images computed with the same weights. They are used if there
            are `latents` of them.
        on_step: Called with the name of the next step, the number of finished steps, and their
            total.

    Returns:
        The measures; the samples; and the test images with their reconstructions by each way of
        computing the latents.

    Raises:
        TypeError: If the model is not a generator or an autoencoder.
    """
    model, task = _checked(experiment), experiment.task
    training = experiment.training
    originals, labels = experiment.some_test_images(images)
    originals = originals.to(device)
    chosen_images = evenly_spread(training, latents)
    is_known = known is not None and len(known) == len(chosen_images)
    chunks = () if is_known else torch.split(chosen_images, BATCH)
    tests = torch.split(originals, BATCH)
    searches = not isinstance(generator_of(model), ExplicitGenerator)
    steps = _Steps(on_step, len(chunks) + searches * len(tests) + judge)

    # The latents are computed as in training, in batches to limit memory.
    fitted_latents = [] if known is None or not is_known else [known.to(device)]
    for chunk in chunks:
        steps.begin("latents of training images")
        batch, _ = fetch_readable(training, chunk)
        fitted_latents.append(latents_of(model, task, batch.to(device)))
    chosen = _chosen_density(experiment, density)
    fitted = fit_density(chosen, torch.cat(fitted_latents), seed=seed)
    count = max(samples, len(originals))
    drawn = decode(model, fitted.sample(count, seed=seed).to(device))
    network = None
    if judge:
        steps.begin("a classifier for the FID")
        network = _feature_network(experiment, folder, device)
    ways = {"encoder": latents_of(model, task, originals)} if isinstance(model, Autoencoder) else {}
    if searches:
        searching = task if search is None or isinstance(task, Reconstruction) else search
        searched = []
        for batch in tests:
            steps.begin("latents of test images")
            searched.append(latents_of(model, searching, batch, searched=True))
        ways["JIIO"] = torch.cat(searched)
    reconstructions, images_by, ratios_by = [], {}, {}
    for way, test_latents in ways.items():
        images_by[way] = decode(model, test_latents)
        ratios_by[way] = picture_psnr(images_by[way], originals).tolist()
        ratios = psnr(images_by[way], originals)
        mean, median = float(ratios.mean()), float(ratios.median())
        fid = _distance(network, images_by[way], originals)
        reconstructions.append(Reconstructions(way, mean, median, fid))
    result = Generation(
        model=experiment.recipe.model.name,
        data=experiment.data.name,
        density=_name_of(chosen),
        fitted_to=sum(map(len, fitted_latents)),
        images=len(originals),
        sample_fid=_distance(network, drawn[: len(originals)], originals),
        reconstructions=reconstructions,
        features=None
        if network is None
        else f"features of a classifier {_classifier_task(experiment)}, not Inception's",
    )
    reconstructed = ReconstructedImages(result.model, originals, labels, images_by, ratios_by)
    return result, _samples(experiment, drawn[:samples]), reconstructed


class _Steps:
    """Counts steps for a progress display."""

    def __init__(self, on_step: OnStep | None, total: int) -> None:
        self.on_step, self.total, self.done = on_step, total, 0

    def begin(self, name: str) -> None:
        if self.on_step is not None:
            self.on_step(name, self.done, self.total)
        self.done += 1


def known_latents(path: Path) -> Tensor:
    """Return the latents of training images stored in a run or a file.

    Raises:
        FileNotFoundError: If there are none.
    """
    latents = kept_latents(path)
    if latents is None:
        raise FileNotFoundError(
            f"{path} has no stored latents (latents.safetensors) to fit a density to; give the "
            "folder of its data set with --root, or train it again"
        )
    return latents


@torch.no_grad()
def generate_without_data(
    run: RecipeModel,
    device: torch.device,
    folder: Path,
    *,
    samples: int = 64,
    density: AnyDensity | None = None,
    latents: int = 2000,
    seed: int = 0,
) -> tuple[Generation, Samples]:
    """Draw samples from a density fitted to the latents stored in `folder`, without a data set."""
    model = _checked(run)
    known = known_latents(folder)[:latents].to(device)
    chosen = _chosen_density(run, density)
    fitted = fit_density(chosen, known, seed=seed)
    drawn = decode(model, fitted.sample(samples, seed=seed).to(device))
    result = Generation(
        model=run.recipe.model.name,
        data=run.recipe.data.name,
        density=_name_of(chosen),
        fitted_to=len(known),
        images=0,
        sample_fid=None,
        reconstructions=[],
        features=None,
    )
    return result, _samples(run, drawn)


def _chosen_density(run: RecipeModel, requested: AnyDensity | None) -> AnyDensity:
    own: AnyDensity = getattr(run.task, "density", "gmm")
    return own if requested is None else requested


def _name_of(density: AnyDensity) -> str:
    return density if isinstance(density, str) else str(density["name"])


def _checked(run: RecipeModel) -> EquilibriumDecoder | Autoencoder:
    if not isinstance(run.model, EquilibriumDecoder | Autoencoder):
        raise TypeError(
            f"{run.recipe.model.name} is not a generator or an autoencoder; give the run of one "
            "(equilibria train mnist-generator)"
        )
    return run.model


def _samples(run: RecipeModel, drawn: Tensor) -> Samples:
    return Samples(run.recipe.model.name, run.recipe.data.name, drawn)


def _training_images(experiment: Experiment, count: int) -> tuple[Tensor, Tensor]:
    """Return images and labels at evenly spaced places of the training images."""
    training = experiment.training
    return fetch_readable(training, evenly_spread(training, count))


def _classifier_task(experiment: Experiment) -> str:
    """Describe how the classifier behind the FID was trained."""
    data = experiment.data
    if data.kind == "classification" and data.num_classes > 1:
        return f"trained on {data.name}"
    return f"trained to recognize rotations of images of {data.name}"


def _turned(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return images rotated by 0°, 90°, 180°, and 270°, and their rotations (Gidaris et al., 2018).

    The rotations replace missing classes. Images that are not square are rotated by 180° only.
    """
    turns = range(4) if images.shape[2] == images.shape[3] else (0, 2)
    rotated = [torch.rot90(images, turn, (2, 3)) for turn in turns]
    return torch.cat(rotated), torch.arange(len(rotated)).repeat_interleave(len(images))


def _feature_network(
    experiment: Experiment, folder: Path | None, device: torch.device
) -> FeatureNetwork:
    """Return the classifier behind the FID; it is trained once and stored in the run's folder."""
    data = experiment.data
    labelled = data.kind == "classification" and data.num_classes > 1
    # A model that is a single file has no folder to store it in.
    is_stored = folder is not None and folder.is_dir()
    file = folder / "feature_network.safetensors" if folder is not None and is_stored else None
    turns = 4 if data.image_shape[1] == data.image_shape[2] else 2
    classes = data.num_classes if labelled else turns
    if file is not None and file.is_file():
        network = FeatureNetwork(data.channels, classes)
        load_weights(network, file)
        return network.to(device).eval()
    images, labels = _training_images(experiment, FEATURE_IMAGES)
    if not labelled:
        images, labels = _turned(images)
    network = train_feature_network(images.to(device), labels.to(device), num_classes=classes)
    if file is not None:
        save_weights(network, file)
    return network


def _distance(network: FeatureNetwork | None, drawn: Tensor, images: Tensor) -> float | None:
    if network is None or len(images) < 2:
        return None
    return frechet_distance(network.features(drawn), network.features(images))
