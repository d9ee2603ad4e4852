"""Statistics of a sample of images: sizes, colors, mean and standard deviation."""

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
"""Number of images that are read for sizes, for colors, and for mean and standard deviation."""
GRAY_MODES = ("1", "L", "LA", "La", "I", "F")
SMALL = Framing((32, 32))
MAX_GRAY_SPREAD = 16
"""Largest difference between the channels of a gray pixel, of 255; JPEG adds some."""
MIN_DEVIATION = 1e-3
"""Smallest standard deviation of a channel that is scaled to 1."""


@dataclass(frozen=True)
class Survey:
    """Statistics of a sample of image files.

    Attributes:
        height: Median height in pixels.
        width: Median width in pixels.
        aspects: First and third quartile of width ÷ height.
        is_gray: Whether all images are gray.
        mean: Mean of the pixels of a few images, in [0, 1].
        problems: Errors of the files that could not be read.

    Examples:
        >>> eq.data.image_from_tensor(torch.full((1, 6, 8), 0.5)).save("gray.png")
        >>> from equilibria.data.survey import survey
        >>> result = survey(["gray.png"])
        >>> result.height, result.width, result.is_gray
        (6, 8, True)
    """

    height: int
    width: int
    aspects: tuple[float, float]
    is_gray: bool
    mean: float
    problems: tuple[DataFileError, ...]


def survey(paths: Sequence[str]) -> Survey:
    """Read the headers of a sample of files, and the colors of a few.

    Args:
        paths: Image files, at least one.

    Raises:
        DataFileError: If no file of the sample can be read.

    Examples:
        >>> eq.data.image_from_tensor(torch.rand(3, 6, 12)).save("wide.png")
        >>> from equilibria.data.survey import survey
        >>> survey(["wide.png"]).aspects
        (2.0, 2.0)
    """
    places = np.linspace(0, len(paths) - 1, min(len(paths), SAMPLED_HEADERS))
    headers, problems = {}, []
    for path in (paths[int(place)] for place in places):
        try:
            headers[path] = header_of(Path(path))
        except DataFileError as error:
            problems.append(error)
    if not headers:
        raise problems[0]
    sizes = np.array([header.size for header in headers.values()])
    low, high = np.quantile(sizes[:, 0] / sizes[:, 1], (0.25, 0.75))
    width, height = np.median(sizes, axis=0)
    colors = [
        _colors(path, headers[path].mode)
        for path in list(headers)[:: -(-len(headers) // SAMPLED_COLORS)]
    ]
    means = [mean for _, mean in colors if mean is not None]
    return Survey(
        height=round(height),
        width=round(width),
        aspects=(float(low), float(high)),
        is_gray=all(is_gray for is_gray, _ in colors),
        mean=sum(means) / len(means) if means else 0.5,
        problems=tuple(problems),
    )


def _colors(path: str, mode: str) -> tuple[bool, float | None]:
    """Return whether an image is gray, and the mean of its pixels; None if it cannot be read."""
    try:
        pixels = read_image(Path(path), SMALL).short()
    except DataFileError:
        return True, None
    is_gray = mode in GRAY_MODES or mode.startswith("I;")
    is_gray = is_gray or int((pixels.amax(0) - pixels.amin(0)).max()) <= MAX_GRAY_SPREAD
    return is_gray, float(pixels.double().mean()) / 255


def mean_and_deviation(source: Source) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Estimate the mean and standard deviation per channel from a sample of images.

    Args:
        source: The samples. Images that cannot be read are skipped if the source skips them.

    Returns:
        The means and the standard deviations, one per channel.

    Raises:
        ValueError: If no image can be read.

    Examples:
        >>> from equilibria.data.survey import mean_and_deviation
        >>> mean, deviation = mean_and_deviation(eq.data.load_digits().test)
        >>> round(mean[0], 1), round(deviation[0], 1)
        (0.3, 0.4)
    """
    sample = Selection(source, evenly_spread(source, MEASURED_IMAGES))
    workers = usual_workers(sample, 16)
    sums = torch.zeros(3, 1, dtype=torch.float64)
    for images, _ in Batches(sample, 16, workers=workers):
        pixels = images.double().transpose(0, 1).flatten(1)
        counts = torch.full((len(pixels),), pixels.shape[1], dtype=torch.float64)
        sums = sums + torch.stack((counts, pixels.sum(1), pixels.square().sum(1)))
    if not float(sums[0, 0]):
        raise ValueError(
            "none of the training images can be read: check the files, for example by opening one "
            "in an image viewer"
        )
    mean = sums[1] / sums[0]
    deviation = (sums[2] / sums[0] - mean.square()).clamp_min(0).sqrt()
    deviation = torch.where(deviation < MIN_DEVIATION, 1.0, deviation)
    return _rounded(mean), _rounded(deviation)


def _rounded(values: torch.Tensor) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in values.tolist())
