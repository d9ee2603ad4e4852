"""Sparse matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equilibria.operators import spectral
from equilibria.operators.base import Shape, Weights, shape_error
from equilibria.operators.norm_control import KernelOperator, as_kernel, has_tangent, is_wrapped

PERRON_STEPS = 30
"""Number of power steps towards the Perron vector; each one costs products with A and Aᵀ."""


class Sparse(KernelOperator):
    """Sparse matrix A, applied along the first axis of a sample: z ↦ A z.

    `Dense` mixes the features of each node; `Sparse` mixes the nodes. A sample is a vector (n,), or
    node features (n, F). The kernel contains the stored entries of A.

    The norm bound is the spectral norm for up to 256 rows and columns. For larger matrices it is
    the smaller of the Frobenius norm and the bound of Collatz and Wielandt,
    √max_j (Mx)_j/x_j ≥ ‖ |A| ‖ with M = |A|ᵀ|A|, which holds for every x > 0. For x = 1 it is at
    most √(‖A‖₁‖A‖_∞); it decreases along x ← x + Mx/max(M1), to ‖A‖ if no entry is negative.

    Args:
        matrix: Sparse tensor of shape (out, in), COO or CSR.
        trainable: Whether the stored entries are trained; the sparsity pattern is fixed.
        norm: Norm control: "bound" guarantees ‖A‖ ≤ ζ, "estimate" approximates it by power
            iteration, None disables it.
        zeta: Limit ζ on the norm.

    Examples:
        >>> A = eq.operators.Sparse(torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse())
        >>> A(torch.tensor([[1.0, 3.0]]))
        tensor([[6., 0.]])
    """

    kernel: nn.Parameter
    indices: Tensor

    def __init__(
        self,
        matrix: Tensor,
        *,
        trainable: bool = False,
        norm: str | None = None,
        zeta: float = 0.95,
    ) -> None:
        if matrix.layout not in (torch.sparse_coo, torch.sparse_csr) or matrix.dim() != 2:
            raise ValueError(
                f"Sparse needs a 2-D sparse tensor (COO or CSR), got {matrix.layout} of shape "
                f"{tuple(matrix.shape)}; convert a dense matrix with matrix.to_sparse()"
            )
        if matrix.requires_grad:
            raise ValueError(
                "the matrix is part of an autograd graph, to which the operator would not be "
                "connected: pass matrix.detach(), with trainable=True to train its entries"
            )
        entries = matrix.to_sparse(layout=torch.sparse_coo).coalesce()
        indices, values = _checked(entries.indices(), entries.values(), tuple(matrix.shape))
        super().__init__(as_kernel(values, 1), norm=norm, zeta=zeta)
        self.kernel.requires_grad_(trainable)
        self.out_size, self.in_size = matrix.shape
        self.register_buffer("indices", indices)

    def extra_repr(self) -> str:
        entries = self.indices.shape[1]
        return f"{self.in_size}, {self.out_size}, entries={entries}{self._control_repr()}"

    def output_shape(self, input_shape: Shape) -> Shape:
        size, *others = input_shape or (None,)
        if size != self.in_size:
            raise shape_error(self, "input", f"(B, {self.in_size}, …)", input_shape)
        return (self.out_size, *others)

    def input_shape(self, output_shape: Shape) -> Shape:
        size, *others = output_shape or (None,)
        if size != self.out_size:
            raise shape_error(self, "output", f"(B, {self.out_size}, …)", output_shape)
        return (self.in_size, *others)

    def _control_shape(self, input_shape: Shape | None) -> Shape:
        return (self.in_size,)

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        return _product(self.indices, weights[0], self.out_size, z)

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        return _product(self.indices.flip(0), weights[0], self.in_size, y)

    def _search(self, kernels: Weights, input_shape: Shape) -> spectral.TopSingular | tuple[()]:
        if max(self.in_size, self.out_size) > spectral.DENSE_LIMIT:
            return ()
        matrix = kernels[0].new_zeros(self.out_size, self.in_size)
        return spectral.top_singular(matrix.index_put(tuple(self.indices), kernels[0]))

    def _bound_at(self, kernels: Weights, input_shape: Shape, data: Any) -> Tensor:
        if isinstance(data, spectral.TopSingular):
            return spectral.singular_value(
                lambda v: self._map(v[None], kernels)[0],
                lambda u: self._map_adjoint(u[None], kernels)[0],
                data,
            )
        return torch.minimum(torch.linalg.vector_norm(kernels[0]), self._perron_bound(kernels[0]))

    def _perron_bound(self, entries: Tensor) -> Tensor:
        absolute = (entries.abs(),)

        def product(x: Tensor) -> Tensor:
            return self._map_adjoint(self._map(x, absolute), absolute)

        vector = entries.new_ones(1, self.in_size)
        image = product(vector)
        largest = image.amax()
        for _ in range(PERRON_STEPS):
            vector = vector + image / largest
            image = product(vector)
        return (image / vector).amax().sqrt()


def _checked(indices: Tensor, values: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return indices and values after a check of the indices, which PyTorch does not make."""
    if min(shape) < 1:
        raise ValueError(f"the sizes of the matrix must be positive, got {shape}")
    if not len(values):  # norms need at least one entry
        return indices.new_zeros(2, 1), values.new_zeros(1)
    limits = indices.new_tensor(shape)
    if bool((indices < 0).any()) or bool((indices.amax(1) >= limits).any()):
        raise ValueError(f"the matrix has entries outside of its shape {shape}")
    return indices, values


def _is_transformed(*tensors: Tensor) -> bool:
    return is_wrapped(*tensors) or any(map(has_tangent, tensors))


def _product(indices: Tensor, values: Tensor, rows: int, z: Tensor) -> Tensor:
    """Return A z for the matrix A with `values` at `indices`; z has shape (B, columns, …)."""
    columns = z.flatten(2) if z.dim() > 2 else z[..., None]
    values = values.to(z.dtype)
    if values.requires_grad or _is_transformed(values, z) or z.device.type == "mps":
        # PyTorch computes the derivative in the entries from a dense matrix, and supports neither
        # forward-mode derivatives of sparse products nor sparse products on mps.
        pulled = columns.index_select(1, indices[1]) * values[:, None]
        shape = (len(z), rows, columns.shape[2])
        mapped = pulled.new_zeros(shape).index_add(1, indices[0], pulled)
    else:
        matrix = torch.sparse_coo_tensor(
            indices, values, (rows, z.shape[1]), check_invariants=False
        )
        side_by_side = columns.transpose(0, 1).flatten(1)
        mapped = (matrix @ side_by_side).view(rows, len(z), columns.shape[2]).transpose(0, 1)
    return mapped.reshape(len(z), rows, *z.shape[2:])
