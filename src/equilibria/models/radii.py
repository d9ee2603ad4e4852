"""How far an image may move before the class of its equilibrium can change.

A margin w_k − w_j = gᵀy* + … of an energy model moves with the image by gᵀX_D U dg(x) (see
`equilibrium/certificates.py`), where g(x) is the stem, of Lipschitz constant Λ. With room_j what
is left of the margin after its error bar, the class cannot change within r if every
room_j ≥ r·L_j(r). Three bounds L of that steepness, each sharper than the one before:

- global: ‖g‖‖U‖Λ/(1 − q), a product of norms (at most the equilibrium's own √q/(1 − q)·‖U‖Λ times
  the norm of the head, because g = Wv and ‖g‖ ≤ √q‖v‖).
- weighted: ½‖(UΛ)ᵀXg‖ + ½√(gᵀXg)·‖U‖Λ/√(1 − h), X = (I − H)⁻¹, true for every pattern: 0 ≼ X_D ≼ X.
  Where the curvature is not constant (GEQ) X ≼ 1/(1 − h), h = 2e^{−3/2}(‖W‖‖W_h‖)² rather than q.
- pattern: units whose sign cannot change within r leave the product. Those that stay on have D = 1,
  those that stay off D = 0: with O and P = 1 on the units that are on, and on those that may be,
  L(r) = ‖(UΛ)ᵀ½(X_O + X_P)g‖ + ½√(gᵀ(X_P − X_O)g)·‖U‖Λ/√(1 − h). Within r a pre-activation moves by
  at most rΛ(‖u_i‖ + ‖w_i‖√h/(1 − h)·‖U‖), because it is c_i + w_iᵀWᵀy with ‖WᵀX_D‖ ≤ √h/(1 − h). L
  grows with r, so that min(r, room/L(r)) is certified for every r that is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from equilibria.energies.bounds import UnitBound
from equilibria.equilibrium.certificates import Resolved, Resolvent
from equilibria.operators.rounding import NORM_SLACK

PATTERN_STEPS = 3
"""How many radii are tried."""
RIVALS = 3
"""Classes for which the pattern counts: those that come closest to the predicted one."""
WORTHWHILE = 0.01
"""The pattern is evaluated again only where it can still make the radius larger by this share."""
GLOBAL, WEIGHTED, PATTERN = "global", "weighted", "pattern"


@dataclass(frozen=True)
class Rivals:
    """The predicted class of each sample against all classes."""

    best: Tensor
    """The predicted class."""
    room: Tensor
    """(samples, classes): margins less their error bars."""
    is_own: Tensor
    """Where a class is the predicted one itself."""

    def radius(self, steepness: Tensor) -> Tensor:
        """min_j room_j/L_j, never negative."""
        nearest = self.distances(steepness).amin(dim=1)
        return nearest.clamp_min(0) * (1 - NORM_SLACK)

    def distances(self, steepness: Tensor) -> Tensor:
        """room_j/L_j; infinite for the predicted class itself."""
        each = self.room / steepness.clamp_min(torch.finfo(steepness.dtype).tiny)
        return torch.where(self.is_own, torch.inf, each)

    def keep(self, rows: Tensor) -> Rivals:
        """The same of some samples."""
        return Rivals(self.best[rows], self.room[rows], self.is_own[rows])


@dataclass(frozen=True)
class Differences:
    """Norms of the differences g = w_k − w_j, (samples, classes), k the class of each sample."""

    direction: Tensor
    """‖g‖."""
    form: Tensor | None = None
    """gᵀXg from above, where X is known."""
    along: Tensor | None = None
    """‖(UΛ)ᵀu‖ for u ≈ Xg, where a stem is known too."""
    remainder: Tensor | None = None
    """A bound of ‖u − Xg‖, with the rounding of `along` as a share of ‖u‖."""


class ClassPairs:
    """`Differences` of the rows of a readout, which depend on parameters only.

    They are computed for a class when the first sample has it, and kept.

    Args:
        rows: The readout, one row per class, in float64.
        resolved: Xw for every row w, or None where X is not known.
        pulled: (UΛ)ᵀu for every u ≈ Xw, or None where it is not known.
    """

    def __init__(
        self, rows: Tensor, resolved: Resolved | None = None, pulled: Tensor | None = None
    ) -> None:
        self.rows = rows
        self.resolved = resolved
        self.pulled = pulled
        self._kept: dict[int, Differences] = {}

    def of(self, classes: Tensor) -> Differences:
        """The differences of one class for each sample, against all classes."""
        present, place = torch.unique(classes, return_inverse=True)
        each = [self._of_class(k) for k in present.tolist() or [0]]

        def gathered(name: str) -> Tensor | None:
            known = [value for one in each if (value := getattr(one, name)) is not None]
            return torch.stack(known)[place] if known else None

        found = {one.name: gathered(one.name) for one in fields(Differences)}
        return Differences(**found)  # type: ignore[arg-type]

    def _of_class(self, k: int) -> Differences:
        if k not in self._kept:
            self._kept[k] = self._computed(k)
        return self._kept[k]

    def _computed(self, k: int) -> Differences:
        direction = torch.linalg.vector_norm(self.rows[k] - self.rows, dim=1)
        if self.resolved is None:
            return Differences(direction)
        others = torch.arange(len(self.rows), device=self.rows.device)
        pairs = self.resolved.difference(torch.full_like(others, k), others)
        _, form = pairs.form()
        if self.pulled is None:
            return Differences(direction, form)
        along = torch.linalg.vector_norm(self.pulled[k] - self.pulled, dim=1)
        return Differences(direction, form, along, remainder(pairs))


def remainder(pairs: Resolved) -> Tensor:
    """What ‖(UΛ)ᵀu‖ leaves open of ‖(UΛ)ᵀXg‖, in units of ‖U‖Λ."""
    size: Tensor = torch.linalg.vector_norm(pairs.solution, dim=-1)
    return size * NORM_SLACK + pairs.error()


@dataclass(frozen=True)
class InputSide:
    """How the image enters the equilibrium of an energy."""

    stem: float
    """Λ."""
    slope: Tensor
    """‖U‖Λ of each sample."""
    pull_back: Callable[[Tensor], Tensor]
    """Rows u ↦ (UΛ)ᵀu: at the image itself where the stem is affine."""

    def keep(self, rows: Tensor) -> InputSide:
        """The same of some samples."""
        return replace(self, slope=self.slope[rows])


def weighted_steepness(
    differences: Differences, side: InputSide, convexity: Tensor
) -> Tensor | None:
    """½‖(UΛ)ᵀXg‖ + ½√(gᵀXg)·‖U‖Λ/√(1 − h), or None where X is not known."""
    form, along, rest = differences.form, differences.along, differences.remainder
    if form is None or along is None or rest is None:
        return None
    across = (form / convexity[:, None]).sqrt() * side.slope[:, None]
    return 0.5 * (along + rest * side.slope[:, None] + across) * (1 + NORM_SLACK)


@dataclass(frozen=True)
class Pattern:
    """Which units are on, and how sure that is."""

    preactivation: Tensor
    """Of each sample, (samples, units), at a point close to the equilibrium."""
    error: Tensor
    """‖y − y*‖ of that point."""
    rounding: Tensor
    """Of the pre-activations."""
    units: list[Tensor]
    """‖u_i‖ and ‖w_i‖ of every unit."""

    @classmethod
    def unit_norms(
        cls, bounds: Sequence[UnitBound], layout: tuple[tuple[int, ...], ...]
    ) -> list[Tensor]:
        """The bounds of an energy, a number a unit."""

        def flat(name: str) -> Tensor:
            pairs = zip(bounds, layout, strict=True)
            return torch.cat([getattr(b, name).expand(shape).flatten() for b, shape in pairs])

        return [flat("input"), flat("state")]

    def within(self, radius: Tensor, side: InputSide, convexity: Tensor) -> tuple[Tensor, Tensor]:
        """Masks of the units that are on for all images this close, and of those that may be."""
        inputs, states = self.units
        root = (1 - convexity).clamp_min(0).sqrt()
        reach = (root / convexity * side.slope * radius)[:, None] * states
        reach = reach + (side.stem * radius)[:, None] * inputs
        blur = (root * self.error)[:, None] * states + self.rounding[:, None]
        moved = (reach + blur) * (1 + NORM_SLACK)
        return self.preactivation > moved, self.preactivation >= -moved

    def keep(self, rows: Tensor) -> Pattern:
        """The same of some samples."""
        return Pattern(self.preactivation[rows], self.error[rows], self.rounding[rows], self.units)

    def radius(
        self,
        rivals: Rivals,
        steepness: Tensor,
        pairs: ClassPairs,
        resolvent: Resolvent,
        side: InputSide,
        convexity: Tensor,
    ) -> Tensor:
        """The radius by the activation pattern.

        L grows with r: with r₀ the radius that holds for any pattern, none above room/L(r₀) can be
        certified, and none below room/L(room/L(r₀)) is in doubt. A third evaluation halves what is
        between. A sample is left as soon as its radius cannot grow by more than `WORTHWHILE`.

        Args:
            rivals: Of each sample.
            steepness: L for any pattern, (samples, classes).
            pairs: The readout, with Xw for each of its rows.
            resolvent: Solves for a pattern.
            side: How the image enters.
            convexity: 1 − h of each sample.

        Returns:
            For each sample a radius that holds, at least the one by `steepness`.
        """
        assert pairs.resolved is not None
        whole = certain = trial = rivals.radius(steepness)
        whole = whole.clone()
        left, ceiling, pattern = torch.arange(len(whole), device=whole.device), trial, self
        nearest = rivals.distances(steepness).topk(
            min(RIVALS, steepness.shape[1] - 1), largest=False
        )
        classes, (samples, count) = nearest.indices, nearest.indices.shape
        if not classes.numel():
            return whole
        rows, guess = (
            (of[rivals.best][:, None] - of[classes]) for of in (pairs.rows, pairs.resolved.solution)
        )
        guesses = (guess, guess)
        for step in range(PATTERN_STEPS):
            low, high = (
                resolvent.solve_masked(
                    rows.flatten(0, 1),
                    mask.to(rows).repeat_interleave(count, 0),
                    start.flatten(0, 1),
                )
                for mask, start in zip(pattern.within(trial, side, convexity), guesses, strict=True)
            )
            slope = side.slope.repeat_interleave(count, 0)
            middle = side.pull_back(0.5 * (low.solution + high.solution))
            along = torch.linalg.vector_norm(middle, dim=1)
            along = along + (remainder(high) + low.error()) * slope
            spread = (high.form()[1] - low.form()[0]).clamp_min(0)
            across = (spread / convexity.repeat_interleave(count, 0)).sqrt() * slope
            found = ((along + 0.5 * across) * (1 + NORM_SLACK)).view(samples, count)
            best_known = torch.minimum(steepness.gather(1, classes), found)
            new = rivals.radius(steepness.scatter(1, classes, best_known))
            certain = torch.maximum(certain, torch.minimum(trial, new))
            whole[left] = certain
            ceiling = new if step == 0 else ceiling
            going = ceiling > (1 + WORTHWHILE) * certain
            if step + 1 == PATTERN_STEPS or not bool(going.any()):
                break
            trial = (new if step == 0 else (certain * ceiling).sqrt())[going]
            left, certain, ceiling = left[going], certain[going], ceiling[going]
            rivals, pattern, side = rivals.keep(going), pattern.keep(going), side.keep(going)
            steepness, convexity, classes = steepness[going], convexity[going], classes[going]
            guesses = (
                low.solution.view(samples, count, -1)[going],
                high.solution.view(samples, count, -1)[going],
            )
            rows, samples = rows[going], len(left)
        return whole
