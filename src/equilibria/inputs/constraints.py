"""Constraints on optimized inputs: balls, boxes and their intersections, with exact projections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equilibria.solvers.convergence import row_norms

Bound = float | Tensor
MAX_NEWTON_STEPS = 60
"""Limit of the safeguarded steps for the ball's multiplier. Bisection alone needs this many."""
MAX_RELATIVE_SCALE = 1e3
"""A region that is larger than its inputs by this factor does not bound them."""
BALL_TOLERANCE = 32
"""Tolerance of the ball's equation, in units of rounding; the error of a sum of squares."""


class Constraint(ABC):
    """A convex set of inputs. `a & b` is the intersection.

    Examples:
        >>> ball = eq.inputs.L2Ball(torch.zeros(1, 2), 1.0)
        >>> isinstance(ball, eq.inputs.Constraint)
        True
    """

    @abstractmethod
    def restrict(self, region: Region, x: Tensor) -> Region:
        """Intersect `region` with this set, for inputs of the shape of `x`."""

    def region(self, x: Tensor) -> Region:
        """Return the set for a batch of inputs.

        Args:
            x: Inputs, one row per problem; only shape, type and size are used.

        Raises:
            ValueError: If the set is empty for a row, or does not fit the shape of `x`.
        """
        if x.dim() < 2:
            raise ValueError(
                f"inputs must have one row per problem, shape (problems, ...), got {tuple(x.shape)}"
            )
        return self.restrict(Region.everything(x), x).checked()

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest point of the set, which satisfies the constraint exactly.

        Args:
            x: Inputs, one row per problem.
        """
        return self.region(x).project(x.flatten(1)).reshape(x.shape)

    def __and__(self, other: Constraint) -> Intersection:
        return Intersection((self, other))


@dataclass(frozen=True, eq=False)
class L2Ball(Constraint):
    """The set ‖x − center‖₂ ≤ radius, for each input.

    Args:
        center: Centers, in a shape that broadcasts to the inputs.
        radius: Radius of all balls, or a tensor with one radius per input.

    Examples:
        >>> eq.L2Ball(torch.zeros(1, 2), 1.0).project(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """

    center: Tensor
    radius: Bound

    def restrict(self, region: Region, x: Tensor) -> Region:
        if region.ball is not None:
            raise ValueError(
                "the intersection of two L2 balls is not supported, because its projection is not "
                "implemented; use one L2Ball with any number of boxes and LinfBalls"
            )
        return replace(region, ball=(_center(self.center, x), _radius(self.radius, x)))


@dataclass(frozen=True, eq=False)
class LinfBall(Constraint):
    """The set max |x − center| ≤ radius, for each input.

    Args:
        center: Centers, in a shape that broadcasts to the inputs.
        radius: Radius of all balls, or a tensor with one radius per input.

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
        # Rounding may have moved the bounds out of the ball by one unit.
        low = torch.where(center - low > radius, torch.nextafter(low, center), low)
        high = torch.where(high - center > radius, torch.nextafter(high, center), high)
        return region.with_bounds(low, high)


@dataclass(frozen=True, eq=False)
class Box(Constraint):
    """The set low ≤ x ≤ high, for each input.

    Args:
        low: Lower bound, a number or a tensor that broadcasts to the inputs.
        high: Upper bound, a number or a tensor that broadcasts to the inputs.

    Examples:
        >>> eq.Box(0, 1).project(torch.tensor([[-0.5, 0.3, 2.0]]))
        tensor([[0.0000, 0.3000, 1.0000]])
    """

    low: Bound
    high: Bound

    def restrict(self, region: Region, x: Tensor) -> Region:
        low, high = _like(self.low, x, "low"), _like(self.high, x, "high")
        if not bool((low <= high).all()):
            raise ValueError("a Box must have low <= high in all entries, without NaN")
        return region.with_bounds(low, high)


@dataclass(frozen=True)
class Intersection(Constraint):
    """Intersection of at most one L2 ball and any number of other constraints."""

    parts: Sequence[Constraint]

    def restrict(self, region: Region, x: Tensor) -> Region:
        for part in self.parts:
            region = part.restrict(region, x)
        return region


def _like(value: Bound, x: Tensor, name: str) -> Tensor:
    """Broadcast a value to one flat row per problem."""
    tensor = torch.as_tensor(value, dtype=x.dtype, device=x.device).detach()
    try:
        return tensor.expand(x.shape).flatten(1)
    except RuntimeError:
        raise ValueError(
            f"the {name} of a constraint must broadcast to the inputs of shape {tuple(x.shape)}, "
            f"got shape {tuple(tensor.shape)}"
        ) from None


def _center(value: Tensor, x: Tensor) -> Tensor:
    center = _like(value, x, "center")
    if not bool(torch.isfinite(center).all()):
        raise ValueError("the center of a ball must be finite, got NaN or Inf")
    return center


def _radius(value: Bound, x: Tensor) -> Tensor:
    radius = torch.as_tensor(value, dtype=x.dtype, device=x.device).detach()
    if radius.dim() > 1 or radius.numel() not in (1, len(x)):
        raise ValueError(
            f"radius must be a number, or a tensor with one entry for each of the {len(x)} inputs, "
            f"got shape {tuple(radius.shape)}"
        )
    if not bool(((radius >= 0) & torch.isfinite(radius)).all()):
        raise ValueError(
            f"radius must be finite in {x.dtype} and not negative, got {value}; leave out the ball "
            "if the inputs are unbounded"
        )
    return radius.expand(len(x))


@dataclass(frozen=True)
class Region:
    """Set of inputs x with ‖x − center‖ ≤ radius and low ≤ x ≤ high, for each row of a batch.

    Attributes:
        size: Unit of the step length of rows that nothing bounds.
        low: Lower bounds, shape (rows, N).
        high: Upper bounds, shape (rows, N).
        ball: Center and radius, or None.
    """

    size: Tensor
    low: Tensor
    high: Tensor
    ball: tuple[Tensor, Tensor] | None = None

    @classmethod
    def everything(cls, x: Tensor) -> Region:
        flat = x.detach().flatten(1)
        length = row_norms(flat).nan_to_num(nan=0.0, posinf=0.0)
        infinite = torch.full_like(flat, torch.inf)
        return cls(length.clamp_min(max(flat.shape[1], 1) ** 0.5), -infinite, infinite)

    @property
    def is_everything(self) -> bool:
        return self.ball is None and bool((self.high - self.low).isinf().all())

    def with_bounds(self, low: Tensor, high: Tensor) -> Region:
        return replace(self, low=torch.maximum(low, self.low), high=torch.minimum(high, self.high))

    def checked(self) -> Region:
        """Return the region unchanged; raise `ValueError` if it is empty for a row."""
        empty = (self.low > self.high).any(dim=1)
        if bool(empty.any()):
            raise ValueError(
                f"the constraint is empty for {int(empty.sum())} of {len(empty)} inputs: a lower "
                "bound exceeds an upper bound; enlarge the boxes or LinfBalls"
            )
        if self.ball is not None:
            center, radius = self.ball
            missed = _distance(self.clamp(center), center) > radius.double()
            if bool(missed.any()):
                raise ValueError(
                    f"the constraint is empty for {int(missed.sum())} of {len(missed)} inputs: the "
                    "ball does not reach the box; move the center into the box or raise the radius"
                )
        return self

    @property
    def scale(self) -> Tensor:
        """Unit of the step length, for each row.

        Half the diagonal of the box or the radius of the ball, unless these are too large to bound
        anything.
        """
        longest = MAX_RELATIVE_SCALE * self.size
        half = row_norms(self.high - self.low) / 2
        scale = torch.where(half <= longest, half, torch.inf)
        if self.ball is not None:
            scale = torch.minimum(scale, self.ball[1])
        scale = torch.where(scale <= longest, scale, self.size)
        return scale.clamp_min(torch.finfo(scale.dtype).tiny)

    def project(self, y: Tensor) -> Tensor:
        """Return the nearest point of the region, exactly in it and differentiable in `y`."""
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
        multiplier; the distance from c grows with t. Newton's method inside a bracket finds t. One
        more step, in the graph, gives its derivative.
        """
        # Double precision and units of the radius, whose square may underflow or overflow.
        assert self.ball is not None
        center, radius = (tensor.double() for tensor in self.ball)
        unit = radius.clamp_min(torch.finfo(radius.dtype).tiny)[:, None]
        scaled = offset.double() / unit
        low, high = ((bound.double() - center) / unit for bound in (self.low, self.high))

        def excess_at(share: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
            """Return ‖clamp(t (y − c))‖² − 1 and its derivative in t."""
            moved = share[:, None] * scaled
            clamped = torch.clamp(moved, low, high)
            free = torch.where(clamped == moved, scaled, 0.0)
            return clamped.square().sum(dim=1) - 1, 2 * share * free.square().sum(dim=1)

        fixed = scaled.detach()
        share = (1 / row_norms(fixed)).clamp_max(1)
        below, above = torch.zeros_like(share), torch.ones_like(share)
        for _ in range(MAX_NEWTON_STEPS):
            excess, slope = excess_at(share, fixed)
            far = excess.abs() > BALL_TOLERANCE * torch.finfo(offset.dtype).eps
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
        """Move rows that are outside the ball by rounding inward, as little as possible."""
        assert self.ball is not None
        center, radius = self.ball
        anchor = self.clamp(center)
        step = torch.finfo(point.dtype).eps
        while True:
            # The norm in the type of the inputs must agree, unless it overflows.
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
        """Return the nearest point within the bounds, ignoring the ball."""
        return torch.clamp(y, self.low, self.high)


def _distance(point: Tensor, center: Tensor) -> Tensor:
    return row_norms(point.double() - center.double())
