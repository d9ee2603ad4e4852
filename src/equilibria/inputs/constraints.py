"""Where an optimized input may lie: balls, boxes and what they share, with exact projections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equilibria.solvers.convergence import row_norms

Bound = float | Tensor
NEWTON_STEPS = 60
"""Safeguarded steps for the multiplier of the ball: a handful is the rule, bisection the worst."""
SHARE_TOLERANCE = 32
"""To how many units of rounding the ball's equation is solved; a sum of squares has that error."""


class Constraint(ABC):
    """A convex set of inputs. `a & b` is the intersection."""

    @abstractmethod
    def restrict(self, region: Region, x: Tensor) -> Region:
        """What is left of `region`, for inputs of the shape of `x`."""

    def region(self, x: Tensor) -> Region:
        """The set for inputs like `x` (one row a problem); an empty one is an error."""
        return self.restrict(Region.everything(x), x).checked()

    def project(self, x: Tensor) -> Tensor:
        """The nearest point of the set, which is in it to the last bit."""
        return self.region(x).project(x.flatten(1)).reshape(x.shape)

    def __and__(self, other: Constraint) -> Intersection:
        return Intersection((self, other))


@dataclass(frozen=True, eq=False)
class L2Ball(Constraint):
    """‖x − center‖₂ ≤ radius for each input; `radius` is a number, or one for each."""

    center: Tensor
    radius: Bound

    def restrict(self, region: Region, x: Tensor) -> Region:
        if region.center is not None:
            raise ValueError(
                "the intersection of two L2 balls has no projection here; use one L2Ball "
                "together with boxes and LinfBalls"
            )
        return replace(
            region, center=_like(self.center, x, "center"), radius=_radius(self.radius, x)
        )


@dataclass(frozen=True, eq=False)
class LinfBall(Constraint):
    """max |x − center| ≤ radius for each input; `radius` is a number, or one for each."""

    center: Tensor
    radius: Bound

    def restrict(self, region: Region, x: Tensor) -> Region:
        center = _like(self.center, x, "center")
        radius = _radius(self.radius, x)[:, None]
        low, high = center - radius, center + radius
        # Rounding may have put the ends outside: one step of the format brings them back.
        low = torch.where(center - low > radius, torch.nextafter(low, center), low)
        high = torch.where(high - center > radius, torch.nextafter(high, center), high)
        return region.with_bounds(low, high)


@dataclass(frozen=True, eq=False)
class Box(Constraint):
    """low ≤ x ≤ high, with numbers or with tensors that fit the input."""

    low: Bound
    high: Bound

    def restrict(self, region: Region, x: Tensor) -> Region:
        low, high = _like(self.low, x, "low"), _like(self.high, x, "high")
        if not bool((low <= high).all()):
            raise ValueError("a Box needs low <= high everywhere, and neither may be NaN")
        return region.with_bounds(low, high)


@dataclass(frozen=True)
class Intersection(Constraint):
    """What several constraints share: at most one L2 ball, and any number of the others."""

    parts: Sequence[Constraint]

    def restrict(self, region: Region, x: Tensor) -> Region:
        for part in self.parts:
            region = part.restrict(region, x)
        return region


def _like(value: Bound, x: Tensor, name: str) -> Tensor:
    """A number or a tensor as one flat row a problem."""
    tensor = torch.as_tensor(value, dtype=x.dtype, device=x.device).detach()
    try:
        return tensor.expand(x.shape).flatten(1)
    except RuntimeError:
        raise ValueError(
            f"the {name} of a constraint has shape {tuple(tensor.shape)}, which does not fit "
            f"inputs of shape {tuple(x.shape)}"
        ) from None


def _radius(value: Bound, x: Tensor) -> Tensor:
    radius = torch.as_tensor(value, dtype=x.dtype, device=x.device).detach()
    if radius.dim() > 1 or radius.numel() not in (1, len(x)):
        raise ValueError(
            f"a radius is one number, or one for each of the {len(x)} inputs, not a tensor of "
            f"shape {tuple(radius.shape)}"
        )
    if not bool((radius >= 0).all()):
        raise ValueError(f"a radius must not be negative or NaN, as {value} is")
    return radius.expand(len(x))


