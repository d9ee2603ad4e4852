"""Pictures of finished runs, for the figures of the papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from equilibria.analysis.generation import generate
from equilibria.analysis.saliency import grad_cam
from equilibria.data import Batches
from equilibria.inputs import Engine, get_engine
from equilibria.inputs.latents import is_generator
from equilibria.models.base import predicted_classes
from equilibria.models.generators.autoencoders import Autoencoder
from equilibria.papers.measures import DAMAGE_SEED, DAMAGES, RIDGE, timed_searches
from equilibria.report.generation import reconstruction_sheet, samples_sheet
from equilibria.report.saliency import overlaid
from equilibria.report.sheets import Sheet, SheetRow, class_titles, compared
from equilibria.report.style import (
    drawing,
    dress_axes,
    figure_png,
    legend_below,
    plain_log_axis,
    series,
)
from equilibria.restoration import restore
from equilibria.restoration.tiles import answer
from equilibria.tasks import ImageRestoration
from equilibria.tasks.image_quality import picture_psnr
from equilibria.training.experiment import Experiment

SHOWN_IMAGES = 10
TIMED_IMAGES = 16
BUDGETS = (2, 5, 10, 20, 40, 80)
ENGINES: dict[str, str | Engine] = {
    "this library's": "secant",
    "type I, safeguarded": "anderson",
    **{
        f"the paper's, {words}": get_engine("official", acceleration=acceleration)
        for words, acceleration in {
            "type I": "type-1",
            "type II": "type-2",
            "Broyden": "broyden",
            "unmixed": "none",
        }.items()
    },
    "Adam": "adam",
    "Adam, warm": "adam-warm",
}
"""Engines by their labels in the figure."""


def generated(experiment: Experiment, device: torch.device) -> bytes:
    """Draw original test images, their reconstructions, and samples (JIIO, Figures 2, 5 and 6)."""
    _, samples, reconstructed = generate(
        experiment, device, samples=30, latents=500, images=32, judge=False
    )
    sheet = reconstruction_sheet(reconstructed, experiment.data)
    return replace(sheet, rows=[*sheet.rows, *samples_sheet(samples).rows]).png()


@torch.no_grad()
def restored(experiment: Experiment, device: torch.device) -> bytes:
    """Draw original, damaged and restored test images (JIIO, Figures 7 to 12).

    Generators and autoencoders restore every damage, other models that of their task.
    """
    task, model = experiment.task, experiment.model.eval()
    damages = [task.damage] if isinstance(task, ImageRestoration) else list(DAMAGES.values())
    images, labels = next(iter(Batches(experiment.test, SHOWN_IMAGES)))
    images = images.to(device)
    rows = [SheetRow("original", images)]
    for damage in damages:
        damaged = damage.corrupt(images, torch.Generator().manual_seed(DAMAGE_SEED))
        picture = damaged.picture(tuple(images.shape[2:]))
        if isinstance(task, ImageRestoration) and not is_generator(model):
            result = answer(model, damaged)
        elif is_generator(model) or isinstance(model, Autoencoder):
            result = restore(model, damaged.measured, damaged.measurement, ridge=RIDGE).images
        else:
            raise TypeError(
                f"{type(model).__name__} cannot restore images: use a generator, an autoencoder or "
                "a run of an image restoration task"
            )
        if picture is not None:
            rows.append(compared(damage.words, picture, picture_psnr(picture, images).tolist()))
        rows.append(compared("restored", result, picture_psnr(result, images).tolist()))
    data = experiment.data
    heading = f"{experiment.recipe.model.name} on test images of {data.name}"
    return Sheet(rows, class_titles(data, labels), heading).png()


@drawing()
def costs(experiment: Experiment, device: torch.device) -> bytes:
    """Draw the true loss over processor time and iterations of each engine (JIIO, Figures 3, 4)."""
    from matplotlib.figure import Figure

    searches = [(engine, iterations) for engine in ENGINES.values() for iterations in BUDGETS]
    measurements = iter(timed_searches(experiment, device, TIMED_IMAGES, searches))
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, engine in enumerate(ENGINES):
        seconds, losses = zip(*(next(measurements) for _ in BUDGETS), strict=True)
        style = {**series(place), "markersize": 5, "linewidth": 1.8}
        left.plot([1000 * value for value in seconds], losses, label=engine, **style)
        right.plot(BUDGETS, losses, **style)
    left.set(xlabel="processor time per image (ms)", ylabel="true loss")
    right.set(xlabel="iterations")
    for axes in (left, right):
        plain_log_axis(axes, "x")
        plain_log_axis(axes)
        dress_axes(axes)
    right.set_xticks(BUDGETS, [str(count) for count in BUDGETS])
    legend_below(figure, left.get_legend_handles_labels()[0], 4)
    return figure_png(figure)


def saliency(experiment: Experiment, device: torch.device) -> bytes:
    """Draw test images and their Grad-CAM (GEQ, Figure 3)."""
    images, labels = experiment.some_test_images(SHOWN_IMAGES)
    data, model = experiment.data, experiment.model
    images = images.to(device)
    maps, predicted = grad_cam(model, images), predicted_classes(model(images).detach())
    names = [data.class_names[label] if label >= 0 else "no answer" for label in predicted.tolist()]
    rows = [SheetRow("image", images), SheetRow("Grad-CAM", overlaid(images, maps), names)]
    heading = (
        f"{experiment.recipe.model.name} on test images of {data.name}: true class, predicted class"
    )
    return Sheet(rows, class_titles(data, labels), heading).png()


PICTURES: dict[str, Callable[[Experiment, torch.device], bytes]] = {
    "generated": generated,
    "restored": restored,
    "costs": costs,
    "saliency": saliency,
}
"""Functions that draw a PNG of a finished run, by name."""
