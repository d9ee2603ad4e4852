"""Comparison of the photo prior with common restoration methods on the same damaged photographs.

    equilibria reproduce photographs tasks=[denoise-25] draws=3
    equilibria reproduce photographs tasks=[denoise-25] networks.DnCNN=runs/dncnn
    equilibria reproduce photographs pictures=chosen-on tasks=[inpaint] levels=[0.04,0.08]
    equilibria reproduce photographs variation=true pictures=chosen-on
    equilibria reproduce photographs pictures=bsd68 tasks=[denoise-25] draws=1
    equilibria reproduce photographs pictures=held-out tasks=[denoise-25] prior=runs/photo-prior
    equilibria reproduce photographs summarize=true   # table of earlier measurements

Measurements are appended to OUTPUT/runs/photographs.jsonl; the table is built from that file.

The test pictures are samples of scikit-image and test images of CamVid. They were used neither for
training nor for the choice of settings. Settings are chosen on the two samples of scikit-learn and
on validation images of CamVid. `pictures=bsd68` measures on the published test set, whole and in
gray, beside published results; `pictures=held-out` on the photographs of BSD400 that no prior was
trained on, in the same way. Needs the package scikit-image, and for BM3D bm3d (extra "bench").
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

import equilibria as eq
from equilibria.data import load_dataset
from equilibria.data.image_files import as_pixels
from equilibria.data.source import evenly_spread
from equilibria.models import photo_prior
from equilibria.models.restorers.photo import PhotoDenoiser
from equilibria.papers.runner import RUNS
from equilibria.papers.studies.study import Study, StudyOutcome, Work
from equilibria.registry import check_at_least_one, check_choice
from equilibria.restoration import (
    Damage,
    Deblurring,
    Demosaicing,
    Denoising,
    PhotoRestorer,
    RestorationProblem,
    Scattering,
    SuperResolution,
    answer_in_tiles,
)
from equilibria.restoration.photo import PRIOR_LEVEL
from equilibria.restoration.proof import RestoredPhotos
from equilibria.restoration.total_variation import least_variation
from equilibria.tasks.image_quality import picture_psnr

SAMPLES = ("camera", "astronaut", "coffee", "chelsea", "rocket", "brick", "grass", "gravel")
STREETS = {"test": 6, "chosen-on": 4}
WEIGHTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.78, 0.85, 0.92, 1.0, 1.1, 1.2, 1.35, 1.5)
"""Weights of total variation in denoising, in units of the noise. The best one per picture counts,
which only an oracle can choose."""
SMALL_WEIGHTS = tuple(1e-4 * 2 ** (place / 2) for place in range(14))
"""Weights of total variation for other damage."""
DENOISING_STEPS, OTHER_STEPS = 200, 1000
"""Iterations of total variation for noise and for other damage, which converges more slowly."""
TASKS: dict[str, Damage] = {
    **{f"denoise-{noise}": Denoising(noise / 255) for noise in (15, 25, 50)},
    "deblur": Deblurring(1.5, 0.01),
    "inpaint": Scattering(0.7, 1 / 255),
    "superres": SuperResolution(2, 1 / 255),
    "demosaic": Demosaicing(1 / 255),
}
DENOISING = [task for task in TASKS if task.startswith("denoise")]
OURS = "photo prior"
PictureSet = Literal["test", "chosen-on", "held-out", "bsd68"]
BERKELEY = ("held-out", "bsd68")
"""Sets of pictures that are measured whole and in gray."""
PUBLISHED: dict[str, tuple[float | None, float | None, float | None]] = {
    "BM3D (Dabov et al., 2007)": (31.07, 28.57, 25.62),
    "WCRR-NN (Goujon et al., 2023)": (31.21, 28.68, None),
    "DnCNN-S (Zhang et al., 2017), no objective": (31.73, 29.23, 26.23),
    "DRUNet (Zhang et al., 2021), no objective": (31.91, 29.48, 26.59),
}
"""Published PSNR on all of BSD68 for noise of 15, 25 and 50 gray levels."""
RestoreFunction = Callable[[RestorationProblem, Tensor], Tensor | RestoredPhotos]


@dataclass(frozen=True)
class RestorationMethod:
    """A restoration method.

    Attributes:
        restore: Function of the problem and the clean image, which only oracles use.
        parameters: Number of learned parameters, if any.
    """

    restore: RestoreFunction
    parameters: int | None = None


def photographs(
    side: int, gray: bool, which: PictureSet = "test", count: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the center of each photograph, (1, channels, side, side), or whole photographs.

    Args:
        side: Height and width of the center.
        gray: Whether to convert to one channel.
        which: Set of pictures; those of `BERKELEY` are whole, and must be gray.
        count: Number of evenly spread pictures of `BERKELEY`; by default all.
    """
    if which in BERKELEY:
        if not gray:
            raise ValueError(f"pictures={which} are gray: leave out the task demosaic")
        data = load_dataset("bsd68" if which == "bsd68" else "bsd400", gray=True)
        for place in evenly_spread(data.test, count or len(data.test)).tolist():
            yield f"{which}/{place}", data.test.fetch(torch.tensor([place]))[0]
        return
    for name, picture in _pictures(which).items():
        pixels = as_pixels(torch.from_numpy(np.array(picture)))
        image = pixels[None].expand(3, -1, -1) if pixels.dim() == 2 else pixels.permute(2, 0, 1)
        if gray:
            image = (image * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(
                0, keepdim=True
            )
        elif pixels.dim() == 2:
            continue
        top, left = (max(0, size - side) // 2 for size in image.shape[1:])
        yield name, image[None, :, top : top + side // 2 * 2, left : left + side // 2 * 2]


def _pictures(which: str) -> dict[str, Any]:
    from PIL import Image
    from skimage import data
    from sklearn.datasets import load_sample_image

    if which == "test":
        pictures = {name: getattr(data, name)() for name in SAMPLES}
    else:
        pictures = {name: load_sample_image(f"{name}.jpg") for name in ("china", "flower")}
    part = "test" if which == "test" else "val"
    folder = Path(os.environ.get("EQUILIBRIA_DATA", "data")) / "camvid" / part
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    for place in range(STREETS[which] if files else 0):
        file = files[place * len(files) // STREETS[which]]
        pictures[f"camvid/{file.stem}"] = np.asarray(Image.open(file).convert("RGB"))
    return pictures


def methods(
    task: str, networks: Mapping[str, Path], levels: Sequence[float], run: Path | None = None
) -> dict[str, RestorationMethod]:
    """Return the methods that are compared on a task, by name.

    Args:
        task: Key of `TASKS`.
        networks: Folders of runs of trained denoisers, by name.
        levels: Levels of the prior to compare instead of other methods.
        run: Folder of the run of a prior in place of the shipped one.
    """
    prior = photo_prior() if run is None else cast(PhotoDenoiser, eq.load(run)).prior
    parameters = sum(p.numel() for p in prior.parameters())

    def ours(level: float) -> RestoreFunction:
        restorer = PhotoRestorer(prior, strength=1.0, level=level)
        return lambda problem, clean: restorer.restore(problem)

    named = {OURS: PRIOR_LEVEL} | {f"{OURS}, level {level:g}": level for level in levels}
    compared = {name: RestorationMethod(ours(level), parameters) for name, level in named.items()}
    if levels:
        return compared
    compared["total variation, best weight"] = RestorationMethod(
        lambda problem, clean: best_variation(problem, clean, weights_for(task, problem.noise))
    )
    if not task.startswith("denoise"):
        return compared
    compared |= {name: RestorationMethod(method) for name, method in _denoisers().items()}
    for name, run in networks.items():
        model = eq.load(run).eval()
        count = sum(p.numel() for p in model.parameters())
        compared[name] = RestorationMethod(_network(model), count)
    return compared


def _network(model: torch.nn.Module) -> RestoreFunction:
    def method(problem: RestorationProblem, clean: Tensor) -> Tensor:
        with torch.no_grad():
            return answer_in_tiles(model, problem)

    return method


def weights_for(task: str, noise: float) -> list[float]:
    """Return the weights of total variation to try for a task."""
    return [w * noise for w in WEIGHTS] if task.startswith("denoise") else list(SMALL_WEIGHTS)


def best_variation(
    problem: RestorationProblem, clean: Tensor, weights: Sequence[float], longer: int = 1
) -> Tensor:
    """Restore by total variation with the best weight for the picture, chosen by an oracle.

    Args:
        problem: Measurement of one picture.
        clean: The original, with which the oracle compares.
        weights: Weights to choose from.
        longer: Factor of the number of iterations.
    """
    iterations = longer * (DENOISING_STEPS if problem.about.keeps_all else OTHER_STEPS)
    start = problem.about.first_picture(problem.measured)
    restored = [
        least_variation(problem.measured, problem.measurement, weight, start, iterations)  # type: ignore[arg-type]
        for weight in weights
    ]
    return max(restored, key=lambda images: float(picture_psnr(images, clean)))


def check_variation(task: str, side: int, which: PictureSet) -> str:
    """Measure the gain of total variation from a denser grid of weights and more iterations."""
    gains = []
    for _, clean in photographs(side, gray=task != "demosaic", which=which):
        problem = TASKS[task].corrupt(clean, torch.Generator().manual_seed(0))
        weights = weights_for(task, problem.noise)
        dense = sorted([*weights, *(math.sqrt(a * b) for a, b in pairwise(weights))])
        usual = float(picture_psnr(best_variation(problem, clean, weights), clean))
        finer = float(picture_psnr(best_variation(problem, clean, dense), clean))
        longer = float(picture_psnr(best_variation(problem, clean, weights, 2), clean))
        gains.append((finer - usual, longer - usual))
    finer, longer = np.array(gains).mean(axis=0)
    return (
        f"{task}: {finer:+.3f} dB from twice as many weights, {longer:+.3f} dB from twice the "
        "iterations"
    )


def _denoisers() -> dict[str, RestoreFunction]:
    from skimage.restoration import denoise_nl_means, denoise_wavelet

    def adapted(function: Callable[[Any, float], Any]) -> RestoreFunction:
        def method(problem: RestorationProblem, clean: Tensor) -> Tensor:
            restored = function(problem.measured[0, 0].double().numpy(), problem.noise)
            return torch.from_numpy(np.asarray(restored)).float()[None, None]

        return method

    def non_local_means(x: Any, noise: float) -> Any:
        options = {"patch_size": 5, "patch_distance": 6, "fast_mode": True}
        return denoise_nl_means(x, h=0.8 * noise, sigma=noise, **options)

    denoisers = {
        "wavelets": adapted(lambda x, noise: denoise_wavelet(x, sigma=noise, rescale_sigma=True)),
        "non-local means": adapted(non_local_means),
    }
    if importlib.util.find_spec("bm3d") is not None:
        from bm3d import bm3d

        denoisers["BM3D"] = adapted(lambda x, noise: bm3d(x, noise))
    return denoisers


def ssim(images: Tensor, clean: Tensor) -> float:
    """Return the mean structural similarity of images to the clean originals."""
    from skimage.metrics import structural_similarity

    first, second = (image[0].clamp(0, 1).double().numpy() for image in (images, clean))
    return float(structural_similarity(first, second, channel_axis=0, data_range=1.0))


def measure(
    task: str, settings: PhotographSettings, contestants: dict[str, RestorationMethod]
) -> Iterator[dict[str, Any]]:
    """Yield one record per draw, photograph, and method."""
    damage, which = TASKS[task], settings.pictures
    for draw in range(settings.draws):
        chosen = photographs(settings.side, task != "demosaic", which, settings.count)
        for place, (name, clean) in enumerate(chosen):
            # The same noise in all pictures of one size would make their errors dependent.
            seed = 1000 * draw + place if which in BERKELEY else draw
            problem = damage.corrupt(clean, torch.Generator().manual_seed(seed))
            for method, contestant in contestants.items():
                begin = time.process_time()
                result = contestant.restore(problem, clean)
                seconds = time.process_time() - begin
                proven = result.bound if isinstance(result, RestoredPhotos) else None
                restored = result.images if isinstance(result, RestoredPhotos) else result
                yield {
                    "task": task,
                    "pictures": which,
                    "picture": name,
                    "draw": draw,
                    "method": method,
                    "psnr": float(picture_psnr(restored, clean)),
                    "ssim": ssim(restored, clean),
                    "seconds": seconds,
                    "parameters": contestant.parameters,
                    "bound": None if proven is None else 255 * float(proven.max()),
                }


def summary(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of means over test pictures and draws; ± is the standard error."""
    lines = [
        "| task | method | PSNR (dB) | gain of the prior (dB) | SSIM | CPU s | parameters | "
        "largest proven bound (gray levels) |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for task, which in dict.fromkeys((row["task"], row["pictures"]) for row in rows):
        of_task = [row for row in rows if (row["task"], row["pictures"]) == (task, which)]
        ours = {_case(row): row["psnr"] for row in of_task if row["method"] == OURS}
        for method in dict.fromkeys(row["method"] for row in of_task):
            of_method = [row for row in of_task if row["method"] == method]
            if ours:
                of_method = [row for row in of_method if _case(row) in ours]
            if not of_method:
                continue
            pictures = dict.fromkeys(row["picture"] for row in of_method)
            gains = np.array(
                [
                    np.mean(
                        [ours[_case(r)] - r["psnr"] for r in of_method if r["picture"] == picture]
                    )
                    for picture in (pictures if ours else ())
                ]
            )
            error = gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
            compared = ours and method != OURS
            gain = f"{gains.mean():+.2f} ± {error:.2f}" if compared else ""
            means = [
                np.mean([row[key] for row in of_method]) for key in ("psnr", "ssim", "seconds")
            ]
            learned = of_method[0]["parameters"]
            count = f"{learned:,}" if learned else ""
            bounds = [row["bound"] for row in of_method if row["bound"] is not None]
            bound = f"{max(bounds):.2f}" if bounds else ""
            lines.append(
                f"| {task}, {len(pictures)} pictures ({which}), {len(of_method)} cases | {method} "
                f"| {means[0]:.2f} | {gain} | {means[1]:.3f} | {means[2]:.2f} | {count} | {bound} |"
            )
        if which == "bsd68" and task in DENOISING:
            for method, values in PUBLISHED.items():
                value = values[DENOISING.index(task)]
                if value is not None:
                    lines.append(
                        f"| {task}, all 68 pictures | {method}, published | {value:.2f} | | | | | |"
                    )
    return "\n".join(lines)


def _case(row: dict[str, Any]) -> tuple[str, int]:
    return row["picture"], row["draw"]


@dataclass(frozen=True)
class PhotographSettings:
    """Settings of the study.

    Args:
        tasks: Keys of `TASKS`; all of them if empty.
        only: Names of the methods to measure; all of them if empty.
        draws: Number of draws of the damage per picture.
        side: Height and width of the pictures, in pixels.
        pictures: The test pictures, those on which settings are chosen, the photographs of BSD400
            that are held out, or BSD68.
        count: Number of evenly spread pictures of BSD400 or BSD68; all of them if None.
        prior: Folder of the run of a prior; by default the prior that is shipped.
        networks: Folders of runs of trained denoisers, by their names in the table.
        levels: Levels of the prior to compare instead of other methods.
        variation: Only check whether the weights and iterations of total variation suffice.
        summarize: Only write the table of earlier measurements.
    """

    tasks: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    draws: int = 3
    side: int = 96
    pictures: PictureSet = "test"
    count: int | None = None
    prior: Path | None = None
    networks: Mapping[str, Path] = field(default_factory=dict)
    levels: tuple[float, ...] = ()
    variation: bool = False
    summarize: bool = False

    def __post_init__(self) -> None:
        check_at_least_one(count=self.count, draws=self.draws, side=self.side)
        for task in self.tasks:
            check_choice(TASKS, task=task)


def carry_out(settings: PhotographSettings, work: Work) -> StudyOutcome:
    """Restore the same damaged pictures with every method."""
    torch.set_num_threads(1)
    tasks = settings.tasks or tuple(TASKS)
    if settings.variation:
        lines = []
        for place, task in enumerate(tasks):
            work.on_progress(place, len(tasks), task)
            lines.append(check_variation(task, settings.side, settings.pictures))
        return StudyOutcome({"gains": lines}, "\n".join(f"- {line}" for line in lines))
    file = work.output / RUNS / "photographs.jsonl"
    if not settings.summarize:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as opened:
            for place, task in enumerate(tasks):
                work.on_progress(place, len(tasks), task)
                contestants = methods(task, settings.networks, settings.levels, settings.prior)
                if settings.only:
                    contestants = {
                        name: method
                        for name, method in contestants.items()
                        if name in settings.only
                    }
                for row in measure(task, settings, contestants):
                    opened.write(json.dumps(row) + "\n")
                    opened.flush()
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return StudyOutcome({"rows": rows}, summary(rows))


STUDY = Study(
    "photographs",
    "",
    "Restoration of photographs, compared with other methods",
    PhotographSettings,
    carry_out,
)
