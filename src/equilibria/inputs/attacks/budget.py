"""How far an attack may go, and what a step in that geometry is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from equilibria.inputs.joint import Box, Constraint, L2Ball, LinfBall

Norm = Literal["l2", "linf"]


@dataclass(frozen=True)
class Budget:
    """‖δ‖ ≤ eps in a norm, and images that stay images: values within `clip`."""

    norm: Norm
    eps: float
    clip: tuple[float, float] | None = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise ValueError(f"norm must be one of {', '.join(get_args(Norm))}, not {self.norm!r}")
        if not (self.eps >= 0 and math.isfinite(self.eps)):
            raise ValueError(f"eps must be a number that is not negative, not {self.eps}")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(
                f"clip must be the lowest and the highest value, not {self.clip}; None for no range"
            )

    def constraint(self, images: Tensor) -> Constraint:
        ball = L2Ball if self.norm == "l2" else LinfBall
        around = ball(images, self.eps)
        return around if self.clip is None else around & Box(*self.clip)

    def distance(self, images: Tensor, others: Tensor) -> Tensor:
        """‖δ‖ of each image, in double precision."""
        difference = (others.double() - images.double()).flatten(1)
        order = 2 if self.norm == "l2" else math.inf
        length: Tensor = torch.linalg.vector_norm(difference, ord=order, dim=1)
        return length

    def steepest(self, gradient: Tensor) -> Tensor:
        """The direction of length 1 in which the loss grows most: g/‖g‖₂, or sign(g)."""
        if self.norm == "linf":
            return gradient.sign()
        flat = gradient.flatten(1)
        # Divided by the largest entry first: the square of a tiny gradient is zero.
        largest = flat.abs().amax(dim=1, keepdim=True)
        flat = flat / torch.where(largest > 0, largest, 1.0)
        length = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
        return (flat / torch.where(length > 0, length, 1.0)).reshape(gradient.shape)

    def random_point(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Uniform in the ball around each image, then brought into the range."""
        device = images.device if generator is None else generator.device
        count, size = len(images), images[0].numel()
        if self.norm == "linf":
            unit = 2 * torch.rand(count, size, generator=generator, device=device) - 1
        else:
            direction = torch.randn(count, size, generator=generator, device=device)
            direction /= torch.linalg.vector_norm(direction, dim=1, keepdim=True)
            radius = torch.rand(count, 1, generator=generator, device=device) ** (1 / size)
            unit = radius * direction
        moved = images + self.eps * unit.to(images).reshape(images.shape)
        return self.constraint(images).project(moved)
