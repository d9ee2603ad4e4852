"""What images are like, from a sample of them: sizes, colors, mean and deviation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from equilibria.data.batches import Batches
from equilibria.data.image_files import header_of, read_image
from equilibria.data.readers import DataFileError
from equilibria.data.source import Selection, Source, evenly_spread
from equilibria.data.workers import usual_workers
from equilibria.images import Framing

SAMPLED_HEADERS, SAMPLED_COLORS, MEASURED_IMAGES = 1000, 32, 128
"""How many images are looked at: for their sizes, for their colors, for mean and deviation."""
GRAY_MODES = ("1", "L", "LA", "La", "I", "F")
SMALL = Framing((32, 32))
COLORED = 16
"""Shades between the channels of a pixel above which it is no longer gray; JPEG makes some."""
FLAT = 1e-3
"""A deviation below which images are flat, and are not scaled."""


@dataclass(frozen=True)
class Survey:
    """What a sample of image files is like.

    Examples:
        >>> eq.data.image_from_tensor(torch.full((1, 6, 8), 0.5)).save("gray.png")
        >>> from equilibria.data.survey import survey
        >>> found = survey(["gray.png"])
        >>> found.height, found.width, found.is_gray
        (6, 8, True)
    """

    height: int
    width: int
    """The medians."""
    aspects: tuple[float, float]
    """Between these widths ÷ heights lies the middle half of the images."""
    is_gray: bool
    problems: tuple[DataFileError, ...]
    """Those of the sample that are not images."""


def survey(paths: Sequence[str]) -> Survey:
    """Look at the headers of some files, and at the colors of a few.

    Examples:
        >>> eq.data.image_from_tensor(torch.rand(3, 6, 12)).save("wide.png")
        >>> from equilibria.data.survey import survey
        >>> survey(["wide.png"]).aspects
        (2.0, 2.0)
    """
    some = [paths[int(i)] for i in np.linspace(0, len(paths) - 1, min(len(paths), SAMPLED_HEADERS))]
    headers, problems = {}, []
    for path in some:
        try:
            headers[path] = header_of(Path(path))
        except DataFileError as error:
            problems.append(error)
    if not headers:
        raise problems[0]
    sizes = np.array([header.size for header in headers.values()])
    low, high = np.quantile(sizes[:, 0] / sizes[:, 1], (0.25, 0.75))
    width, height = np.median(sizes, axis=0)
    few = list(headers)[:: -(-len(headers) // SAMPLED_COLORS)]
    return Survey(
        height=round(height),
        width=round(width),
        aspects=(float(low), float(high)),
        is_gray=all(_is_gray(path, headers[path].mode) for path in few),
        problems=tuple(problems),
    )


def _is_gray(path: str, mode: str) -> bool:
    if mode in GRAY_MODES or mode.startswith("I;"):
        return True
    try:
        pixels = read_image(Path(path), SMALL).short()
    except DataFileError:
        return True
    return int((pixels.amax(0) - pixels.amin(0)).max()) <= COLORED


def mean_and_deviation(source: Source) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of every channel, over some images of a source; those that cannot be read do not count.

    Examples:
        >>> from equilibria.data.survey import mean_and_deviation
        >>> mean, deviation = mean_and_deviation(eq.data.load_digits().test)
        >>> round(mean[0], 1), round(deviation[0], 1)
        (0.3, 0.4)
    """
    some = Selection(source, evenly_spread(source, MEASURED_IMAGES))
    workers = usual_workers(some, 16)
    sums = torch.zeros(3, 1, dtype=torch.float64)
    for images, _ in Batches(some, 16, workers=workers):
        pixels = images.double().transpose(0, 1).flatten(1)
        counts = torch.full((len(pixels),), pixels.shape[1], dtype=torch.float64)
        sums = sums + torch.stack((counts, pixels.sum(1), pixels.square().sum(1)))
    if not float(sums[0, 0]):
        raise ValueError("none of the training images can be read: there is nothing to train on")
    mean = sums[1] / sums[0]
    deviation = (sums[2] / sums[0] - mean.square()).clamp_min(0).sqrt()
    deviation = torch.where(deviation < FLAT, 1.0, deviation)
    return _rounded(mean), _rounded(deviation)


def _rounded(values: torch.Tensor) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in values.tolist())