@dataclass(frozen=True)
class Region:
    """{x : ‖x − center‖ ≤ radius, low ≤ x ≤ high} for each row; parts may be None."""

    size: Tensor
    """The length in which steps are measured where nothing bounds the inputs, for each row."""
    center: Tensor | None = None
    radius: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None

    @classmethod
    def everything(cls, x: Tensor) -> Region:
        flat = x.detach().flatten(1)
        length = row_norms(flat).nan_to_num(nan=0.0, posinf=0.0)
        return cls(size=length.clamp_min(max(flat.shape[1], 1) ** 0.5))

    def with_bounds(self, low: Tensor, high: Tensor) -> Region:
        if self.low is not None and self.high is not None:
            low, high = torch.maximum(low, self.low), torch.minimum(high, self.high)
        return replace(self, low=low, high=high)

    def checked(self) -> Region:
        """The region itself, or an error where it is empty for some row."""
        if self.low is not None and self.high is not None:
            empty = (self.low > self.high).any(dim=1)
            if bool(empty.any()):
                raise ValueError(
                    f"the bounds contradict each other for {int(empty.sum())} of {len(empty)} "
                    "inputs: no input satisfies the constraint"
                )
        if self.center is not None and self.radius is not None:
            missed = _distance(self._anchor(), self.center) > self.radius.double()
            if bool(missed.any()):
                raise ValueError(
                    f"the ball misses the box for {int(missed.sum())} of {len(missed)} inputs: no "
                    "input satisfies the constraint; move the center into the box or raise the "
                    "radius"
                )
        return self

    @property
    def scale(self) -> Tensor:
        """A length in which steps in the region are measured, for each row."""
        scale = self.size
        if self.low is not None and self.high is not None:
            half = row_norms(self.high - self.low) / 2
            scale = torch.where(torch.isfinite(half), half, scale)
        if self.radius is not None:
            bounded = scale if self.low is not None else self.radius
            scale = torch.minimum(bounded, self.radius)
        return scale.clamp_min(torch.finfo(scale.dtype).tiny)

    def project(self, y: Tensor) -> Tensor:
        """The nearest point of the region, differentiable in `y`; in it to the last bit."""
        if self.center is None or self.radius is None:
            return self._clamp(y)
        offset = y - self.center
        if self.low is None:
            length = row_norms(offset)
            outside = length > self.radius
            ratio = self.radius / torch.where(outside, length, 1.0)
            point = torch.where(outside[:, None], self.center + ratio[:, None] * offset, y)
        else:
            clamped = self._clamp(y)
            outside = _distance(clamped.detach(), self.center) > self.radius.double()
            share = self._share(offset, outside)[:, None]
            point = torch.where(
                outside[:, None], self._clamp(self.center + share * offset), clamped
            )
        with torch.no_grad():
            correction = self._pulled_in(point) - point
        return point + correction if bool(correction.any()) else point

    def _share(self, offset: Tensor, outside: Tensor) -> Tensor:
        """t with ‖clamp(c + t (y − c)) − c‖ = radius, for rows outside the ball.

        The projection onto ball and box is clamp(c + t (y − c)) with t = 1/(1 + λ), λ the ball's
        multiplier; the distance from c grows with t. Newton's steps inside a bracket find t; one
        more, in the graph, carries its derivative.
        """
        assert self.center is not None
        assert self.radius is not None
        fixed, goal = offset.detach(), self.radius.square()
        length = row_norms(fixed)
        share = (self.radius / length.clamp_min(torch.finfo(length.dtype).tiny)).clamp_max(1)
        below, above = torch.zeros_like(share), torch.ones_like(share)
        for _ in range(NEWTON_STEPS):
            excess, slope = self._excess(fixed, share, goal)
            far = excess.abs() > SHARE_TOLERANCE * torch.finfo(goal.dtype).eps * goal
            if not bool((outside & far).any()):
                break
            above = torch.where(excess > 0, share, above)
            below = torch.where(excess > 0, below, share)
            proposed = share - excess / slope
            inside = (proposed > below) & (proposed < above)
            share = torch.where(inside, proposed, (below + above) / 2)
        if offset.requires_grad:
            excess, slope = self._excess(offset, share, goal)
            carried = (excess - excess.detach()) / slope.detach()
            share = share - torch.where(slope > 0, carried, 0.0)
        found: Tensor = share
        return found

    def _excess(self, offset: Tensor, share: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        """‖clamp(c + t (y − c)) − c‖² − radius² and its derivative in t."""
        assert self.center is not None
        moved = self.center + share[:, None] * offset
        clamped = self._clamp(moved)
        free = (clamped == moved).to(offset.dtype)
        slope = 2 * share * (free * offset.square()).sum(dim=1)
        return (clamped - self.center).square().sum(dim=1) - goal, slope

    def _pulled_in(self, point: Tensor) -> Tensor:
        """Rows that rounding has left outside the ball, moved in by as little as it takes."""
        assert self.center is not None
        assert self.radius is not None
        anchor = self._anchor()
        step = torch.finfo(point.dtype).eps
        while True:
            outside = _distance(point, self.center) > self.radius.double()
            # The norm in the format of the numbers must agree.
            rough = row_norms(point - self.center)
            outside = (outside | (rough > self.radius))[:, None]
            if not bool(outside.any()):
                return point
            if step >= 1:
                return torch.where(outside, anchor, point)
            point = torch.where(outside, self._clamp(anchor + (1 - step) * (point - anchor)), point)
            step *= 2

    def _anchor(self) -> Tensor:
        """The point of the box nearest to the ball's center."""
        assert self.center is not None
        return self._clamp(self.center)

    def _clamp(self, y: Tensor) -> Tensor:
        return y if self.low is None else torch.clamp(y, self.low, self.high)


def _distance(point: Tensor, center: Tensor) -> Tensor:
    return row_norms(point.double() - center.double())
