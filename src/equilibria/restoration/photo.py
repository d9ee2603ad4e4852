"""Restoration of photographs with the learned prior of the package.

`PhotoRestorer.restore` chooses the strength λ of the prior, splits large pictures into tiles, and
computes the minimizer (`minimizer.py`).
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
from equilibria.restoration.noise import MIN_NOISE
from equilibria.restoration.problem import RestorationProblem
from equilibria.restoration.proof import RestoredPhotos
from equilibria.restoration.restorer import Restorer
from equilibria.restoration.tiles import DEFAULT_SIDE

PRIOR_LEVEL = 0.12
"""Smallest σ of the prior if A loses information, because lost pixels are far less certain.

The best of eight values on pictures that are in no table.
"""
DISCREPANCY_SOLVES = 5
"""Number of solves in which the discrepancy principle finds λ."""
DISCREPANCY_SIDE = 192
"""Side in pixels of the middle of a picture that these solves use."""


@dataclass(frozen=True)
class PhotoRestorer(Restorer):
    """Restorer of photographs of any size, by a learned prior R of pictures.

    x was measured of y by A with noise ν. Denoising minimizes ½‖y − x‖² + R_{λν}(y). For other
    damage the objective is (w/2)‖Ay − x‖² + R_σ(y), with w = (σ/ν)²/λ and σ the larger of ν and
    `level` (`minimizer.py`).

    Args:
        prior: R; by default the learned prior of the package.
        strength: λ. For denoising it is the ratio between the noise level of the prior and that of
            the picture, which keeps the objective convex; by default 1. For other damage the
            default is the λ at which the misfit equals the norm of the noise (Morozov's discrepancy
            principle).
        accuracy: Root mean square distance to the exact minimizer at which a solve stops, as a
            fraction of the pixel range, where that minimizer is proven to be unique (denoising).
            Elsewhere a solve stops at a root mean square gradient of 0.01 σ.
        level: Smallest noise level σ of the prior for damage other than noise.
        tile: Side in pixels of the tiles of large pictures.
        trace: Record the objective of every iteration.

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
    tile: int = DEFAULT_SIDE
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
        """Restore pictures, in tiles if they are large.

        Args:
            problem: The problem, with pictures of shape (B, 1 or 3, H, W).
            progress: Wraps the sequence of tiles, for example to show a progress bar.
            observe: Called after every iteration; for a picture in tiles, after every iteration of
                the solve of the whole picture.

        Returns:
            The pictures, the strength, a bound on their error, and with `trace` the objective.
        """
        started = perf_counter()
        if (scale := problem.scale) is not None:
            # Noise that is not Gaussian: restore values on a scale on which it is.
            inner = RestorationProblem(scale.to(problem.measured), problem.measurement, scale.noise)
            restored = self.restore(inner, progress=progress, observe=observe)
            images = scale.back(restored.images)
            return replace(
                restored, problem=problem, images=images, generated=images, is_scaled=True
            )
        strength = self.strength
        if strength is None:
            # `keeps_all`: A is the identity.
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
        seconds = perf_counter() - started
        return replace(restored, problem=problem, strength=strength, seconds=seconds)

    def minimizer(self, problem: RestorationProblem, strength: float) -> PhotoMinimizer:
        """Return the minimizer of the objective.

        Args:
            problem: The problem.
            strength: λ, the strength of the prior.

        Raises:
            ValueError: If strength times noise exceeds the pixel range.
        """
        noise = max(problem.noise, MIN_NOISE)
        if problem.about.keeps_all:
            check_positive_pixels(noise=noise)
            prior_noise = noise * strength
            if prior_noise > 1:
                raise ValueError(
                    f"strength must be at most {1 / noise:g}, so that strength times a noise of "
                    f"{noise:g} stays within the pixel range, got {strength:g}"
                )
            # The minimizer gets λν in the place of both ν and σ, so that w = 1.
            return PhotoMinimizer(self._prior, prior_noise, accuracy=self.accuracy)
        return PhotoMinimizer(
            self._prior,
            noise,
            level=max(noise, self.level),
            strength=strength,
            accuracy=self.accuracy,
            factor=problem.about.scale,
        )

    def discrepancy(self, problem: RestorationProblem) -> float:
        """Return the λ at which the misfit ‖Ay − x‖ equals the norm of the noise.

        The misfit increases with λ. log λ is bisected between λ = 1/30 and λ = 30, on the middle of
        the picture.

        Args:
            problem: The problem.
        """
        part = problem.middle(DISCREPANCY_SIDE)
        noise = max(part.noise, MIN_NOISE)
        low, high = -math.log(30), math.log(30)
        for _ in range(DISCREPANCY_SOLVES):
            strength = math.exp((low + high) / 2)
            restored = self.minimizer(part, strength).restore(part.measured, part.measurement)
            error = part.measurement(restored.images) - part.measured
            counted = part.about.counted(error)
            misfit = math.sqrt(float((error * counted).square().sum() / counted.sum()))
            low, high = (low, (low + high) / 2) if misfit > noise else ((low + high) / 2, high)
        return math.exp((low + high) / 2)

    @cached_property
    def _prior(self) -> OpponentPrior:
        return photo_prior() if self.prior is None else self.prior
