"""The photo prior beside what people use: the same damage of the same photographs for all.

    equilibria reproduce photographs tasks=[denoise-25] draws=3
    equilibria reproduce photographs tasks=[denoise-25] networks.DnCNN=runs/dncnn
    equilibria reproduce photographs pictures=chosen-on tasks=[inpaint] levels=[0.04,0.08]
    equilibria reproduce photographs variation=true pictures=chosen-on
    equilibria reproduce photographs summarize=true   # the table of what was measured

Measurements are appended to OUTPUT/runs/photographs.jsonl, and the table is made from that file.

Pictures that nobody trained on and nothing was chosen on: samples of scikit-image and test images
of CamVid. What has to be chosen is chosen on others, scikit-learn's two and validation images of
CamVid. Needs the packages scikit-image and bm3d (extra "bench").
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import equilibria as eq
from equilibria.models import photo_prior
from equilibria.papers.runner import RUNS
from equilibria.papers.studies.study import Found, Study, Work
from equilibria.registry import check_choice
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
from equilibria.restoration.total_variation import least_variation
from equilibria.tasks.image_quality import picture_psnr

SAMPLES = ("camera", "astronaut", "coffee", "chelsea", "rocket", "brick", "grass", "gravel")
STREETS = {"test": 6, "chosen-on": 4}
WEIGHTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.78, 0.85, 0.92, 1.0, 1.1, 1.2, 1.35, 1.5)
"""Of total variation in denoising, over the noise; the best for each picture counts (an oracle)."""
SMALL_WEIGHTS = tuple(1e-4 * 2 ** (place / 2) for place in range(14))
"""The same where other damage is undone."""
STEPS, MANY_STEPS = 200, 1000
"""Of total variation, against noise and against other damage, which takes longer."""
TASKS: dict[str, Damage] = {
    **{f"denoise-{noise}": Denoising(noise / 255) for noise in (15, 25, 50)},
    "deblur": Deblurring(1.5, 0.01),
    "inpaint": Scattering(0.7, 1 / 255),
    "superres": SuperResolution(2, 1 / 255),
    "demosaic": Demosaicing(1 / 255),
}
OURS = "photo prior"
RestoreFunction = Callable[[RestorationProblem, Tensor], Tensor]


@dataclass(frozen=True)
class RestorationMethod:
    """A restoration method and its number of learned parameters."""

    restore: RestoreFunction
    parameters: int | None = None
    """That were learned."""


def photographs(side: int, gray: bool, which: str = "test") -> Iterator[tuple[str, Tensor]]:
    """The middle of each photograph, (1, channels, side, side)."""
    for name, picture in _pictures(which).items():
        pixels = torch.from_numpy(np.array(picture)).float() / 255
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
    task: str, networks: Mapping[str, Path], levels: Sequence[float]
) -> dict[str, RestorationMethod]:
    """Return the methods that are compared on a task, by name."""
    prior = photo_prior()
    parameters = sum(p.numel() for p in prior.parameters())

    def ours(level: float) -> RestoreFunction:
        restorer = PhotoRestorer(prior, strength=1.0, level=level)
        return lambda seen, clean: restorer.restore(seen).images

    named = {OURS: PRIOR_LEVEL} | {f"{OURS}, level {level:g}": level for level in levels}
    found = {name: RestorationMethod(ours(level), parameters) for name, level in named.items()}
    if levels:
        return found
    found["total variation, best weight"] = RestorationMethod(
        lambda seen, clean: least_of_all(seen, clean, weights_for(task, seen.noise))
    )
    if not task.startswith("denoise"):
        return found
    found |= {name: RestorationMethod(method) for name, method in _of_noise().items()}
    for name, run in networks.items():
        model = eq.load(run).eval()
        found[name] = RestorationMethod(_network(model), sum(p.numel() for p in model.parameters()))
    return found


def _network(model: torch.nn.Module) -> RestoreFunction:
    def method(seen: RestorationProblem, clean: Tensor) -> Tensor:
        with torch.no_grad():
            return answer_in_tiles(model, seen)

    return method


def weights_for(task: str, noise: float) -> list[float]:
    """Return the weights of total variation that are tried on a task."""
    return [w * noise for w in WEIGHTS] if task.startswith("denoise") else list(SMALL_WEIGHTS)


def least_of_all(
    seen: RestorationProblem, clean: Tensor, weights: Sequence[float], longer: int = 1
) -> Tensor:
    """Total variation with the weight that is best for the picture: an oracle."""
    iterations = longer * (STEPS if seen.about.keeps_all else MANY_STEPS)
    start = seen.about.first_picture(seen.measured)
    found = [
        least_variation(seen.measured, seen.measurement, weight, start, iterations)  # type: ignore[arg-type]
        for weight in weights
    ]
    return max(found, key=lambda images: float(picture_psnr(images, clean)))


def variation_checked(task: str, side: int, which: str) -> str:
    """What total variation gains by weights twice as dense, and by twice the iterations."""
    gains = []
    for _, clean in photographs(side, gray=task != "demosaic", which=which):
        seen = TASKS[task].corrupt(clean, torch.Generator().manual_seed(0))
        weights = weights_for(task, seen.noise)
        dense = sorted([*weights, *(math.sqrt(a * b) for a, b in pairwise(weights))])
        usual = float(picture_psnr(least_of_all(seen, clean, weights), clean))
        finer = float(picture_psnr(least_of_all(seen, clean, dense), clean))
        longer = float(picture_psnr(least_of_all(seen, clean, weights, 2), clean))
        gains.append((finer - usual, longer - usual))
    finer, longer = np.array(gains).mean(axis=0)
    return (
        f"{task}: {finer:+.3f} dB by weights twice as dense, {longer:+.3f} by twice the iterations"
    )


def _of_noise() -> dict[str, RestoreFunction]:
    from bm3d import bm3d
    from skimage.restoration import denoise_nl_means, denoise_wavelet

    def of(function: Callable[[Any, float], Any]) -> RestoreFunction:
        def method(seen: RestorationProblem, clean: Tensor) -> Tensor:
            found = function(seen.measured[0, 0].double().numpy(), seen.noise)
            return torch.from_numpy(np.asarray(found)).float()[None, None]

        return method

    def means(x: Any, noise: float) -> Any:
        options = {"patch_size": 5, "patch_distance": 6, "fast_mode": True}
        return denoise_nl_means(x, h=0.8 * noise, sigma=noise, **options)

    return {
        "wavelets": of(lambda x, noise: denoise_wavelet(x, sigma=noise, rescale_sigma=True)),
        "non-local means": of(means),
        "BM3D": of(lambda x, noise: bm3d(x, noise)),
    }


def ssim(images: Tensor, clean: Tensor) -> float:
    """Return the structural similarity of two images."""
    from skimage.metrics import structural_similarity

    one, other = (some[0].clamp(0, 1).double().numpy() for some in (images, clean))
    return float(structural_similarity(one, other, channel_axis=0, data_range=1.0))


def measure(
    task: str, draws: int, side: int, which: str, contestants: dict[str, RestorationMethod]
) -> Iterator[dict[str, Any]]:
    """Yield one record per draw, photograph, and method."""
    damage = TASKS[task]
    for draw in range(draws):
        for name, clean in photographs(side, gray=task != "demosaic", which=which):
            seen = damage.corrupt(clean, torch.Generator().manual_seed(draw))
            for method, contestant in contestants.items():
                begin = time.process_time()
                restored = contestant.restore(seen, clean)
                seconds = time.process_time() - begin
                yield {
                    "task": task,
                    "picture": name,
                    "draw": draw,
                    "method": method,
                    "psnr": float(picture_psnr(restored, clean)),
                    "ssim": ssim(restored, clean),
                    "seconds": seconds,
                    "parameters": contestant.parameters,
                }


def summary(rows: list[dict[str, Any]]) -> str:
    """Markdown: means over pictures and draws; ± is the standard error over pictures."""
    lines = ["| task | method | PSNR (dB) | ahead of it, the prior | SSIM | CPU s | parameters |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for task in dict.fromkeys(row["task"] for row in rows):
        some = [row for row in rows if row["task"] == task]
        ours = {_case(row): row["psnr"] for row in some if row["method"] == OURS}
        for method in dict.fromkeys(row["method"] for row in some):
            own = [row for row in some if row["method"] == method]
            if ours:
                own = [row for row in own if _case(row) in ours]
            if not own:
                continue
            pictures = dict.fromkeys(row["picture"] for row in own)
            ahead = np.array(
                [
                    np.mean([ours[_case(r)] - r["psnr"] for r in own if r["picture"] == picture])
                    for picture in (pictures if ours else ())
                ]
            )
            error = ahead.std(ddof=1) / math.sqrt(len(ahead)) if len(ahead) > 1 else math.nan
            compared = ours and method != OURS
            beside = f"{ahead.mean():+.2f} ± {error:.2f}" if compared else ""
            figures = [np.mean([row[key] for row in own]) for key in ("psnr", "ssim", "seconds")]
            learned = own[0]["parameters"]
            known = f"{learned:,}" if learned else ""
            lines.append(
                f"| {task}, {len(pictures)} pictures, {len(own)} cases | {method} "
                f"| {figures[0]:.2f} | {beside} | {figures[1]:.3f} | {figures[2]:.2f} | {known} |"
            )
    return "\n".join(lines)


def _case(row: dict[str, Any]) -> tuple[str, int]:
    return row["picture"], row["draw"]


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Args:
        tasks: Keys of `TASKS`; all of them if empty.
        only: Names of the methods to measure; all of them if empty.
        draws: Number of draws of the damage per picture.
        side: Height and width of the pictures, in pixels.
        pictures: The test pictures, or those on which settings are chosen.
        networks: Folders of runs of trained denoisers, by the name that the table shows.
        levels: Levels of the prior to compare instead of other methods.
        variation: Measure only whether total variation has converged.
        summarize: Measure nothing, and write the table of what was measured before.
    """

    tasks: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    draws: int = 3
    side: int = 96
    pictures: Literal["test", "chosen-on"] = "test"
    networks: Mapping[str, Path] = field(default_factory=dict)
    levels: tuple[float, ...] = ()
    variation: bool = False
    summarize: bool = False

    def __post_init__(self) -> None:
        for task in self.tasks:
            check_choice(TASKS, task=task)


def carry_out(settings: Settings, work: Work) -> Found:
    """Restore the same damaged pictures by every method."""
    torch.set_num_threads(1)
    tasks = settings.tasks or tuple(TASKS)
    if settings.variation:
        lines = []
        for place, task in enumerate(tasks):
            work.on_progress(place, len(tasks), task)
            lines.append(variation_checked(task, settings.side, settings.pictures))
        return Found({"gains": lines}, "\n".join(f"- {line}" for line in lines))
    file = work.output / RUNS / "photographs.jsonl"
    if not settings.summarize:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as opened:
            for place, task in enumerate(tasks):
                work.on_progress(place, len(tasks), task)
                contestants = methods(task, settings.networks, settings.levels)
                if settings.only:
                    contestants = {name: contestants[name] for name in settings.only}
                measured = measure(
                    task, settings.draws, settings.side, settings.pictures, contestants
                )
                for row in measured:
                    opened.write(json.dumps(row) + "\n")
                    opened.flush()
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return Found({"rows": rows}, summary(rows))


STUDY = Study("photographs", "", "Photographs restored, beside other methods", Settings, carry_out)
