"""The photo prior beside what people use: the same damage of the same photographs for all.

    python -m benchmarks.photographs --task denoise-25 --draws 3 --output photographs.jsonl
    python -m benchmarks.photographs --summarize photographs.jsonl

Pictures that nobody trained on: samples of scikit-image and scikit-learn, and test images of
CamVid. Needs the packages scikit-image and bm3d (extra "bench").
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibria.inputs import (
    Corrupted,
    Corruption,
    Deblurring,
    Demosaicing,
    Denoising,
    PhotoSettings,
    Scattering,
    SuperResolution,
    least_variation,
    restore_photo,
)
from equilibria.models import photo_prior
from equilibria.models.restorers.photo import first_picture
from equilibria.tasks.image_quality import picture_psnr

SAMPLES = ("camera", "astronaut", "coffee", "chelsea", "rocket", "brick", "grass", "gravel")
STREETS = 4
WEIGHTS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5)
"""Of total variation in denoising, over the noise; the best for each picture counts (an oracle)."""
SMALL_WEIGHTS = (1e-4, 3e-4, 6e-4, 1e-3, 2e-3, 4e-3, 8e-3)
"""The same where other damage is undone."""
TASKS: dict[str, Corruption] = {
    **{f"denoise-{noise}": Denoising(noise / 255) for noise in (15, 25, 50)},
    "deblur": Deblurring(1.5, 0.01),
    "inpaint": Scattering(0.7, 1 / 255),
    "superres": SuperResolution(2, 1 / 255),
    "demosaic": Demosaicing(1 / 255),
}
Method = Callable[[Corrupted, Tensor], Tensor]


def photographs(side: int, gray: bool) -> Iterator[tuple[str, Tensor]]:
    """The middle of each photograph, (1, channels, side, side)."""
    from skimage import data
    from sklearn.datasets import load_sample_image

    pictures = {name: getattr(data, name)() for name in SAMPLES}
    pictures |= {name: load_sample_image(f"{name}.jpg") for name in ("china", "flower")}
    folder = Path(os.environ.get("EQUILIBRIA_DATA", "data")) / "camvid" / "test"
    if folder.is_dir():
        from PIL import Image

        files = sorted(folder.iterdir())
        for place in range(STREETS):
            file = files[place * len(files) // STREETS]
            pictures[f"camvid/{file.stem}"] = np.asarray(Image.open(file).convert("RGB"))
    for name, picture in pictures.items():
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


def methods(task: str) -> dict[str, Method]:
    prior = photo_prior()

    def ours(seen: Corrupted, clean: Tensor) -> Tensor:
        return restore_photo(prior, seen, PhotoSettings(strength=1.0)).images

    def variation(seen: Corrupted, clean: Tensor) -> Tensor:
        start = first_picture(seen.measured, seen.measurement)
        is_noise = task.startswith("denoise")
        weights = [w * seen.noise for w in WEIGHTS] if is_noise else list(SMALL_WEIGHTS)
        found = [
            least_variation(seen.measured, seen.measurement, weight, start)  # type: ignore[arg-type]
            for weight in weights
        ]
        return max(found, key=lambda images: float(picture_psnr(images, clean)))

    both: dict[str, Method] = {"photo prior": ours, "total variation, best weight": variation}
    return {**both, **_of_noise()} if task.startswith("denoise") else both


def _of_noise() -> dict[str, Method]:
    from bm3d import bm3d
    from skimage.restoration import denoise_nl_means, denoise_wavelet

    def of(function: Callable[[Any, float], Any]) -> Method:
        def method(seen: Corrupted, clean: Tensor) -> Tensor:
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
    from skimage.metrics import structural_similarity

    one, other = (some[0].clamp(0, 1).double().numpy() for some in (images, clean))
    return float(structural_similarity(one, other, channel_axis=0, data_range=1.0))


def measure(task: str, draws: int, side: int) -> Iterator[dict[str, Any]]:
    damage = TASKS[task]
    contestants = methods(task)
    for draw in range(draws):
        for name, clean in photographs(side, gray=task != "demosaic"):
            seen = damage.corrupt(clean, torch.Generator().manual_seed(draw))
            for method, restore in contestants.items():
                begin = time.process_time()
                restored = restore(seen, clean)
                seconds = time.process_time() - begin
                yield {
                    "task": task,
                    "picture": name,
                    "draw": draw,
                    "method": method,
                    "psnr": float(picture_psnr(restored, clean)),
                    "ssim": ssim(restored, clean),
                    "seconds": seconds,
                }


def summary(rows: list[dict[str, Any]]) -> str:
    """Markdown: means over pictures and draws; ± is the standard error over pictures."""
    lines = ["| task | method | PSNR (dB) | ahead of it, the prior | SSIM | CPU seconds |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for task in dict.fromkeys(row["task"] for row in rows):
        some = [row for row in rows if row["task"] == task]
        ours = {_case(row): row["psnr"] for row in some if row["method"] == "photo prior"}
        for method in dict.fromkeys(row["method"] for row in some):
            own = [row for row in some if row["method"] == method and _case(row) in ours]
            pictures = dict.fromkeys(row["picture"] for row in own)
            ahead = np.array(
                [
                    np.mean([ours[_case(r)] - r["psnr"] for r in own if r["picture"] == picture])
                    for picture in pictures
                ]
            )
            error = ahead.std(ddof=1) / math.sqrt(len(ahead)) if len(ahead) > 1 else math.nan
            beside = "" if method == "photo prior" else f"{ahead.mean():+.2f} ± {error:.2f}"
            figures = [np.mean([row[key] for row in own]) for key in ("psnr", "ssim", "seconds")]
            lines.append(
                f"| {task}, {len(pictures)} pictures, {len(own)} cases | {method} "
                f"| {figures[0]:.2f} | {beside} | {figures[1]:.3f} | {figures[2]:.2f} |"
            )
    return "\n".join(lines)


def _case(row: dict[str, Any]) -> tuple[str, int]:
    return row["picture"], row["draw"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", action="append", choices=list(TASKS), help="all if not given")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--output", type=Path, default=Path("photographs.jsonl"))
    parser.add_argument("--summarize", type=Path, help="print the table of what was measured")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.summarize is None:
        with given.output.open("a") as file:
            for task in given.task or TASKS:
                for row in measure(task, given.draws, given.side):
                    file.write(json.dumps(row) + "\n")
                    file.flush()
    text = (given.summarize or given.output).read_text()
    print(summary([json.loads(line) for line in text.splitlines()]))


if __name__ == "__main__":
    main()
