"""Insertion of generated pixels into a picture with missing ones, without a seam."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.operators import Mask
from equilibria.solvers import conjugate_gradients

TOLERANCE = 1e-3
"""Relative tolerance. The remaining seam is this fraction of the model's error at the edge."""
MAX_ITERATIONS = 2000


@torch.no_grad()
def seamless_fill(measurement: Mask, measured: Tensor, images: Tensor) -> Tensor:
    """Fill hidden pixels with generated ones plus a smooth correction (Pérez et al., 2003).

    The correction e is the error of the generated images where that is known, e = ŷ − x̂, and
    harmonic elsewhere, Δe = 0. Filled areas have the gradients of the generated images and fit the
    measured pixels at their edges. `Mask.fill` uses e = 0 instead.

    Args:
        measurement: Mask of the known pixels.
        measured: Measured pixels ŷ, shape (B, C, H, W).
        images: Generated images x̂, shape (B, C, H, W).

    Returns:
        Images with the measured pixels where these are known.

    Examples:
        >>> mask = eq.operators.Mask(torch.tensor([[[[1.0, 0.0, 1.0]]]]))
        >>> measured = torch.tensor([[[[0.2, 0.0, 0.6]]]])
        >>> generated = torch.tensor([[[[0.1, 0.5, 0.1]]]])
        >>> eq.restoration.seamless_fill(mask, measured, generated)
        tensor([[[[0.2000, 0.8000, 0.6000]]]])
    """
    hidden = (1 - measurement.known.to(images)).expand_as(images)
    error = (1 - hidden) * (measured - images)

    def operator(rows: Tensor) -> Tensor:
        return (hidden * _laplacian(rows.reshape(images.shape))).flatten(1)

    membrane = conjugate_gradients(
        operator,
        operator(-error.flatten(1)),
        tolerance=TOLERANCE,
        max_iterations=MAX_ITERATIONS,
    ).value
    return measurement.fill(measured, images + membrane.reshape(images.shape))


def _laplacian(maps: Tensor) -> Tensor:
    """Return Σ (v − v′) over the neighbors v′ of each pixel within the image."""
    result = torch.zeros_like(maps)
    for dim in (2, 3):
        step = maps.diff(dim=dim)
        count = step.shape[dim]
        result.narrow(dim, 1, count).add_(step)
        result.narrow(dim, 0, count).sub_(step)
    return result
