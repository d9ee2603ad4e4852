"""Norms and singular values of linear maps that are given as functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

MAX_MATRIX_COLUMNS = 2048
"""Maps with at most this many columns are evaluated as a matrix; others with random vectors."""
PROBES = 128
"""Number of random vectors."""

Map = Callable[[Tensor], Tensor]
"""A linear map of a batch of tensors."""


@torch.no_grad()
def frobenius(mapped: Map, shape: tuple[int, ...]) -> float:
    """Compute the squared Frobenius norm ‖A‖²_F.

    Args:
        mapped: The map A.
        shape: Shape of one input, without the batch dimension.

    Returns:
        The exact value for at most `MAX_MATRIX_COLUMNS` columns, otherwise an unbiased estimate.
    """
    probes, factor = _probes(shape)
    return factor * float(mapped(probes).flatten(1).square().sum())


def gram_frobenius(mapped: Map, shape: tuple[int, ...]) -> float:
    """Compute the squared Frobenius norm ‖AᵀA‖²_F.

    Args:
        mapped: The map A.
        shape: Shape of one input, without the batch dimension.

    Returns:
        The exact value for at most `MAX_MATRIX_COLUMNS` columns, otherwise an unbiased estimate.
    """
    probes, factor = _probes(shape)
    return factor * float(adjoint(mapped, probes, mapped(probes).detach()).square().sum())


@torch.no_grad()
def least_singular(mapped: Map, shape: tuple[int, ...]) -> float:
    """Compute the smallest singular value of a map, or a lower bound on it.

    Args:
        mapped: The map A.
        shape: Shape of one input, without the batch dimension.

    Returns:
        The smallest singular value for at most `MAX_MATRIX_COLUMNS` columns, otherwise the lower
        bound 0. It is 0 also if A has more columns than rows.
    """
    probes, factor = _probes(shape)
    if factor != 1:
        return 0.0
    matrix = mapped(probes).flatten(1)
    return float(torch.linalg.svdvals(matrix)[-1]) if matrix.shape[1] >= len(matrix) else 0.0


def _probes(shape: tuple[int, ...]) -> tuple[Tensor, float]:
    """Return vectors v and a factor with ‖A‖²_F = factor · Σ‖Av‖².

    The vectors are a basis for small shapes. Otherwise they are random, and the equation holds in
    expectation.
    """
    count = math.prod(shape)
    if count <= MAX_MATRIX_COLUMNS:
        return torch.eye(count, dtype=torch.float64).reshape(count, *shape), 1.0
    signs = torch.randint(2, (PROBES, *shape), generator=torch.Generator().manual_seed(0))
    return 2.0 * signs.double() - 1, 1 / PROBES


def adjoint(mapped: Map, like: Tensor, vectors: Tensor) -> Tensor:
    """Apply the adjoint Aᵀ of a linear map A.

    Args:
        mapped: The map A.
        like: Batch with the shape of the inputs of A.
        vectors: Batch with the shape of the outputs of A.

    Returns:
        Aᵀ applied to the vectors, with the shape of `like`.
    """
    with torch.enable_grad():
        start = torch.zeros_like(like, requires_grad=True)
        (pulled,) = torch.autograd.grad(mapped(start), start, vectors)
    return pulled
