"""A ball and bounds on the rows of a buffer, with their exact projection."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

NEWTON_STEPS = 60
"""Safeguarded steps for the multiplier of the ball: a handful is the rule, bisection the worst."""
SHARE_TOLERANCE = 32
"""To how many units of rounding the ball's equation is solved; a sum of squares has that error."""


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
        length = torch.linalg.vector_norm(flat, dim=1).nan_to_num(nan=0.0, posinf=0.0)
        return cls(size=length.clamp_min(max(flat.shape[1], 1) ** 0.5))

    def with_ball(self, center: Tensor, radius: Tensor) -> Region:
        return replace(self, center=center, radius=radius)

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
            half = torch.linalg.vector_norm(self.high - self.low, dim=1) / 2
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
            length = torch.linalg.vector_norm(offset, dim=1)
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
        length = torch.linalg.vector_norm(fixed, dim=1)
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
            rough = torch.linalg.vector_norm(point - self.center, dim=1)
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
    distance: Tensor = torch.linalg.vector_norm(point.double() - center.double(), dim=1)
    return distance
