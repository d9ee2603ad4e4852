"""Norms of linear maps that are given as functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

MOST_COLUMNS = 2048
"""Of a map whose matrix is made; of larger ones norms are estimated by random vectors."""
PROBES = 128

Map = Callable[[Tensor], Tensor]
"""Linear, of a batch."""


@torch.no_grad()
def frobenius(mapped: Map, shape: tuple[int, ...]) -> float:
    """‖A‖²_F, of all columns where they are few."""
    probes, factor = _probes(shape)
    return factor * float(mapped(probes).flatten(1).square().sum())


def gram_frobenius(mapped: Map, shape: tuple[int, ...]) -> float:
    """‖AᵀA‖²_F."""
    probes, factor = _probes(shape)
    return factor * float(adjoint(mapped, probes, mapped(probes).detach()).square().sum())


@torch.no_grad()
def least_singular(mapped: Map, shape: tuple[int, ...]) -> float:
    """The least singular value; 0, which is below it, where the matrix would be large."""
    probes, factor = _probes(shape)
    if factor != 1:
        return 0.0
    matrix = mapped(probes).flatten(1)
    return float(torch.linalg.svdvals(matrix)[-1]) if matrix.shape[1] >= len(matrix) else 0.0


def _probes(shape: tuple[int, ...]) -> tuple[Tensor, float]:
    """Vectors v with ‖A‖²_F = factor · Σ‖Av‖²: a basis, or else in expectation."""
    count = math.prod(shape)
    if count <= MOST_COLUMNS:
        return torch.eye(count, dtype=torch.float64).reshape(count, *shape), 1.0
    signs = torch.randint(2, (PROBES, *shape), generator=torch.Generator().manual_seed(0))
    return 2.0 * signs.double() - 1, 1 / PROBES


def adjoint(mapped: Map, like: Tensor, vectors: Tensor) -> Tensor:
    """Aᵀ of vectors."""
    with torch.enable_grad():
        start = torch.zeros_like(like, requires_grad=True)
        (pulled,) = torch.autograd.grad(mapped(start), start, vectors)
    return pulled
