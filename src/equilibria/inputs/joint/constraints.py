"""Where an optimized input may lie: balls, boxes and what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.inputs.joint.region import Region

Bound = float | Tensor


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
        return region.with_ball(_like(self.center, x, "center"), _radius(self.radius, x))


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
