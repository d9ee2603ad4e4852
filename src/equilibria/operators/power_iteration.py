"""Power iteration on AᵀA: a lower bound of ‖A‖ that rises to it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


def seeded_vector(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A unit vector that depends on its shape only.

    Drawn on the CPU in float64 and moved, so that every device and dtype starts from the same one,
    and from its own generator, so that the global random state stays untouched.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    unit: Tensor = drawn / torch.linalg.vector_norm(drawn)
    return unit.to(device=like.device, dtype=like.dtype)


def leading_vector(apply: Map, adjoint: Map, start: Tensor, iterations: int) -> Tensor:
    """v ← AᵀA v / ‖AᵀA v‖, `iterations` times; `start` and the result have a batch of one.

    Where AᵀA v is zero or not finite (A = 0, or a diverged A) v stays, so that what is stored
    remains a unit vector.
    """
    vector: Tensor = start / torch.linalg.vector_norm(start)
    for _ in range(iterations):
        image = adjoint(apply(vector))
        norm = torch.linalg.vector_norm(image)
        usable = (norm > 0) & (norm < torch.inf)
        vector = torch.where(usable, image / norm, vector)
    return vector


def norm_along(apply: Map, vector: Tensor) -> Tensor:
    """‖A v‖ for a unit vector v held constant: differentiable in A, zero gradients at A v = 0.

    By the envelope theorem this is the derivative of ‖A‖ once v has converged.
    """
    image = apply(vector)
    positive = image.detach().any()
    # At zero the norm is replaced before and after: its second derivative there is NaN.
    norm: Tensor = torch.linalg.vector_norm(torch.where(positive, image, 1.0))
    return torch.where(positive, norm, 0.0)
