"""Restore photographs with the learned prior that comes with the package.

`PhotoRestorer.restore` chooses the strength λ of the prior, splits large pictures into tiles, and
finds the minimizer (`minimizer.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import torch

from equilibria.energies import OpponentPrior
from equilibria.models.restorers.photo import photo_prior
from equilibria.registry import check_positive, check_positive_pixels
from equilibria.restoration.minimizer import Observer, PhotoMinimizer
from equilibria.restoration.noise import LEAST_NOISE
from equilibria.restoration.problem import RestorationProblem
from equilibria.restoration.proof import RestoredPhotos
from equilibria.restoration.restorer import Restorer
from equilibria.restoration.tiles import USUAL_SIDE

PRIOR_LEVEL = 0.12
"""Least σ of the prior where A hides something, as that is far less certain than what was measured.
The best of eight values on pictures that are in no table (scikit-learn's two, four validation
images of CamVid)."""
TRIALS = 5
"""Solves in which the discrepancy principle finds its weight."""
MIDDLE = 192
"""Side in pixels of the middle of a picture, on which that is done."""


@dataclass(frozen=True)
class PhotoRestorer(Restorer):
    """Restores photographs of any size by minimizing ½‖Ay − x‖² + λR(y) (see `minimizer.py`).

    Args:
        prior: R; the one that comes with the package if None.
        strength: λ. For denoising it is the factor by which the noise level that the prior is given
            exceeds the true one, which keeps the objective convex; 1 if None. For other damage None
            means the λ at which the misfit is that of the noise (Morozov's discrepancy principle).
        accuracy: Where a solve ends, as a proven root mean square distance to the exact minimizer,
            or the equivalent where nothing is proven.
        level: Least noise level σ of the prior for damage other than noise.
        tile: Side in pixels of the tiles of large pictures.
        trace: Keep the objective of every iteration.

    Examples:
        >>> picture = torch.full((1, 1, 16, 16), 0.5)
        >>> problem = eq.restoration.Denoising(noise=0.05).corrupt(picture)
        >>> restored = eq.restoration.PhotoRestorer().restore(problem)
        >>> restored.images.std() < 0.03
        tensor(True)
    """

    prior: OpponentPrior | None = None
    strength: float | None = None
    accuracy: float = 1 / 255
    level: float = PRIOR_LEVEL
    tile: int = USUAL_SIDE
    trace: bool = False

    def __post_init__(self) -> None:
        check_positive(strength=self.strength, tile=self.tile)
        check_positive_pixels(accuracy=self.accuracy, level=self.level)

    @torch.no_grad()
    def restore(
        self,
        problem: RestorationProblem,
        *,
        progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
        observe: Observer | None = None,
    ) -> RestoredPhotos:
        """Restore pictures (B, 1 or 3, H, W), in tiles if they are large.

        Args:
            problem: What was measured.
            progress: Goes through the tiles, to show how many are done.
            observe: Called after every iteration; for a picture in tiles, after every iteration of
                the solve of the whole picture.

        Returns:
            The pictures, the strength, what is proven, and with `trace` the objective.
        """
        began = perf_counter()
        if (scale := problem.scale) is not None:
            inner = RestorationProblem(scale.to(problem.measured), problem.measurement, scale.noise)
            restored = self.restore(inner, progress=progress, observe=observe)
            images = scale.back(restored.images)
            return replace(
                restored, problem=problem, images=images, generated=images, is_scaled=True
            )
        strength = self.strength
        if strength is None:
            strength = 1.0 if problem.about.keeps_all else self.discrepancy(problem)
        minimizer = self.minimizer(problem, strength)
        if minimizer.factor * max(problem.measured.shape[2:]) <= self.tile:
            restored = minimizer.restore(
                problem.measured, problem.measurement, trace=self.trace, observe=observe
            )
        else:
            restored = minimizer.restore_in_tiles(
                problem, self.tile, progress, trace=self.trace, observe=observe
            )
        seconds = perf_counter() - began
        return replace(restored, problem=problem, strength=strength, seconds=seconds)

    def minimizer(self, problem: RestorationProblem, strength: float) -> PhotoMinimizer:
        """Return the minimizer of the objective with the prior's `strength`."""
        noise = max(problem.noise, LEAST_NOISE)
        if problem.about.keeps_all:
            check_positive_pixels(noise=noise)
            level = noise * strength
            if level > 1:
                raise ValueError(
                    f"strength must be at most {1 / noise:g}, so that strength times a noise of "
                    f"{noise:g} stays within the pixel range, got {strength:g}"
                )
            return PhotoMinimizer(self._prior, level, accuracy=self.accuracy)
        return PhotoMinimizer(
            self._prior,
            noise,
            level=max(noise, self.level),
            strength=strength,
            accuracy=self.accuracy,
            factor=problem.about.scale,
        )

    def discrepancy(self, problem: RestorationProblem) -> float:
        """Return the λ at which the misfit ‖Ay − x‖ is that of the noise, on the picture's middle.

        The misfit rises with λ; log λ is bisected between 1/30 and 30.
        """
        part = problem.middle(MIDDLE)
        noise = max(part.noise, LEAST_NOISE)
        low, high = -math.log(30), math.log(30)
        for _ in range(TRIALS):
            strength = math.exp((low + high) / 2)
            restored = self.minimizer(part, strength).restore(part.measured, part.measurement)
            left = part.measurement(restored.images) - part.measured
            counted = part.about.counted(left)
            size = math.sqrt(float((left * counted).square().sum() / counted.sum()))
            low, high = (low, (low + high) / 2) if size > noise else ((low + high) / 2, high)
        return math.exp((low + high) / 2)

    @cached_property
    def _prior(self) -> OpponentPrior:
        return photo_prior() if self.prior is None else self.prior
