"""Poisson noise: photon counts, restored in a scale in which their noise is Gaussian.

The number of photons that a pixel of brightness y counts is z ~ Poisson(peak·y), with the standard
deviation √(peak·y). Its Anscombe transform 2√(z + 3/8) has a standard deviation of about 1 whatever
y is, so that a prior for Gaussian noise applies. The mean of the transform is not the transform of
the mean; the inverse corrects for that (Mäkitalo and Foi, 2011).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from equilibria.inputs.latents import Measurement
from equilibria.operators import Identity
from equilibria.registry import check_positive, check_values
from equilibria.restoration.damage import Damage, register_damage
from equilibria.restoration.problem import RestorationProblem

MOST_TABULATED = 100.0
"""Mean count up to which the inverse is computed by sums; above, its expansion is exact to 1e-4."""
TABLE = 2048


@register_damage("poisson")
@dataclass(frozen=True)
class Poisson(Damage):
    """Photon counts: x ~ Poisson(peak·y)/peak.

    Attributes:
        noise: Standard deviation of a white pixel, 1/√peak. A pixel of brightness y has √y times
            that.

    Examples:
        >>> damage = eq.restoration.Poisson(noise=0.1)
        >>> damage.peak
        100.0
        >>> problem = damage.corrupt(torch.full((1, 1, 16, 16), 0.5))
        >>> eq.restoration.PhotoRestorer().restore(problem).images.shape
        torch.Size([1, 1, 16, 16])
    """

    photo_task: ClassVar[str] = "poisson"
    photo_noise: ClassVar[float] = 0.1

    noise: float = 0.1

    def __post_init__(self) -> None:
        check_values(self, positive_pixels=("noise",))

    @property
    def peak(self) -> float:
        """Mean number of photons of a white pixel."""
        return round(self.noise**-2, 9)

    @property
    def words(self) -> str:
        return f"photon counts, {self.peak:g} for a white pixel"

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        return Identity()

    def corrupt(
        self, images: Tensor, generator: torch.Generator | None = None
    ) -> RestorationProblem:
        device = images.device if generator is None else generator.device
        means = self.peak * images.clamp(0, 1).to(device)
        counts = torch.poisson(means, generator=generator).to(images.device)
        return self._problem(counts / self.peak, images)

    def problem_of(
        self, picture: Tensor, noise: float | None = None, hidden: Tensor | None = None
    ) -> RestorationProblem:
        if noise is None:
            raise ValueError(
                "how many photons does a white pixel count? Give --noise 1/√N, such as 0.1 for 100"
            )
        return self._problem(picture, None)

    def _problem(self, measured: Tensor, truth: Tensor | None) -> RestorationProblem:
        mean_noise = self.noise * math.sqrt(max(0.0, float(measured.mean())))
        scale = Anscombe(self.peak)
        return RestorationProblem(measured, Identity(), mean_noise, truth, scale)


@dataclass(frozen=True)
class Anscombe:
    """Anscombe's transform of photon counts, shifted and scaled so that [0, 1] becomes [0, 1].

    Args:
        peak: Mean number of photons of a white pixel.
    """

    peak: float

    def __post_init__(self) -> None:
        check_positive(peak=self.peak)

    @property
    def noise(self) -> float:
        """Standard deviation of the noise of transformed values."""
        return 1 / self._span

    @property
    def _black(self) -> float:
        return 2 * math.sqrt(3 / 8)

    @property
    def _span(self) -> float:
        return 2 * math.sqrt(self.peak + 3 / 8) - self._black

    def to(self, values: Tensor) -> Tensor:
        """Transform brightnesses."""
        counts = self.peak * values.clamp_min(0)
        return (2 * (counts + 3 / 8).sqrt() - self._black) / self._span

    def back(self, values: Tensor) -> Tensor:
        """Return the brightnesses whose counts have these means of their transform."""
        means = self._black + self._span * values.double()
        counts, known = self._table
        place = torch.searchsorted(known, means.contiguous()).clamp(1, TABLE - 1)
        share = (means - known[place - 1]) / (known[place] - known[place - 1])
        root = counts[place - 1] + share.clamp_min(0) * (counts[place] - counts[place - 1])
        expansion = (means / 2).square() - 1 / 8
        found = torch.where(means < known[-1], root.square(), expansion)
        return (found / self.peak).to(values)

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """√λ of mean counts λ, and the mean of the transform of counts with that mean."""
        roots = torch.linspace(0, math.sqrt(MOST_TABULATED), TABLE, dtype=torch.float64)
        most = int(MOST_TABULATED + 12 * math.sqrt(MOST_TABULATED) + 20)
        counts = torch.arange(most, dtype=torch.float64)
        rates = roots.square()[:, None]
        logarithm = torch.xlogy(counts, rates) - rates - torch.lgamma(counts + 1)
        return roots, logarithm.exp() @ (2 * (counts + 3 / 8).sqrt())
