"""`equilibria generate`: new images of a trained generator, and how good they are."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from equilibria.cli.console import fail, print_table
from equilibria.generative import (
    FeatureNetwork,
    decode,
    decoder_of,
    fit_density,
    frechet_distance,
    in_rows,
    psnr,
    sheet_png,
    train_feature_network,
)
from equilibria.models.autoencoders import Autoencoder
from equilibria.models.decoder import EquilibriumDecoder
from equilibria.tasks.reconstruction import Reconstruction
from equilibria.training import (
    Experiment,
    RunFolder,
    choose_device,
    load_weights,
    save_weights,
    trained,
    write_atomically,
)

BATCH = 256
COLUMNS = 16
"""Images in a row of a sheet."""
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
    """What the FIDs are distances of; None where the data set has no classes to learn it from."""


@dataclass(frozen=True)
class GenerationRequest:
    """What `equilibria generate` was asked for."""

    folder: Path
    output: Path
    samples: int
    density: str
    latents: int
    images: int
    best: bool
    seed: int
    device_name: str
    as_json: bool


def run_generation(request: GenerationRequest) -> None:
    """Fit a density to latents, draw samples and reconstructions, and measure both."""
    try:
        device = choose_device(request.device_name)
        experiment = trained(
            request.folder, device=device, weights="best" if request.best else "last"
        )
        found = generate(experiment, request, device)
    except (OSError, TypeError, ValueError) as error:
        fail(str(error))
    if request.as_json:
        print(json.dumps(asdict(found), indent=2, allow_nan=False))
        return
    console = Console(highlight=False)
    print_table(console, f"{found.model} on {found.data}", _rows(found))
    if found.features is not None:
        console.print(f"FID: {found.features}; {found.images} images a side.", soft_wrap=True)
    for path in (request.output, reconstruction_file(request.output)):
        console.print(f"Drawn: {path}", soft_wrap=True)


@torch.no_grad()
def generate(
    experiment: Experiment, request: GenerationRequest, device: torch.device
) -> Generation:
    """The sheets of a run, written, and its figures."""
    model = experiment.model
    if not isinstance(model, EquilibriumDecoder | Autoencoder):
        raise TypeError(
            f"{experiment.recipe.model.name} draws no images: name the run of a generator or an "
            "autoencoder (equilibria train mnist-generator)"
        )
    if experiment.normalise is not None:
        raise ValueError("images are drawn with values in [0, 1]: train with data.normalise=false")
    known = _some(experiment, request.latents, test=False)[0].to(device)
    images = _some(experiment, request.images, test=True)[0].to(device)
    density = fit_density(request.density, _latents(experiment, known), seed=request.seed)
    count = max(request.samples, len(images))
    drawn = decode(model, density.sample(count, seed=request.seed).to(device))
    network = _feature_network(experiment, RunFolder(request.folder), device)
    ways = {"encoder": _encoded(model, images)} if isinstance(model, Autoencoder) else {}
    if _has_equilibrium(model):
        ways["JIIO"] = _searched(experiment, images)
    write_atomically(request.output, sheet_png(in_rows(drawn[: request.samples], COLUMNS)))
    rows = [images, *(decode(model, latents) for latents in ways.values())]
    shown = sheet_png([row[:COLUMNS] for row in rows])
    write_atomically(reconstruction_file(request.output), shown)
    return Generation(
        model=experiment.recipe.model.name,
        data=experiment.data.name,
        density=request.density,
        fitted_to=len(known),
        images=len(images),
        sample_fid=_distance(network, drawn[: len(images)], images),
        reconstructions=[
            _judged(way, row, images, network) for way, row in zip(ways, rows[1:], strict=True)
        ],
        features=None
        if network is None
        else f"features of a classifier trained on {experiment.data.name}, not Inception's",
    )


def reconstruction_file(output: Path) -> Path:
    """Where the originals stand above their reconstructions."""
    return output.with_name(f"{output.stem}-reconstructions{output.suffix}")


def _latents(experiment: Experiment, images: Tensor) -> Tensor:
    """The latents in the way that the model was trained with."""
    model = experiment.model
    if isinstance(model, Autoencoder):
        return _encoded(model, images)
    return _searched(experiment, images)


def _encoded(model: Autoencoder, images: Tensor) -> Tensor:
    return torch.cat([model.encode(some) for some in torch.split(images, BATCH)])


def _searched(experiment: Experiment, images: Tensor) -> Tensor:
    """By JIIO: as the run's task says, or on a decoder that was trained with an encoder."""
    task, model = experiment.task, experiment.model
    search = task if isinstance(task, Reconstruction) else Reconstruction(ridge=0.0)
    found = []
    for some in torch.split(images, BATCH):
        start = model.encode(some) if isinstance(model, Autoencoder) else None
        found.append(search.find(model, some, start=start, training=False).x)
    return torch.cat(found)


def _has_equilibrium(model: EquilibriumDecoder | Autoencoder) -> bool:
    try:
        decoder_of(model)
    except TypeError:
        return False
    return True


def _some(experiment: Experiment, count: int, *, test: bool) -> tuple[Tensor, Tensor]:
    """Images and labels, spread evenly over the test or the training images."""
    source = experiment.test if test else experiment.training
    count = min(count, len(source))
    return source.fetch(torch.linspace(0, len(source) - 1, count).round().long())


def _feature_network(
    experiment: Experiment, run: RunFolder, device: torch.device
) -> FeatureNetwork | None:
    """The classifier behind the FID: trained once, then read from the run's folder."""
    data = experiment.data
    if data.kind != "classification" or data.num_classes < 2:
        return None
    file = run.path / "feature_network.safetensors"
    if file.is_file():
        network = FeatureNetwork(data.channels, data.num_classes)
        load_weights(network, file)
        return network.to(device).eval()
    images, labels = _some(experiment, FEATURE_IMAGES, test=False)
    network = train_feature_network(
        images.to(device), labels.to(device), num_classes=data.num_classes
    )
    save_weights(network, file)
    return network


def _judged(
    way: str, drawn: Tensor, images: Tensor, network: FeatureNetwork | None
) -> Reconstructions:
    ratios = psnr(drawn, images)
    return Reconstructions(
        latents_by=way,
        psnr=float(ratios.mean()),
        median_psnr=float(ratios.median()),
        fid=_distance(network, drawn, images),
    )


def _distance(network: FeatureNetwork | None, drawn: Tensor, images: Tensor) -> float | None:
    if network is None or len(images) < 2:
        return None
    return frechet_distance(network.features(drawn), network.features(images))


def _rows(found: Generation) -> list[tuple[str, str]]:
    rows = [(f"Density of {found.fitted_to} latents", found.density)]
    if found.sample_fid is not None:
        rows.append(("FID of samples", f"{found.sample_fid:.2f}"))
    for some in found.reconstructions:
        by = f"reconstructions ({some.latents_by})"
        rows.append((f"PSNR of {by}, mean (dB)", f"{some.psnr:.2f}"))
        rows.append((f"PSNR of {by}, median (dB)", f"{some.median_psnr:.2f}"))
        if some.fid is not None:
            rows.append((f"FID of {by}", f"{some.fid:.2f}"))
    return rows
