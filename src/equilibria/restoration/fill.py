"""What a model draws where nothing was seen, joined to what was seen without a seam."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.operators import Mask
from equilibria.solvers import conjugate_gradients

TOLERANCE = 1e-3
"""Relative; the seam is that part of what the model is off by at the edge."""
MAX_ITERATIONS = 2000


@torch.no_grad()
def seamless_fill(measurement: Mask, measured: Tensor, images: Tensor) -> Tensor:
    """What was seen as it is, and elsewhere `images` plus a membrane e (Pérez et al., 2003).

    e is what the images are off by where that is known, e = ŷ − x̂, and harmonic where it is not,
    Δe = 0: the gradients are the model's, the edge of the hole is that of the measurement.
    `Mask.fill` takes e = 0 instead.

    Examples:
        >>> known = torch.tensor([[[[1.0, 0.0, 1.0]]]])
        >>> seen, drawn = torch.tensor([[[[0.2, 0.0, 0.6]]]]), torch.tensor([[[[0.1, 0.5, 0.1]]]])
        >>> eq.restoration.seamless_fill(eq.operators.Mask(known), seen, drawn)
        tensor([[[[0.2000, 0.8000, 0.6000]]]])
    """
    hidden = (1 - measurement.known.to(images)).expand_as(images)
    off = (1 - hidden) * (measured - images)

    def operator(rows: Tensor) -> Tensor:
        return (hidden * _laplacian(rows.reshape(images.shape))).flatten(1)

    membrane = conjugate_gradients(
        operator,
        operator(-off.flatten(1)),
        tolerance=TOLERANCE,
        max_iterations=MAX_ITERATIONS,
    ).value
    return measurement.fill(measured, images + membrane.reshape(images.shape))


def _laplacian(maps: Tensor) -> Tensor:
    """Σ (v − v′) over the neighbors v′ of each pixel; beyond the edge there are none."""
    result = torch.zeros_like(maps)
    for dim in (2, 3):
        step = maps.diff(dim=dim)
        count = step.shape[dim]
        result.narrow(dim, 1, count).add_(step)
        result.narrow(dim, 0, count).sub_(step)
    return result
