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
LONGEST_SCALE = 1e3
"""A region this many times longer than its inputs does not bound them."""
SHARE_TOLERANCE = 32
"""To how many units of rounding the ball's equation is solved; a sum of squares has that error."""


class Constraint(ABC):
    """A convex set of inputs. `a & b` is the intersection.

    Examples:
        >>> ball = eq.inputs.L2Ball(torch.zeros(1, 2), 1.0)
        >>> isinstance(ball, eq.inputs.Constraint)
        True
    """

    @abstractmethod
    def restrict(self, region: Region, x: Tensor) -> Region:
        """What is left of `region`, for inputs of the shape of `x`."""

    def region(self, x: Tensor) -> Region:
        """The set for inputs like `x` (one row a problem); an empty one is an error."""
        if x.dim() < 2:
            raise ValueError(f"inputs are one row a problem, not of shape {tuple(x.shape)}")
        return self.restrict(Region.everything(x), x).checked()

    def project(self, x: Tensor) -> Tensor:
        """The nearest point of the set, which is in it to the last bit."""
        return self.region(x).project(x.flatten(1)).reshape(x.shape)

    def __and__(self, other: Constraint) -> Intersection:
        return Intersection((self, other))


@dataclass(frozen=True, eq=False)
class L2Ball(Constraint):
    """‖x − center‖₂ ≤ radius for each input; `radius` is a number, or one for each.

    Examples:
        >>> eq.L2Ball(torch.zeros(1, 2), 1.0).project(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """

    center: Tensor
    radius: Bound

    def restrict(self, region: Region, x: Tensor) -> Region:
        if region.ball is not None:
            raise ValueError(
                "the intersection of two L2 balls has no projection here; use one L2Ball "
                "together with boxes and LinfBalls"
            )
        return replace(region, ball=(_center(self.center, x), _radius(self.radius, x)))


@dataclass(frozen=True, eq=False)
class LinfBall(Constraint):
    """max |x − center| ≤ radius for each input; `radius` is a number, or one for each.

    Examples:
        >>> near = eq.LinfBall(torch.zeros(1, 2), 0.1) & eq.Box(0, 1)
        >>> near.project(torch.tensor([[-1.0, 1.0]]))
        tensor([[0.0000, 0.1000]])
    """

    center: Tensor
    radius: Bound

    def restrict(self, region: Region, x: Tensor) -> Region:
        center, radius = _center(self.center, x), _radius(self.radius, x)[:, None]
        low, high = center - radius, center + radius
        # Rounding may have put the ends outside: one step of the format brings them back.
        low = torch.where(center - low > radius, torch.nextafter(low, center), low)
        high = torch.where(high - center > radius, torch.nextafter(high, center), high)
        return region.with_bounds(low, high)


@dataclass(frozen=True, eq=False)
class Box(Constraint):
    """low ≤ x ≤ high, with numbers or with tensors that fit the input.

    Examples:
        >>> eq.Box(0, 1).project(torch.tensor([[-0.5, 0.3, 2.0]]))
        tensor([[0.0000, 0.3000, 1.0000]])
    """

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


def _center(value: Tensor, x: Tensor) -> Tensor:
    center = _like(value, x, "center")
    if not bool(torch.isfinite(center).all()):
        raise ValueError("the center of a ball holds NaN or Inf: nothing is near such a point")
    return center


def _radius(value: Bound, x: Tensor) -> Tensor:
    radius = torch.as_tensor(value, dtype=x.dtype, device=x.device).detach()
    if radius.dim() > 1 or radius.numel() not in (1, len(x)):
        raise ValueError(
            f"a radius is one number, or one for each of the {len(x)} inputs, not a tensor of "
            f"shape {tuple(radius.shape)}"
        )
    if not bool(((radius >= 0) & torch.isfinite(radius)).all()):
        raise ValueError(
            f"a radius must not be negative, NaN or infinite in {x.dtype}, as {value} is; leave "
            "out the ball where nothing bounds the inputs"
        )
    return radius.expand(len(x))


