"""Matrices with orthonormal rows, as a differentiable function of any matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equilibria.operators.norm_control import has_tangent, is_wrapped

JITTER = 1e-5
"""Number added to the eigenvalues of KKᵀ, in units of their mean."""


def orthonormal_rows(kernel: Tensor) -> Tensor:
    """Return Q = L⁻¹K with LLᵀ = KKᵀ + εI, the rows of K made orthonormal (Cholesky-QR).

    QQᵀ = I − εL⁻¹L⁻ᵀ, so that ‖Q‖ < 1. ε is `JITTER` times the mean eigenvalue of KKᵀ, which
    makes Q independent of the scale of K.

    Args:
        kernel: K, shape (rows, columns), with at most as many rows as columns.

    Returns:
        Q, shape (rows, columns), differentiable; NaN if K is zero or not finite.

    Examples:
        >>> from equilibria.operators.orthonormal import orthonormal_rows
        >>> rows = orthonormal_rows(torch.tensor([[3.0, 0.0, 0.0], [1.0, 2.0, 0.0]]))
        >>> torch.allclose(rows @ rows.T, torch.eye(2), atol=1e-4)
        True
    """
    if has_tangent(kernel) or is_wrapped(kernel):
        return _factored(kernel)[0]
    rows: Tensor = _OrthonormalRows.apply(kernel)  # type: ignore[no-untyped-call]
    return rows


def _factored(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q and L⁻¹."""
    gram = kernel @ kernel.mT
    identity = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
    mean = gram.diagonal().mean()
    lower, failed = torch.linalg.cholesky_ex(gram + JITTER * mean * identity)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    inverse = torch.where((failed == 0) & (mean > 0), inverse, torch.nan)
    return inverse @ kernel, inverse


class _OrthonormalRows(torch.autograd.Function):
    """`orthonormal_rows`, with a derivative that takes three products instead of six.

    From d(LLᵀ) = dK Kᵀ + K dKᵀ + dε I follows dQ = L⁻¹dK − Φ(M + Mᵀ + dε L⁻¹L⁻ᵀ) Q with
    M = L⁻¹dK Qᵀ, where Φ takes the lower triangle with half of the diagonal.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Tensor) -> Tensor:
        rows, inverse = _factored(kernel)
        ctx.save_for_backward(kernel, rows, inverse)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        kernel, rows, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            rows, _ = _factored(kernel)
            pulled: Tensor
            (pulled,) = torch.autograd.grad(rows, kernel, gradient, create_graph=True)
            return pulled
        lower = torch.tril(gradient @ rows.mT)
        diagonal = torch.diag(lower.diagonal())
        pulled = inverse.mT @ (gradient - (lower + lower.mT - diagonal) @ rows)
        # ε is proportional to the mean of |k_i|².
        share = ((lower - diagonal / 2) * (inverse @ inverse.mT)).sum()
        pulled = pulled - (2 * JITTER / len(kernel)) * share * kernel
        return pulled
