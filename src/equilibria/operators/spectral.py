"""The largest singular value of a map: by power iteration, and as a smooth function of the map.

`torch.linalg.svdvals` would do, were it not for its second derivative: that divides by the gaps
between *all* singular values and is NaN as soon as any two coincide (a kernel with two dead
channels is enough). Here only the gap below the largest matters. Norms are computed in float32 at
least, never under autocast, and without a graph where their values are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]

DENSE_LIMIT = 256
"""Maps of at most this many numbers are bounded through their matrix: exact, and still cheap."""


@contextmanager
def full_precision(tensor: Tensor) -> Iterator[None]:
    """Switches autocast off on the tensor's device."""
    with torch.autocast(tensor.device.type, enabled=False):
        yield


@contextmanager
def graph_free(tensor: Tensor) -> Iterator[None]:
    """No graph and no autocast, for values that are kept.

    Inference mode is left too: a tensor made inside it could not enter a graph later, so that an
    evaluation would poison the cache of the next training step.
    """
    with torch.inference_mode(False), torch.no_grad(), full_precision(tensor):
        yield


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
    """Iterate v ← AᵀA v / ‖AᵀA v‖, `iterations` times; `start` and the result have a batch of one.

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
