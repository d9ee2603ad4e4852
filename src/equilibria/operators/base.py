"""Base class of linear operators: application, transpose, and norm bound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equilibria.context.state import at_least_float32
from equilibria.operators.spectral import (
    full_precision,
    graph_free,
    leading_vector,
    norm_along,
    seeded_vector,
)

if TYPE_CHECKING:
    from equilibria.operators.compose import Compose

Shape = tuple[int, ...]
"""Shape of one sample, without the batch dimension."""

Weights = tuple[Tensor, ...]
"""Effective weights of an operator, as returned by `LinearOperator.weights`."""


class LinearOperator(nn.Module, ABC):
    """Base class of linear maps A between batches, with their exact transpose and a norm bound.

    Weights are separate from their application, because a solver applies A and Aᵀ many times, but
    the norm-controlled weights are computed once per solve:

        weights = A.weights(z.shape[1:])      # in the autograd graph
        A(z, weights), A.adjoint(y, weights)  # in every iteration

    A subclass implements the abstract methods and sets `weight_count` to the number of tensors that
    `weights` returns (0 for a map without parameters).

    Examples:
        >>> A = eq.Dense(3, 2) @ eq.Dense(4, 3)
        >>> z, y = torch.randn(1, 4), torch.randn(1, 2)
        >>> bool(torch.isclose((A(z) * y).sum(), (z * A.adjoint(y)).sum(), atol=1e-5))
        True
    """

    weight_count: int = 0
    _anchor: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Records the device and type set by `.to(...)` for operators without parameters.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)
        self._estimate_vectors: dict[Shape, Tensor] = {}

    @abstractmethod
    def output_shape(self, input_shape: Shape) -> Shape:
        """Return the shape of an output A z of the operator A for one sample.

        Args:
            input_shape: Shape of z, without the batch dimension.

        Raises:
            ValueError: If A cannot be applied to this shape.
        """

    @abstractmethod
    def input_shape(self, output_shape: Shape) -> Shape:
        """Return the shape of Aᵀ y, an input of the operator A, for one sample.

        It is the inverse of `output_shape`.

        Args:
            output_shape: Shape of y, without the batch dimension.

        Raises:
            ValueError: If Aᵀ cannot be applied to this shape.
        """

    @abstractmethod
    def norm_bound(self, input_shape: Shape) -> Tensor:
        """Return a rigorous upper bound on ‖A‖₂ for the effective weights; differentiable.

        Args:
            input_shape: Shape of one sample.
        """

    def row_norms(self, input_shape: Shape) -> Tensor:
        """Return upper bounds on the norms of the rows of A, broadcastable to an output.

        Args:
            input_shape: Shape of one sample.
        """
        return self.norm_bound(input_shape)

    @property
    def norm_limit(self) -> float | None:
        """Norm bound that holds for all parameters and needs no computation, or None."""
        return None

    @abstractmethod
    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        """Return A z; the shapes are checked."""

    @abstractmethod
    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        """Return Aᵀ y; the shapes are checked."""

    @property
    def bias_shape(self) -> Shape | None:
        """Shape of a bias with one entry per output channel; None if A does not define one."""
        return None

    def weights(self, input_shape: Shape | None = None) -> Weights:
        """Return the effective weights, in the autograd graph.

        Args:
            input_shape: Shape of one sample; needed if the norm control depends on it.
        """
        return ()

    def forward(self, z: Tensor, weights: Weights | None = None) -> Tensor:
        """Apply the operator A to a batch: return A z.

        Args:
            z: Batch of inputs, shape (B, *input_shape).
            weights: Result of `weights`; by default computed.
        """
        shape = tuple(z.shape[1:])
        self.output_shape(shape)
        return self._map(z, self.weights(shape) if weights is None else weights)

    def adjoint(self, y: Tensor, weights: Weights | None = None) -> Tensor:
        """Apply the exact transpose: return Aᵀ y, with ⟨A z, y⟩ = ⟨z, Aᵀ y⟩.

        Args:
            y: Batch of outputs, shape (B, *output_shape).
            weights: Result of `weights`; by default computed.
        """
        shape = self.input_shape(tuple(y.shape[1:]))
        return self._map_adjoint(y, self.weights(shape) if weights is None else weights)

    def norm_estimate(self, input_shape: Shape, iterations: int = 20) -> Tensor:
        """Estimate the operator norm ‖A‖₂ from below by power iteration; increases with its steps.

        The vector v is stored per shape for the next call. It is not part of the state_dict and is
        not shared with norm control, so the estimate does not change the outputs of a model.

        Args:
            input_shape: Shape of one sample.
            iterations: Number of power steps.
        """
        shape = tuple(input_shape)
        self.output_shape(shape)
        weights = tuple(at_least_float32(w) for w in self.weights(shape))
        like = at_least_float32(next(chain(self.parameters(), self.buffers())))
        with graph_free(like):
            fixed = tuple(w.detach() for w in weights)
            previous = self._estimate_vectors.get(shape)
            start = seeded_vector((1, *shape), like) if previous is None else previous.to(like)
            vector = self._leading_vector(fixed, start, iterations)
            self._estimate_vectors[shape] = vector
        with full_precision(like):
            return norm_along(lambda z: self._map(z, weights), vector)

    def _leading_vector(self, weights: Weights, start: Tensor, iterations: int) -> Tensor:
        return leading_vector(
            lambda z: self._map(z, weights),
            lambda y: self._map_adjoint(y, weights),
            start,
            iterations,
        )

    def _constant(self, value: float) -> Tensor:
        """Return a scalar on the device of the operator, in the type of norms."""
        return at_least_float32(self._anchor).new_tensor(value)

    @property
    def T(self) -> LinearOperator:  # noqa: N802 - named as in PyTorch and NumPy
        """Transpose Aᵀ as an operator that shares the parameters of A."""
        from equilibria.operators.compose import Adjoint

        return Adjoint(self)

    def __matmul__(self, other: LinearOperator) -> Compose:
        """Return the product A @ B, which applies B first."""
        if not isinstance(other, LinearOperator):
            raise TypeError(
                f"A @ B needs two operators, but B is a {type(other).__name__}; to apply an "
                "operator to a tensor, call it: A(z)"
            )
        from equilibria.operators.compose import Compose

        return Compose(self, other)


def shape_error(operator: LinearOperator, side: str, expected: str, actual: Shape) -> ValueError:
    """Return the error for a wrong shape; `side` is "input" or "output"."""
    shape = ", ".join(["B", *map(str, actual)])
    return ValueError(f"{operator}: expected an {side} of shape {expected}, got ({shape})")
