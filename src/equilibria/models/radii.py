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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.energies.bounds import UnitBound
from equilibria.equilibrium.certificates import Resolved, Resolvent
from equilibria.operators.rounding import NORM_SLACK

PATTERN_STEPS = 3
"""How many radii are tried."""
RIVALS = 3
"""Classes for which the pattern counts: those that come closest to the predicted one."""
GLOBAL, WEIGHTED, PATTERN = "global", "weighted", "pattern"


@dataclass(frozen=True)
class Rivals:
    """The predicted class of each sample against all classes."""

    best: Tensor
    """The predicted class."""
    room: Tensor
    """(samples, classes): margins less their error bars."""
    direction: Tensor
    """‖g‖ of each."""
    is_own: Tensor
    """Where a class is the predicted one itself."""

    def radius(self, steepness: Tensor) -> Tensor:
        """min_j room_j/L_j, never negative."""
        each = self.room / steepness.clamp_min(torch.finfo(steepness.dtype).tiny)
        nearest = torch.where(self.is_own, torch.inf, each).amin(dim=1)
        return nearest.clamp_min(0) * (1 - NORM_SLACK)

    def pairs(self, resolved: Resolved) -> Resolved:
        """Xg for the g of all classes, of rows that were solved for each class."""
        classes = len(resolved.rows)
        every = torch.arange(classes, device=self.best.device).expand(len(self.best), -1)
        return resolved.difference(self.best[:, None].expand(-1, classes), every)


@dataclass(frozen=True)
class InputSide:
    """How the image enters the equilibrium of an energy."""

    stem: float
    """Λ."""
    slope: Tensor
    """‖U‖Λ of each sample."""
    pull_back: Callable[[Tensor], Tensor]
    """Rows u ↦ (UΛ)ᵀu: at the image itself where the stem is affine."""

    def along(self, rows: Tensor, pairs: Resolved, one: Tensor, others: Tensor) -> Tensor:
        """‖(UΛ)ᵀXg‖, g the difference of two rows, with what the linear solves left open."""
        pulled = self.pull_back(rows)
        sizes: Tensor = torch.linalg.vector_norm(pulled[one] - pulled[others], dim=2)
        left: Tensor = torch.linalg.vector_norm(pairs.solution, dim=2) * NORM_SLACK
        return sizes + (left + pairs.error()) * self.slope[:, None]


def weighted_steepness(
    rivals: Rivals, resolved: Resolved, side: InputSide, convexity: Tensor
) -> Tensor:
    """½‖(UΛ)ᵀXg‖ + ½√(gᵀXg)·‖U‖Λ/√(1 − h)."""
    pairs = rivals.pairs(resolved)
    classes = torch.arange(len(resolved.rows), device=rivals.best.device)
    one = rivals.best[:, None].expand(-1, len(classes))
    along = side.along(resolved.solution, pairs, one, classes.expand_as(one))
    _, form = pairs.form()
    across = (form / convexity[:, None]).sqrt() * side.slope[:, None]
    return 0.5 * (along + across) * (1 + NORM_SLACK)


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
        cls, bounds: list[UnitBound], layout: tuple[tuple[int, ...], ...]
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

    def radius(
        self,
        rivals: Rivals,
        steepness: Tensor,
        rows: Tensor,
        resolvent: Resolvent,
        side: InputSide,
        convexity: Tensor,
    ) -> Tensor:
        """The radius by the activation pattern; `steepness` is what holds for any pattern."""
        certain = rivals.radius(steepness)
        count, trial = len(certain), certain
        each = torch.where(rivals.is_own, torch.inf, rivals.room / steepness)
        nearest = each.topk(min(RIVALS, each.shape[1] - 1), largest=False).indices
        classes = torch.cat([rivals.best[:, None], nearest], dim=1)
        place = torch.arange(classes.numel(), device=classes.device).view(classes.shape)
        own = place[:, :1].expand_as(place)
        for step in range(PATTERN_STEPS):
            ends = [
                resolvent.solve(
                    rows[classes].flatten(0, 1),
                    mask.to(rows).repeat_interleave(classes.shape[1], 0),
                )
                for mask in self.within(trial, side, convexity)
            ]
            low, high = (end.difference(own, place) for end in ends)
            middle = 0.5 * (ends[0].solution + ends[1].solution)
            along = side.along(middle, high, own, place) + low.error() * side.slope[:, None]
            spread = (high.form()[1] - low.form()[0]).clamp_min(0)
            across = (spread / convexity[:, None]).sqrt() * side.slope[:, None]
            found = (along + 0.5 * across) * (1 + NORM_SLACK)
            best_known = torch.minimum(steepness.gather(1, classes), found)
            new = rivals.radius(steepness.scatter(1, classes, best_known))
            certain = torch.maximum(certain, torch.minimum(trial, new))
            trial = new if step == 0 else (certain * torch.maximum(new, certain)).sqrt()
        assert len(certain) == count
        return certain
