"""A restoration problem: what was measured of images, how, and with how much noise."""

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
        """Return the image of which these transformed values are the means."""


@dataclass(frozen=True)
class RestorationProblem:
    """Find images y of which x = Ay + noise was measured.

    Args:
        measured: x, one row per image.
        measurement: A, any differentiable map of images. It may differ from image to image.
        noise: Standard deviation of the noise.
        truth: y, where it is known, to compare with.
        scale: A transform of the measured values after which their noise is Gaussian, if it is not.
            Only `PhotoRestorer` uses it; `noise` is then an average.

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
        """What restoration must know of the measurement."""
        return about(self.measurement)

    def picture(self, size: tuple[int, ...]) -> Tensor | None:
        """Return what was measured as images of this height and width; None if it is no picture."""
        picture = getattr(self.measurement, "picture", None)
        if callable(picture):
            shown: Tensor = picture(self.measured)
            return shown
        is_picture = self.measured.dim() == 4 and tuple(self.measured.shape[2:]) == tuple(size)
        return self.measured if is_picture else None

    def part(self, rows: slice, columns: slice, scale: int = 1) -> RestorationProblem:
        """Return the problem of a part of the measured values.

        Args:
            rows: Rows of the measured values.
            columns: Columns of the measured values.
            scale: How many times finer the images are than the measured values.
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
        """Return the problem of the middle; it begins at even pixels, as a mosaic does."""
        tops = (max(0, size - side) // 4 * 2 for size in self.measured.shape[2:])
        rows, columns = (slice(top, top + side) for top in tops)
        return self.part(rows, columns)
