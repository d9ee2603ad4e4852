"""Pictures of finished runs, as JIIO's figures show them."""

from __future__ import annotations

import io
from collections.abc import Callable

import torch
from torch import Tensor

from equilibria.data import Batches
from equilibria.inputs import answer, is_generator, picture_of, restore
from equilibria.models import Autoencoder
from equilibria.papers.measures import DAMAGE_SEED, DAMAGES, RIDGE, timed_searches
from equilibria.report.figures import figure_png, image_grid_png
from equilibria.report.generation import generate
from equilibria.tasks import ImageRestoration
from equilibria.training import Experiment

SHOWN = 12
TIMED = 16
BUDGETS = (2, 5, 10, 20, 40, 80)
ENGINES = ("secant", "anderson", "anderson2", "broyden", "damped", "official", "adam", "adam-warm")


def generated(experiment: Experiment, device: torch.device) -> bytes:
    """Originals, their reconstructions, and samples (Figures 2, 5 and 6)."""
    _, samples, reconstructions = generate(
        experiment, device, samples=48, latents=500, images=32, judge=False
    )
    return _stacked([reconstructions, samples])


@torch.no_grad()
def restored(experiment: Experiment, device: torch.device) -> bytes:
    """Originals, what was measured, what was restored; a generator for every damage (7 to 12)."""
    task, model = experiment.task, experiment.model.eval()
    damages = [task.damage] if isinstance(task, ImageRestoration) else list(DAMAGES.values())
    images = next(iter(Batches(experiment.test, SHOWN)))[0].to(device)
    rows: list[Tensor] = [images]
    for damage in damages:
        seen = damage.corrupt(images, torch.Generator().manual_seed(DAMAGE_SEED))
        picture = picture_of(seen.measurement, seen.measured, images.shape[2:])
        if isinstance(task, ImageRestoration) and not is_generator(model):
            made = answer(model, seen)
        elif is_generator(model) or isinstance(model, Autoencoder):
            made = restore(model, seen.measured, seen.measurement, ridge=RIDGE).images
        else:
            raise TypeError(f"{type(model).__name__} restores no images")
        rows += [made] if picture is None else [picture, made]
    return image_grid_png(rows)


def costs(experiment: Experiment, device: torch.device) -> bytes:
    """The true loss over processor time and over iterations, engine by engine (3 and 4)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    searches = [(engine, iterations) for engine in ENGINES for iterations in BUDGETS]
    found = timed_searches(experiment, device, TIMED, searches)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for engine in ENGINES:
        seconds, losses = zip(*(found[engine, iterations] for iterations in BUDGETS), strict=True)
        times = [1000 * value for value in seconds]
        left.plot(times, losses, marker="o", markersize=3, label=engine)
        right.plot(BUDGETS, losses, marker="o", markersize=3)
    left.set(xlabel="ms of processor time an image", ylabel="true loss", xscale="log", yscale="log")
    right.set(xlabel="iterations", xscale="log")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    right.set_xticks(BUDGETS, [str(count) for count in BUDGETS])
    left.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
    return figure_png(figure, 120)


def _stacked(pictures: list[bytes]) -> bytes:
    """Pictures under each other."""
    from PIL import Image

    opened = [Image.open(io.BytesIO(picture)) for picture in pictures]
    width, gap = max(image.width for image in opened), 12
    height = sum(image.height for image in opened) + gap * (len(opened) - 1)
    sheet = Image.new(opened[0].mode, (width, height), "white")
    top = 0
    for image in opened:
        sheet.paste(image, (0, top))
        top += image.height + gap
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    return buffer.getvalue()


PICTURES: dict[str, Callable[[Experiment, torch.device], bytes]] = {
    "generated": generated,
    "restored": restored,
    "costs": costs,
}
"""What is drawn of a finished run, by name: a PNG."""
