"""Poisson noise: photon counts, restored after a transform that makes their noise Gaussian.

The photon count of a pixel of brightness y is z ~ Poisson(peak·y), with standard deviation
√(peak·y). Its Anscombe transform 2√(z + 3/8) has a standard deviation of about 1 for any y, so a
prior for Gaussian noise applies. The mean of the transform is not the transform of the mean; the
inverse corrects for that (Mäkitalo and Foi, 2011).
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

MAX_TABULATED = 100.0
"""Mean count up to which the inverse is tabulated. Above, its expansion is exact to 1e-4."""
TABLE_SIZE = 2048


@register_damage("poisson")
@dataclass(frozen=True)
class Poisson(Damage):
    """Photon counts: x ~ Poisson(peak·y)/peak.

    Args:
        noise: Standard deviation of a white pixel, 1/√peak. That of a pixel of brightness y is
            smaller by a factor √y.

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
                "the noise of photon counts must be specified: pass --noise 1/√N, with N the count "
                "of a white pixel, such as 0.1 for 100 photons"
            )
        return self._problem(picture, None)

    def _problem(self, measured: Tensor, truth: Tensor | None) -> RestorationProblem:
        mean_noise = self.noise * math.sqrt(max(0.0, float(measured.mean())))
        scale = Anscombe(self.peak)
        return RestorationProblem(measured, Identity(), mean_noise, truth, scale)


@dataclass(frozen=True)
class Anscombe:
    """Anscombe's transform of photon counts, shifted and scaled such that it maps [0, 1] to [0, 1].

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
        """Transform brightness values."""
        counts = self.peak * values.clamp_min(0)
        return (2 * (counts + 3 / 8).sqrt() - self._black) / self._span

    def back(self, values: Tensor) -> Tensor:
        """Return the brightness values whose transformed counts have these means."""
        means = self._black + self._span * values.double()
        roots, table = self._table
        index = torch.searchsorted(table, means.contiguous()).clamp(1, TABLE_SIZE - 1)
        share = (means - table[index - 1]) / (table[index] - table[index - 1])
        root = roots[index - 1] + share.clamp_min(0) * (roots[index] - roots[index - 1])
        expansion = (means / 2).square() - 1 / 8
        counts = torch.where(means < table[-1], root.square(), expansion)
        return (counts / self.peak).to(values)

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """√λ of mean counts λ, and the mean of the transform of counts with mean λ."""
        roots = torch.linspace(0, math.sqrt(MAX_TABULATED), TABLE_SIZE, dtype=torch.float64)
        largest = int(MAX_TABULATED + 12 * math.sqrt(MAX_TABULATED) + 20)
        counts = torch.arange(largest, dtype=torch.float64)
        rates = roots.square()[:, None]
        logarithm = torch.xlogy(counts, rates) - rates - torch.lgamma(counts + 1)
        return roots, logarithm.exp() @ (2 * (counts + 3 / 8).sqrt())
