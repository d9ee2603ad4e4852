"""The largest singular value of a map: by power iteration, and as a differentiable function.

The second derivative of `torch.linalg.svdvals` divides by the gaps between *all* singular values,
so it is NaN if any two are equal, for example in a kernel with two zero channels. Here only the gap
below the largest one matters. Norms are computed in at least float32, without autocast, and without
a graph if they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]

DENSE_LIMIT = 256
"""Largest size of a map whose norm is computed from its matrix, which is exact."""


@contextmanager
def full_precision(tensor: Tensor) -> Iterator[None]:
    """Disable autocast on the device of a tensor."""
    with torch.autocast(tensor.device.type, enabled=False):
        yield


@contextmanager
def graph_free(tensor: Tensor) -> Iterator[None]:
    """Disable graphs and autocast, for values that are stored.

    Inference mode is disabled as well, because tensors created in it cannot be used in a graph
    later: an evaluation would make the stored values unusable for training.
    """
    with torch.inference_mode(False), torch.no_grad(), full_precision(tensor):
        yield


def seeded_vector(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a random unit vector that depends only on its shape.

    It is drawn on the CPU in float64, so that all devices and types get the same vector, with a
    separate generator, so that the global random state does not change.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    unit: Tensor = drawn / torch.linalg.vector_norm(drawn)
    return unit.to(device=like.device, dtype=like.dtype)


def leading_vector(apply: Map, adjoint: Map, start: Tensor, iterations: int) -> Tensor:
    """Run power iteration v ← AᵀA v / ‖AᵀA v‖, with `apply` for A and `adjoint` for Aᵀ.

    `start` and the result have a batch of one. If AᵀA v is zero or not finite, v does not change,
    so that the result is always a unit vector.
    """
    vector: Tensor = start / torch.linalg.vector_norm(start)
    for _ in range(iterations):
        image = adjoint(apply(vector))
        norm = torch.linalg.vector_norm(image)
        usable = (norm > 0) & (norm < torch.inf)
        vector = torch.where(usable, image / norm, vector)
    return vector


def norm_along(apply: Map, vector: Tensor) -> Tensor:
    """Return ‖A v‖, with `apply` for A and a constant unit vector v.

    It is differentiable in A, with gradient zero at A v = 0. Once v has converged, its derivative
    is that of ‖A‖, by the envelope theorem.
    """
    image = apply(vector)
    positive = image.detach().any()
    # At zero, both the argument and the result are replaced: the second derivative there is NaN.
    norm: Tensor = torch.linalg.vector_norm(torch.where(positive, image, 1.0))
    return torch.where(positive, norm, 0.0)


@dataclass(frozen=True)
class TopSingular:
    """Data about a matrix A for the derivatives of its largest singular value, without a graph.

    G is AᴴA, or AAᴴ if that is smaller (`left`), with the leading eigenpair (λ, v).

    Attributes:
        vector: Unit vector v.
        resolvent: Reduced resolvent (λI − G)⁺.
        left: Whether v is a left singular vector of A.
    """

    vector: Tensor
    resolvent: Tensor
    left: bool


def top_singular(matrix: Tensor) -> TopSingular:
    """Return the expansion point for `singular_value`, from one eigendecomposition."""
    rows, columns = matrix.shape
    left = rows < columns
    gram = matrix @ matrix.mH if left else matrix.mH @ matrix
    eigenvalues, eigenvectors = torch.linalg.eigh(gram)
    top = eigenvalues[-1]
    gap = top - eigenvalues
    # Directions that tie with the leading one do not change the subspace to first order. The
    # leading one has gap zero and is excluded too.
    tie = gap <= 8 * len(gap) * torch.finfo(gap.dtype).eps * top
    inverse_gap = torch.where(tie, 0.0, 1.0 / torch.where(tie, 1.0, gap))
    resolvent = (eigenvectors * inverse_gap) @ eigenvectors.mH
    return TopSingular(eigenvectors[:, -1].contiguous(), resolvent, left)


def singular_value(apply: Map, adjoint: Map, top: TopSingular) -> Tensor:
    """Return the largest singular value σ₁ of a map A, differentiable in A.

    It is computed at the expansion point `top` of the same A, with `apply` for A and `adjoint` for
    its adjoint, both on flat vectors. w = v + (λI − G)⁺ G(A) v is the leading vector to first order
    in A, so the Rayleigh quotient ‖A w‖/‖w‖ is σ₁ to third order: the value and the first three
    derivatives are exact. If σ₁ is not simple, the derivative is a subgradient.
    """
    forward, backward = (adjoint, apply) if top.left else (apply, adjoint)
    vector = top.vector + top.resolvent @ backward(forward(top.vector))
    return _length(forward(vector)) / _length(vector)


def _length(vector: Tensor) -> Tensor:
    parts = torch.view_as_real(vector) if vector.is_complex() else vector
    return parts.square().sum().sqrt()
