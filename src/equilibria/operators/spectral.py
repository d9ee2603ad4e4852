"""The largest singular value of a map, as a smooth function of the map.

`torch.linalg.svdvals` would do, were it not for its second derivative: that divides by the gaps
between *all* singular values and is NaN as soon as any two coincide (a kernel with two dead
channels is enough). Here only the gap below the largest matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.operators.power_iteration import Map


@dataclass(frozen=True)
class TopSingular:
    """What the derivatives of σ₁(A) need to know of A, free of any graph.

    With G = AᴴA (or AAᴴ, whichever is smaller, then `left` is true) and its leading eigenpair
    (λ, v): the unit vector v and the reduced resolvent (λI − G)⁺.
    """

    vector: Tensor
    resolvent: Tensor
    left: bool


def top_singular(matrix: Tensor) -> TopSingular:
    """The expansion point of `singular_value`, from one small Hermitian eigendecomposition."""
    rows, columns = matrix.shape
    left = rows < columns
    gram = matrix @ matrix.mH if left else matrix.mH @ matrix
    eigenvalues, eigenvectors = torch.linalg.eigh(gram)
    top = eigenvalues[-1]
    gap = top - eigenvalues
    # Directions that tie with the leading one carry no first-order change of the subspace; the
    # leading one itself has gap zero and falls out here too.
    tie = gap <= 8 * len(gap) * torch.finfo(gap.dtype).eps * top
    inverse_gap = torch.where(tie, 0.0, 1.0 / torch.where(tie, 1.0, gap))
    resolvent = (eigenvectors * inverse_gap) @ eigenvectors.mH
    return TopSingular(eigenvectors[:, -1].contiguous(), resolvent, left)


def singular_value(apply: Map, adjoint: Map, top: TopSingular) -> Tensor:
    """σ₁(A), differentiable in A, from the expansion point `top` of the same A.

    With w = v + (λI − G)⁺ G(A) v, which follows the leading vector to first order in A, the
    Rayleigh quotient ‖A w‖/‖w‖ follows σ₁ to third order: value and first three derivatives are
    exact. Where σ₁ is not simple this is a subgradient. `apply` and `adjoint` act on flat vectors.
    """
    forward, backward = (adjoint, apply) if top.left else (apply, adjoint)
    vector = top.vector + top.resolvent @ backward(forward(top.vector))
    return _length(forward(vector)) / _length(vector)


def _length(vector: Tensor) -> Tensor:
    parts = torch.view_as_real(vector) if vector.is_complex() else vector
    return parts.square().sum().sqrt()
