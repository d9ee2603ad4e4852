"""Certified radii: how far an image may move before the class of its equilibrium can change.

A radius follows from a margin in one step. Let room_j be the margin over class j minus its error
bound (`margins.py`), and let the margin be L_j-Lipschitz in the image. The class
cannot change within r = min_j room_j/L_j. This file bounds the steepness L_j.

The image enters through the stem S, of Lipschitz constant Λ (`stem.py`), and the injection U. A
margin, read along g, moves with the image by gᵀX_D U dS(x) (`margins.py`, which defines X). The
keys of `Certificate.radii` name bounds of that:

| key | what is known | bound L |
|---|---|---|
| global | the map is q-Lipschitz | ‖g‖‖U‖Λ/(1 − q), U of the map |
| global | ‖∇²E‖ ≤ q | the same, U of ∇E |
| weighted | ⟨g, T⟩ is λ-Lipschitz (Deep OptEq) | λ‖U‖Λ/(1 − q) + ‖g‖‖U‖Λ |
| weighted | E is quadratic: X = (I − H)⁻¹ | ½‖(US)ᵀXg‖ + ½√(gᵀXg)·‖U‖Λ/√(1 − h), at most global |
| weighted | −∇²E ≼ h (GEQ) | ‖g‖‖U‖Λ/(1 − h) |
| pattern | E is quadratic, ReLU | L(r) below, at most weighted |

- With OptEq's feature z = Wᵀy and the rows v of the head, g = Wv and ‖g‖ ≤ ‖W‖‖v‖ = √q‖v‖.
- The bound by X holds for every activation pattern, because 0 ≼ X_D ≼ X, so that X_D − ½X lies
  between ∓½X. For GEQ h = 2e^{−3/2}(‖W‖‖W_h‖)² < q, with W_h the filter of its patches.
- If the stem has a ReLU, Λ‖Uᵀu‖ takes the place of ‖(US)ᵀu‖ for every u.
- Pattern: units whose sign cannot change within r have a known entry of D, 1 if they stay on and 0
  if they stay off. With the masks O of the units that are on, and P of those that may be,
  L(r) = ‖(US)ᵀ½(X_O + X_P)g‖ + ½√(gᵀ(X_P − X_O)g)·‖U‖Λ/√(1 − h), because X_D − ½(X_O + X_P) lies
  between ∓½(X_P − X_O) for O ≤ D ≤ P. Within r the pre-activation c_i + w_iᵀWᵀy of unit i moves by
  at most rΛ(‖u_i‖ + ‖w_i‖√h/(1 − h)·‖U‖), with the rows u_i of U and w_i of W, because
  ‖WᵀX_D‖ ≤ √h/(1 − h). L grows with r, so that min(r, room/L(r)) is certified for every trial r.

The norm in which the image moves is a value, `stem.ImageNorm`. It enters in two places only: Λ is
the Lipschitz constant from that norm, and the length of (US)ᵀu is taken in the dual norm. In L∞, Λ
is √n times that in L2, n the numbers of an image, and the dual norm is ‖·‖₁. Where the stem is
affine, ‖(US)ᵀu‖₁ can be much less than √n‖(US)ᵀu‖₂. Elsewhere the radius in L∞ is that in L2
divided by √n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equilibria.certificates.certificate import GLOBAL, WEIGHTED
from equilibria.certificates.margins import ClassDifferences, ClassPairs, Margins, remainder
from equilibria.certificates.resolvent import Resolvent
from equilibria.certificates.stem import LINF, ImagePath
from equilibria.energies.bounds import UnitBound
from equilibria.operators.rounding import NORM_SLACK

MAX_PATTERN_STEPS = 3
"""Largest number of trial radii."""
NEAREST_CLASSES = 3
"""Number of classes whose margins use the pattern: those closest to the predicted class."""
MIN_RADIUS_GAIN = 0.01
"""Smallest possible gain, relative to the radius, for which the pattern is evaluated again."""


@dataclass(frozen=True)
class Entry:
    """How perturbations of the images of a batch enter the hidden objective."""

    path: ImagePath
    """The linear map from the image to the pre-activations."""
    lipschitz: Tensor
    """‖U‖Λ of each sample, the Lipschitz constant of the pre-activations in the image."""

    def keep(self, rows: Tensor) -> Entry:
        """Select some samples."""
        return replace(self, lipschitz=self.lipschitz[rows])


def global_steepness(direction: Tensor, factor: Tensor, input_lipschitz: Tensor) -> Tensor:
    """Bound the steepness of margins by a product of norms.

    Args:
        direction: ‖g‖ of each margin.
        factor: Lipschitz constant of the map (or of ∇E, or h) of each sample.
        input_lipschitz: Lipschitz constant of the map in the image, per sample.

    Returns:
        ‖g‖·input_lipschitz/(1 − factor), infinite where factor ≥ 1.
    """
    return direction * torch.where(factor < 1, input_lipschitz / (1 - factor), torch.inf)[..., None]


def sliced_steepness(
    direction: Tensor, margin_lipschitz: Tensor, q: Tensor, input_lipschitz: Tensor
) -> Tensor:
    """Bound the steepness of margins where ⟨g, T⟩ is known to be λ-Lipschitz in the state.

    Per unit of the image, the state moves by at most input_lipschitz/(1 − q), which changes ⟨g, T⟩
    by at most λ times that. The image itself changes it by at most ‖g‖·input_lipschitz.

    Args:
        direction: ‖g‖ of each margin.
        margin_lipschitz: λ of each margin.
        q: Lipschitz constant of the map, per sample.
        input_lipschitz: Lipschitz constant of the map in the image, per sample.

    Returns:
        λ·input_lipschitz/(1 − q) + ‖g‖·input_lipschitz, infinite where q ≥ 1.
    """
    moved = (
        global_steepness(margin_lipschitz, q, input_lipschitz)
        + direction * input_lipschitz[:, None]
    )
    return moved * (1 + NORM_SLACK)


def weighted_steepness(
    differences: ClassDifferences, entry: Entry, convexity: Tensor
) -> Tensor | None:
    """Bound the steepness of margins for every activation pattern.

    Args:
        differences: Norms of the directions g.
        entry: How the image enters.
        convexity: 1 − h of each sample.

    Returns:
        ½‖(US)ᵀXg‖ + ½√(gᵀXg)·‖U‖Λ/√(1 − h), or None if X is not known.
    """
    quadratic, pulled_length, rest = (
        differences.quadratic,
        differences.pulled_length,
        differences.remainder,
    )
    if quadratic is None or pulled_length is None or rest is None:
        return None
    across = (quadratic / convexity[:, None]).sqrt() * entry.lipschitz[:, None]
    return 0.5 * (pulled_length + rest * entry.lipschitz[:, None] + across) * (1 + NORM_SLACK)


@dataclass(frozen=True)
class Radii:
    """The radius of each sample by every bound that is known."""

    by_bound: dict[str, Tensor]
    steepness: Tensor | None = None
    """Smallest known Lipschitz constant of each margin, where a pattern can improve on it."""
    why_none: str = ""
    """Why there is no radius for any sample."""


def within_linf(radius: Tensor, numbers: int) -> Tensor:
    """Return the L∞ radius that an L2 radius implies, ‖d‖₂ ≤ √n‖d‖_∞ for n numbers per image."""
    return radius / LINF.l2_size(numbers)


def radii_by_contraction(
    margins: Margins,
    direction: Tensor,
    q: Tensor,
    input_lipschitz: Tensor,
    margin_lipschitz: Tensor | None = None,
) -> Radii:
    """Compute radii from Lipschitz constants of the map; see `sliced_steepness` for arguments."""
    radii = {GLOBAL: margins.radius(global_steepness(direction, q, input_lipschitz))}
    if margin_lipschitz is not None:
        radii[WEIGHTED] = margins.radius(
            sliced_steepness(direction, margin_lipschitz, q, input_lipschitz)
        )
    return Radii(radii)


def radii_by_convexity(
    margins: Margins,
    differences: ClassDifferences,
    entry: Entry,
    curvature: Tensor,
    convexity: Tensor,
) -> Radii:
    """Compute radii from the hidden objective.

    Args:
        margins: Margins of each sample.
        differences: Norms of the directions g.
        entry: How the image enters.
        curvature: Lipschitz constant of ∇E of each sample.
        convexity: 1 − h of each sample.

    Returns:
        The global and the weighted radius, and the steepness if a pattern can improve on it.
    """
    steepness = global_steepness(differences.direction, curvature, entry.lipschitz)
    radii = {GLOBAL: margins.radius(steepness)}
    weighted = weighted_steepness(differences, entry, convexity)
    if weighted is None:
        convex = global_steepness(differences.direction, 1 - convexity, entry.lipschitz)
        return Radii({**radii, WEIGHTED: margins.radius(convex)})
    steepness = torch.minimum(steepness, weighted)
    return Radii({**radii, WEIGHTED: margins.radius(steepness)}, steepness)


@dataclass(frozen=True)
class Pattern:
    """Pre-activations that decide which units are on, with their error bounds."""

    preactivation: Tensor
    """(samples, units), at a point close to the equilibrium."""
    error: Tensor
    """Upper bound on ‖y − y*‖ for that point y."""
    rounding: Tensor
    """Rounding error of the pre-activations, per sample."""
    units: list[Tensor]
    """‖u_i‖ and ‖w_i‖ of every unit: rows of U and of W."""

    @classmethod
    def unit_norms(
        cls, bounds: Sequence[UnitBound], layout: tuple[tuple[int, ...], ...]
    ) -> list[Tensor]:
        """Flatten the bounds of an energy to one number per unit."""

        def flat(name: str) -> Tensor:
            pairs = zip(bounds, layout, strict=True)
            return torch.cat([getattr(b, name).expand(shape).flatten() for b, shape in pairs])

        return [flat("input"), flat("state")]

    def within(self, radius: Tensor, entry: Entry, convexity: Tensor) -> tuple[Tensor, Tensor]:
        """Return masks of the units that are on for all images this close, and that may be on."""
        inputs, states = self.units
        root = (1 - convexity).clamp_min(0).sqrt()
        reach = (root / convexity * entry.lipschitz * radius)[:, None] * states
        reach = reach + (entry.path.lipschitz * radius)[:, None] * inputs
        uncertainty = (root * self.error)[:, None] * states + self.rounding[:, None]
        moved = (reach + uncertainty) * (1 + NORM_SLACK)
        return self.preactivation > moved, self.preactivation >= -moved

    def keep(self, rows: Tensor) -> Pattern:
        """Select some samples."""
        return Pattern(self.preactivation[rows], self.error[rows], self.rounding[rows], self.units)

    def radius(
        self,
        margins: Margins,
        steepness: Tensor,
        pairs: ClassPairs,
        resolvent: Resolvent,
        entry: Entry,
        convexity: Tensor,
    ) -> Tensor:
        """Compute the radius by the activation pattern.

        L grows with r. With r₀ the radius that holds for every pattern, no radius above room/L(r₀)
        can be certified, and every radius below room/L(room/L(r₀)) is. A third evaluation halves
        the interval between. A sample is finished as soon as its radius cannot grow by a share of
        more than `MIN_RADIUS_GAIN`.

        Args:
            margins: Margins of each sample.
            steepness: L for every pattern, (samples, classes).
            pairs: The directions g, with Xw for each row w of the readout.
            resolvent: Solves linear systems for a pattern.
            entry: How the image enters.
            convexity: 1 − h of each sample.

        Returns:
            A certified radius per sample, at least the one by `steepness`.
        """
        assert pairs.resolved is not None
        radius = certain = trial = margins.radius(steepness)
        radius = radius.clone()
        remaining, ceiling, pattern = torch.arange(len(radius), device=radius.device), trial, self
        nearest = margins.distances(steepness).topk(
            min(NEAREST_CLASSES, steepness.shape[1] - 1), largest=False
        )
        classes, (samples, count) = nearest.indices, nearest.indices.shape
        if not classes.numel():
            return radius
        rows, guess = (
            (of[margins.best][:, None] - of[classes])
            for of in (pairs.rows, pairs.resolved.solution)
        )
        guesses = (guess, guess)
        for step in range(MAX_PATTERN_STEPS):
            low, high = (
                resolvent.solve_masked(
                    rows.flatten(0, 1),
                    mask.to(rows).repeat_interleave(count, 0),
                    start.flatten(0, 1),
                )
                for mask, start in zip(
                    pattern.within(trial, entry, convexity), guesses, strict=True
                )
            )
            lipschitz = entry.lipschitz.repeat_interleave(count, 0)
            middle = entry.path.pull_back(0.5 * (low.solution + high.solution))
            pulled_length = entry.path.length(middle)
            pulled_length = pulled_length + (remainder(high) + low.error()) * lipschitz
            spread = (high.quadratic()[1] - low.quadratic()[0]).clamp_min(0)
            across = (spread / convexity.repeat_interleave(count, 0)).sqrt() * lipschitz
            by_pattern = ((pulled_length + 0.5 * across) * (1 + NORM_SLACK)).view(samples, count)
            best_known = torch.minimum(steepness.gather(1, classes), by_pattern)
            new = margins.radius(steepness.scatter(1, classes, best_known))
            certain = torch.maximum(certain, torch.minimum(trial, new))
            radius[remaining] = certain
            ceiling = new if step == 0 else ceiling
            unfinished = ceiling > (1 + MIN_RADIUS_GAIN) * certain
            if step + 1 == MAX_PATTERN_STEPS or not bool(unfinished.any()):
                break
            trial = (new if step == 0 else (certain * ceiling).sqrt())[unfinished]
            remaining, certain, ceiling = (
                remaining[unfinished],
                certain[unfinished],
                ceiling[unfinished],
            )
            margins, pattern, entry = (
                margins.keep(unfinished),
                pattern.keep(unfinished),
                entry.keep(unfinished),
            )
            steepness, convexity, classes = (
                steepness[unfinished],
                convexity[unfinished],
                classes[unfinished],
            )
            guesses = (
                low.solution.view(samples, count, -1)[unfinished],
                high.solution.view(samples, count, -1)[unfinished],
            )
            rows, samples = rows[unfinished], len(remaining)
        return radius
