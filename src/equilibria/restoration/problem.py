"""Restoration problems: measured values, the measurement operator, and the noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from equilibria.inputs.latents import Measurement
from equilibria.operators import ImageMeasurement
from equilibria.operators.measurements import about
from equilibria.registry import check_values


class NoiseScale(Protocol):
    """A transform of each measured value after which the noise is Gaussian."""

    @property
    def noise(self) -> float:
        """Standard deviation of the noise of transformed values."""

    def to(self, values: Tensor) -> Tensor:
        """Transform measured values."""

    def back(self, values: Tensor) -> Tensor:
        """Return the values whose noisy measurements have these means after the transform."""


@dataclass(frozen=True)
class RestorationProblem:
    """The problem of finding images y, given x = Ay + noise.

    Args:
        measured: x, one row per image.
        measurement: A, any differentiable map of images. It may differ between images.
        noise: Standard deviation of the noise.
        truth: True images y, if known, for comparison.
        scale: Transform of the measured values that makes their noise Gaussian, if it is not. Only
            `PhotoRestorer` uses it; `noise` is then an average.

    Examples:
        >>> damage = eq.restoration.SuperResolution(factor=2)
        >>> problem = damage.corrupt(torch.rand(1, 1, 8, 8))
        >>> problem.measured.shape, problem.truth.shape, problem.noise
        (torch.Size([1, 1, 4, 4]), torch.Size([1, 1, 8, 8]), 0.0)
    """

    measured: Tensor
    measurement: Measurement
    noise: float
    truth: Tensor | None = None
    scale: NoiseScale | None = None

    def __post_init__(self) -> None:
        check_values(self, not_negative=("noise",))

    @property
    def about(self) -> ImageMeasurement:
        """Properties of the measurement that restoration needs."""
        return about(self.measurement)

    def picture(self, size: tuple[int, ...]) -> Tensor | None:
        """Return the measured values as images, or None if they are not images.

        Args:
            size: Height and width of the images.
        """
        picture = getattr(self.measurement, "picture", None)
        if callable(picture):
            images: Tensor = picture(self.measured)
            return images
        is_picture = self.measured.dim() == 4 and tuple(self.measured.shape[2:]) == tuple(size)
        return self.measured if is_picture else None

    def part(self, rows: slice, columns: slice, scale: int = 1) -> RestorationProblem:
        """Return the problem of a part of the measured values.

        Args:
            rows: Rows of the measured values.
            columns: Columns of the measured values.
            scale: Factor by which the resolution of the images is higher.
        """
        height, width = self.measured.shape[2:]
        fine = [slice(s.start * scale, s.stop * scale) for s in (rows, columns)]
        measurement = self.about.part(fine[0], fine[1], (height * scale, width * scale))
        return RestorationProblem(
            self.measured[..., rows, columns],
            measurement,
            self.noise,
            scale=self.scale,
        )

    def middle(self, side: int) -> RestorationProblem:
        """Return the problem of the middle of the picture.

        Args:
            side: Side of the middle, in measured pixels.
        """
        # Start at even pixels, to keep the pattern of a mosaic.
        starts = (max(0, size - side) // 4 * 2 for size in self.measured.shape[2:])
        rows, columns = (slice(start, start + side) for start in starts)
        return self.part(rows, columns)