@dataclass(frozen=True)
class Region:
    """{x : ‖x − center‖ ≤ radius, low ≤ x ≤ high} for each row; without a ball it is None."""

    size: Tensor
    """The length in which steps are measured where nothing bounds the inputs, for each row."""
    low: Tensor
    high: Tensor
    ball: tuple[Tensor, Tensor] | None = None
    """Center and radius."""

    @classmethod
    def everything(cls, x: Tensor) -> Region:
        flat = x.detach().flatten(1)
        length = row_norms(flat).nan_to_num(nan=0.0, posinf=0.0)
        most = torch.full_like(flat, torch.inf)
        return cls(length.clamp_min(max(flat.shape[1], 1) ** 0.5), -most, most)

    @property
    def is_everything(self) -> bool:
        return self.ball is None and bool((self.high - self.low).isinf().all())

    def with_bounds(self, low: Tensor, high: Tensor) -> Region:
        return replace(self, low=torch.maximum(low, self.low), high=torch.minimum(high, self.high))

    def checked(self) -> Region:
        """The region itself, or an error where it is empty for some row."""
        empty = (self.low > self.high).any(dim=1)
        if bool(empty.any()):
            raise ValueError(
                f"the bounds contradict each other for {int(empty.sum())} of {len(empty)} "
                "inputs: no input satisfies the constraint"
            )
        if self.ball is not None:
            center, radius = self.ball
            missed = _distance(self.clamp(center), center) > radius.double()
            if bool(missed.any()):
                raise ValueError(
                    f"the ball misses the box for {int(missed.sum())} of {len(missed)} inputs: no "
                    "input satisfies the constraint; move the center into the box or raise the "
                    "radius"
                )
        return self

    @property
    def scale(self) -> Tensor:
        """A length in which steps in the region are measured, for each row.

        Half the box's diagonal or the ball's radius, unless that is so long that it bounds nothing.
        """
        longest = LONGEST_SCALE * self.size
        half = row_norms(self.high - self.low) / 2
        scale = torch.where(half <= longest, half, torch.inf)
        if self.ball is not None:
            scale = torch.minimum(scale, self.ball[1])
        scale = torch.where(scale <= longest, scale, self.size)
        return scale.clamp_min(torch.finfo(scale.dtype).tiny)

    def project(self, y: Tensor) -> Tensor:
        """The nearest point of the region, differentiable in `y`; in it to the last bit."""
        clamped = self.clamp(y)
        if self.ball is None:
            return clamped
        center, radius = self.ball
        outside = _distance(clamped.detach(), center) > radius.double()
        offset = y - center
        share = self._share(offset, outside)[:, None]
        point = torch.where(outside[:, None], self.clamp(center + share * offset), clamped)
        with torch.no_grad():
            correction = self._pulled_in(point) - point
        return point + correction if bool(correction.any()) else point

    def _share(self, offset: Tensor, outside: Tensor) -> Tensor:
        """Return t with ‖clamp(c + t (y − c)) − c‖ = radius, for rows outside the ball.

        The projection onto ball and box is clamp(c + t (y − c)) with t = 1/(1 + λ), λ the ball's
        multiplier; the distance from c grows with t. Newton's steps inside a bracket find t; one
        more, in the graph, carries its derivative. In double precision, and units of the radius:
        the square of a radius may be zero or infinite.
        """
        assert self.ball is not None
        center, radius = (tensor.double() for tensor in self.ball)
        unit = radius.clamp_min(torch.finfo(radius.dtype).tiny)[:, None]
        scaled = offset.double() / unit
        low, high = ((bound.double() - center) / unit for bound in (self.low, self.high))

        def excess_at(share: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
            """‖clamp(t (y − c))‖² − 1 and its derivative in t."""
            moved = share[:, None] * scaled
            clamped = torch.clamp(moved, low, high)
            free = torch.where(clamped == moved, scaled, 0.0)
            return clamped.square().sum(dim=1) - 1, 2 * share * free.square().sum(dim=1)

        fixed = scaled.detach()
        share = (1 / row_norms(fixed)).clamp_max(1)
        below, above = torch.zeros_like(share), torch.ones_like(share)
        for _ in range(NEWTON_STEPS):
            excess, slope = excess_at(share, fixed)
            far = excess.abs() > SHARE_TOLERANCE * torch.finfo(offset.dtype).eps
            if not bool((outside & far).any()):
                break
            above = torch.where(excess > 0, share, above)
            below = torch.where(excess > 0, below, share)
            proposed = share - excess / slope
            inside = (proposed > below) & (proposed < above)
            share = torch.where(inside, proposed, (below + above) / 2)
        if offset.requires_grad:
            excess, slope = excess_at(share, scaled)
            carried = (excess - excess.detach()) / slope.detach()
            share = share - torch.where(slope > 0, carried, 0.0)
        return share.to(offset.dtype)

    def _pulled_in(self, point: Tensor) -> Tensor:
        """Rows that rounding has left outside the ball, moved in by as little as it takes."""
        assert self.ball is not None
        center, radius = self.ball
        anchor = self.clamp(center)
        step = torch.finfo(point.dtype).eps
        while True:
            # The norm in the format of the numbers must agree, where it has one.
            rough = row_norms(point - center).nan_to_num(posinf=0.0)
            outside = (_distance(point, center) > radius.double()) | (rough > radius)
            outside = outside[:, None]
            if not bool(outside.any()):
                return point
            if step >= 1:
                return torch.where(outside, anchor, point)
            point = torch.where(outside, self.clamp(anchor + (1 - step) * (point - anchor)), point)
            step *= 2

    def clamp(self, y: Tensor) -> Tensor:
        """The nearest point within the bounds, whatever the ball."""
        return torch.clamp(y, self.low, self.high)


def _distance(point: Tensor, center: Tensor) -> Tensor:
    return row_norms(point.double() - center.double())
