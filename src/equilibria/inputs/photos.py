"""Photographs of any size, restored by a learned prior, with what is proven of the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from equilibria.energies import OpponentPrior
from equilibria.inputs.corruptions import Corrupted
from equilibria.inputs.noise_level import LEAST_NOISE
from equilibria.inputs.tiles import USUAL_SIDE, answer_in_tiles
from equilibria.models.restorers.photo import PhotoRestorer, RestoredPhotos
from equilibria.operators import AveragePool, Identity, LinearOperator, Mask
from equilibria.registry import check_positive, check_positive_pixels
from equilibria.solvers import Accelerated, Status

PRIOR_LEVEL = 0.12
"""σ of the prior where something is missing, at the least: what is unknown there is far more
uncertain than what was measured. The best of eight values on pictures that no table shows
(scikit-learn's two, four validation images of CamVid)."""
TRIALS = 5
"""Solves in which the discrepancy principle finds its weight."""
MIDDLE = 192
"""Pixels a side of the middle of a picture, on which that is done."""


@dataclass(frozen=True)
class PhotoSettings:
    """How photographs are restored.

    strength: of the prior, in the place of 1: λ in ½‖Ay − x‖² + λR(y). Of noise alone it is the
        noise level that is asked for, over the true one, which keeps the objective convex. None
        where something else is undone: such that the misfit is that of the noise (the discrepancy
        principle, Morozov).
    accuracy: see `PhotoRestorer`.
    level: σ of the prior, at the least, where something else than noise is undone.
    tile: the side of the pieces of large pictures.

    Examples:
        >>> settings = eq.inputs.PhotoSettings(strength=1.2)
        >>> settings.accuracy == 1 / 255
        True
    """

    strength: float | None = None
    accuracy: float = 1 / 255
    level: float = PRIOR_LEVEL
    tile: int = USUAL_SIDE

    def __post_init__(self) -> None:
        check_positive(strength=self.strength, tile=self.tile)
        check_positive_pixels(accuracy=self.accuracy, level=self.level)

    def restorer(self, prior: OpponentPrior, seen: Corrupted, strength: float) -> PhotoRestorer:
        noise = max(seen.noise, LEAST_NOISE)
        factor = seen.measurement.scale if isinstance(seen.measurement, AveragePool) else 1
        if isinstance(seen.measurement, Identity):
            check_positive_pixels(noise=noise)
            level = noise * strength
            if level > 1:
                raise ValueError(
                    f"strength must be at most {1 / noise:g}, so that strength times a noise of "
                    f"{noise:g} stays within the pixel range, got {strength:g}"
                )
            return PhotoRestorer(prior, level, accuracy=self.accuracy)
        return PhotoRestorer(
            prior,
            noise,
            level=max(noise, self.level),
            strength=strength,
            accuracy=self.accuracy,
            factor=factor,
        )


@torch.no_grad()
def restore_photo(
    prior: OpponentPrior,
    seen: Corrupted,
    settings: PhotoSettings | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> RestoredPhotos:
    """Restore pictures (B, 1 or 3, H, W) of which something was measured, in pieces if large.

    Pieces fade into each other. That there is no seam is then proven for the whole: one gradient of
    the whole objective bounds the distance to its minimizer, and where that is not yet below the
    accuracy the solve goes on with all of the picture.

    Examples:
        >>> prior, picture = eq.models.photo_prior(), torch.full((1, 1, 16, 16), 0.5)
        >>> seen = eq.inputs.Denoising(noise=0.05).corrupt(picture)
        >>> found = eq.inputs.restore_photo(prior, seen)
        >>> (found.images - picture).std() < 0.03
        tensor(True)
    """
    settings = PhotoSettings() if settings is None else settings
    strength = settings.strength
    if strength is None:
        strength = (
            1.0 if isinstance(seen.measurement, Identity) else discrepancy(prior, seen, settings)
        )
    restorer = settings.restorer(prior, seen, strength)
    if restorer.factor * max(seen.measured.shape[2:]) <= settings.tile:
        found = restorer.restore(seen.measured, seen.measurement)
        return replace(found, strength=strength)
    padded, operator = restorer.mirrored(seen.measured, seen.measurement)
    whole = answer_in_tiles(
        restorer, Corrupted(padded, operator, seen.noise), settings.tile, progress
    )
    # Two pictures of memory in the place of sixteen.
    stop = restorer.layer(padded, operator, whole)[0].solver.stop
    solver = Accelerated(stop=stop, max_iterations=restorer.max_iterations, drop_share=1.0)
    found = restorer.finish(padded, operator, whole, solver=solver)
    done = [solution.iterations.amax() for solution in restorer.solutions]
    iterations = found.solution.iterations + torch.stack(done).amax()
    solution = replace(found.solution, iterations=iterations)
    return replace(found, solution=solution, strength=strength)


def discrepancy(prior: OpponentPrior, seen: Corrupted, settings: PhotoSettings) -> float:
    """The strength λ at which the misfit ‖Ay − x‖ is that of the noise, on the middle of a picture.

    The misfit rises with λ; log λ is bisected between 1/30 and 30.

    Examples:
        >>> flat = torch.full((1, 1, 24, 24), 0.5)
        >>> seen = eq.inputs.Inpainting(window=4, noise=0.2).corrupt(flat)
        >>> eq.inputs.discrepancy(eq.models.photo_prior(), seen, eq.inputs.PhotoSettings()) <= 30
        True
    """
    part = middle_of(seen)
    noise = max(seen.noise, LEAST_NOISE)
    low, high = -math.log(30), math.log(30)
    assert isinstance(part.measurement, LinearOperator)
    for _ in range(TRIALS):
        strength = math.exp((low + high) / 2)
        found = settings.restorer(prior, part, strength).restore(part.measured, part.measurement)
        left = part.measurement(found.images) - part.measured
        counted = getattr(part.measurement, "known", torch.ones_like(left)).expand_as(left)
        size = math.sqrt(float((left * counted).square().sum() / counted.sum()))
        low, high = (low, (low + high) / 2) if size > noise else ((low + high) / 2, high)
    return math.exp((low + high) / 2)


def middle_of(seen: Corrupted, side: int = MIDDLE) -> Corrupted:
    """The middle of a measurement; it begins at even pixels, as a mosaic does."""
    height, width = seen.measured.shape[2:]
    top, left = (max(0, size - side) // 4 * 2 for size in (height, width))
    rows, columns = slice(top, top + side), slice(left, left + side)
    measurement = seen.measurement
    if isinstance(measurement, Mask):
        known = measurement.known.expand(-1, -1, height, width)
        measurement = Mask(known[..., rows, columns])
    return Corrupted(seen.measured[..., rows, columns], measurement, seen.noise)


def proven(found: RestoredPhotos) -> str:
    """Describe in one sentence what is proven of restored pictures.

    What a picture nearby may gain is given as a share of the objective. Where it exceeds the
    objective, as on a flat picture, it is given as a share of the value that the data term has if
    the misfit is that of the noise.

    Examples:
        >>> restorer = eq.models.PhotoRestorer(eq.models.photo_prior(), noise=0.1)
        >>> eq.inputs.proven(restorer.restore(torch.rand(1, 1, 24, 24)))
        'within 0... gray levels of the exact minimizer'
    """
    if found.bound is not None:
        return f"within {float(found.bound.max()) * 255:.2f} gray levels of the exact minimizer"
    done = bool((found.solution.status == int(Status.CONVERGED)).all())
    status = "converged" if done else "not converged"
    gain = found.gain_within()
    if gain is None:
        return f"{status}; nothing is proven, because the measurement is not linear in the picture"
    objective, of = found.objective[-1], ""
    if bool((gain >= objective).any()):
        # The objective of a flat picture is about zero, and no gain is a sensible share of it.
        objective, of = objective.maximum(found.noise_term), " of what the noise contributes"
    share = float((gain / objective).max())
    return (
        f"{status}; no picture within one gray level lowers the objective by more than "
        f"{share:.1%}{of}"
    )
