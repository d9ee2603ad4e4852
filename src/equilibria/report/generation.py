"""What a trained generator can do: samples, reconstructions, and how good they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from equilibria.report.sheets import Sheet, SheetRow, class_titles, compared
from equilibria.tasks import Reconstruction
from equilibria.tasks.image_quality import (
    FeatureNetwork,
    frechet_distance,
    psnr,
    train_feature_network,
)
from equilibria.tasks.images import latents_of
from equilibria.training import load_weights, save_weights
from equilibria.training.experiment import Experiment, RecipeModel
from equilibria.training.packed import kept_latents

AnyDensity: TypeAlias = "str | Mapping[str, Any]"
"""A name, or a mapping with a name and options."""
BATCH = 256
COLUMNS = 10
"""Images in a row of a sheet."""
OnStep: TypeAlias = Callable[[str, int, int], None]
"""Is told what is done next, and how many of how many steps are over."""
FEATURE_IMAGES = 10_000
"""Training images that the classifier behind the FID is trained on, at most."""


@dataclass(frozen=True)
class Reconstructions:
    """Test images, drawn again from their latents."""

    latents_by: str
    """"encoder" or "JIIO"."""
    psnr: float
    median_psnr: float
    fid: float | None


@dataclass(frozen=True)
class Generation:
    """What a generator can do, in numbers."""

    model: str
    data: str
    density: str
    fitted_to: int
    """Training images whose latents the density was fitted to."""
    images: int
    """Test images that are reconstructed, and samples that are compared with them."""
    sample_fid: float | None
    reconstructions: list[Reconstructions]
    features: str | None
    """What the FIDs are distances of; None where they were not asked for."""


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
) -> tuple[Generation, Sheet, Sheet]:
    """Fit a density to the latents of training images, sample from it, reconstruct test images.

    What that gives in numbers; a sheet of the samples; and one of test images above what was made
    of their latents, a row for each way to find those.

    density: a name, or a mapping with a name and options; None: what the task of the run says.
    folder: of the run, where the classifier behind the FID is kept; None: it is trained anew.
    judge: measure the FID; without it no classifier is needed.
    search: by which JIIO finds latents of an autoencoder; None: one without a ridge.
    known: latents of training images by the same weights, as the run keeps them. Where they are as
        many as are asked for, none are searched.
    on_step: is told what is done next, and how many of how many batches of images are done.
    """
    model, task = _checked(experiment), experiment.task
    training = experiment.training
    originals, labels = experiment.some_test_images(images)
    originals = originals.to(device)
    wanted = evenly_spread(training, latents)
    is_known = known is not None and len(known) == len(wanted)
    chunks = () if is_known else torch.split(wanted, BATCH)
    tests = torch.split(originals, BATCH)
    searches = not isinstance(generator_of(model), ExplicitGenerator)
    steps = _Steps(on_step, len(chunks) + searches * len(tests) + judge)

    # In the way that the model was trained with; a batch at a time, as no memory holds all images.
    found = [] if known is None or not is_known else [known.to(device)]
    for chunk in chunks:
        steps.begin("latents of training images")
        found.append(latents_of(model, task, fetch_readable(training, chunk)[0].to(device)))
    chosen = _chosen_density(experiment, density)
    fitted = fit_density(chosen, torch.cat(found), seed=seed)
    count = max(samples, len(originals))
    drawn = decode(model, fitted.sample(count, seed=seed).to(device))
    network = None
    if judge:
        steps.begin("a classifier for the FID")
        network = _feature_network(experiment, folder, device)
    ways = {"encoder": latents_of(model, task, originals)} if isinstance(model, Autoencoder) else {}
    if searches:
        searching = task if search is None or isinstance(task, Reconstruction) else search
        again = []
        for some in tests:
            steps.begin("latents of test images")
            again.append(latents_of(model, searching, some, searched=True))
        ways["JIIO"] = torch.cat(again)
    rows = [SheetRow("original", originals[:COLUMNS])]
    reconstructions = []
    for way, latents_found in ways.items():
        row = decode(model, latents_found)
        rows.append(compared(f"latents by {way}", row, originals[:COLUMNS]))
        ratios = psnr(row, originals)
        mean, median = float(ratios.mean()), float(ratios.median())
        fid = _distance(network, row, originals)
        reconstructions.append(Reconstructions(way, mean, median, fid))
    result = Generation(
        model=experiment.recipe.model.name,
        data=experiment.data.name,
        density=_name_of(chosen),
        fitted_to=sum(map(len, found)),
        images=len(originals),
        sample_fid=_distance(network, drawn[: len(originals)], originals),
        reconstructions=reconstructions,
        features=None
        if network is None
        else f"features of a classifier {_learned(experiment)}, not Inception's",
    )
    name, data = experiment.recipe.model.name, experiment.data
    titles, heading = class_titles(data, labels), f"{name} on test images of {data.name}"
    return result, _samples(experiment, drawn[:samples]), Sheet(rows, titles, heading)


class _Steps:
    """Counts what takes long, for who shows how far it is."""

    def __init__(self, on_step: OnStep | None, total: int) -> None:
        self.on_step, self.total, self.done = on_step, total, 0

    def begin(self, what: str) -> None:
        if self.on_step is not None:
            self.on_step(what, self.done, self.total)
        self.done += 1


def known_latents(place: Path) -> Tensor:
    """Those that a run or a file keeps of training images; an error where there are none."""
    latents = kept_latents(place)
    if latents is None:
        raise FileNotFoundError(
            f"{place}: without the latents that a run of a generator or an autoencoder keeps "
            "(latents.safetensors) there is nothing to fit a density to; name the folder of its "
            "data set with --root, or train it again"
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
) -> tuple[Generation, Sheet]:
    """Samples alone: the density is fitted to latents that the run in `folder` keeps."""
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


def _chosen_density(run: RecipeModel, asked: AnyDensity | None) -> AnyDensity:
    own: AnyDensity = getattr(run.task, "density", "gmm")
    return own if asked is None else asked


def _name_of(density: AnyDensity) -> str:
    return density if isinstance(density, str) else str(density["name"])


def _checked(run: RecipeModel) -> EquilibriumDecoder | Autoencoder:
    if not isinstance(run.model, EquilibriumDecoder | Autoencoder):
        raise TypeError(
            f"{run.recipe.model.name} draws no images: name the run of a generator or an "
            "autoencoder (equilibria train mnist-generator)"
        )
    return run.model


def _samples(run: RecipeModel, drawn: Tensor) -> Sheet:
    lines = enumerate(torch.split(drawn, COLUMNS))
    rows = [SheetRow("" if place else "samples", some) for place, some in lines]
    return Sheet(rows, heading=f"{run.recipe.model.name}, trained on {run.recipe.data.name}")


def _training_images(experiment: Experiment, count: int) -> tuple[Tensor, Tensor]:
    """Images and labels, spread evenly over the training images."""
    training = experiment.training
    return fetch_readable(training, evenly_spread(training, count))


def _learned(experiment: Experiment) -> str:
    """What the classifier behind the FID tells apart."""
    data = experiment.data
    if data.kind == "classification" and data.num_classes > 1:
        return f"trained on {data.name}"
    return f"that tells by how much images of {data.name} were turned"


def _turned(images: Tensor) -> tuple[Tensor, Tensor]:
    """Every image turned by 0°, 90°, 180° and 270°, and by how much (Gidaris et al., 2018).

    What images without classes can be told apart by; oblong ones are turned by 180° alone.
    """
    turns = range(4) if images.shape[2] == images.shape[3] else (0, 2)
    every = [torch.rot90(images, turn, (2, 3)) for turn in turns]
    return torch.cat(every), torch.arange(len(every)).repeat_interleave(len(images))


def _feature_network(
    experiment: Experiment, folder: Path | None, device: torch.device
) -> FeatureNetwork:
    """The classifier behind the FID: trained once, then read from the run's folder."""
    data = experiment.data
    labelled = data.kind == "classification" and data.num_classes > 1
    kept = folder is not None and folder.is_dir()  # not of a model that is one file
    file = folder / "feature_network.safetensors" if folder is not None and kept else None
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
