"""The contract of a linear map: apply it, transpose it, bound it."""

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
"""The shape of one sample: without the batch dimension."""

Weights = tuple[Tensor, ...]
"""The effective weights of an operator, as `LinearOperator.weights` returns them."""


class LinearOperator(nn.Module, ABC):
    """A linear map A between batches of samples, with its exact transpose and a bound of its norm.

    Weights are separate from their application because a solver applies A and Aᵀ many times a
    solve while the (norm-controlled) weights need computing once:

        weights = A.weights(z.shape[1:])      # in the autograd graph
        A(z, weights), A.adjoint(y, weights)  # every iteration

    A subclass implements the abstract methods, and sets `weight_count` to the length of what
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
        # Operators without parameters have no other trace of `.to(...)` and `.double()`.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)
        self._estimate_vectors: dict[Shape, Tensor] = {}

    @abstractmethod
    def output_shape(self, input_shape: Shape) -> Shape:
        """The shape of A z for one sample; a ValueError where A does not take `input_shape`."""

    @abstractmethod
    def input_shape(self, output_shape: Shape) -> Shape:
        """The shape of Aᵀ y for one sample: the inverse of `output_shape`."""

    @abstractmethod
    def norm_bound(self, input_shape: Shape) -> Tensor:
        """A rigorous upper bound of ‖A‖₂ with its effective weights; differentiable."""

    def row_norms(self, input_shape: Shape) -> Tensor:
        """Upper bounds of the norms of A's rows, in a shape that meets that of an output."""
        return self.norm_bound(input_shape)

    @property
    def norm_limit(self) -> float | None:
        """A bound of the norm that holds by construction, without computing anything, or None."""
        return None

    @abstractmethod
    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        """A z, shapes already checked."""

    @abstractmethod
    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        """Aᵀ y, shapes already checked."""

    @property
    def bias_shape(self) -> Shape | None:
        """The shape of one trainable offset a channel of the output; None if A has no say in it."""
        return None

    def weights(self, input_shape: Shape | None = None) -> Weights:
        """The effective weights for inputs of this shape, in the autograd graph."""
        return ()

    def forward(self, z: Tensor, weights: Weights | None = None) -> Tensor:
        """A z."""
        shape = tuple(z.shape[1:])
        self.output_shape(shape)
        return self._map(z, self.weights(shape) if weights is None else weights)

    def adjoint(self, y: Tensor, weights: Weights | None = None) -> Tensor:
        """Aᵀ y, the exact transpose: ⟨A z, y⟩ = ⟨z, Aᵀ y⟩."""
        shape = self.input_shape(tuple(y.shape[1:]))
        return self._map_adjoint(y, self.weights(shape) if weights is None else weights)

    def norm_estimate(self, input_shape: Shape, iterations: int = 20) -> Tensor:
        """‖A v‖ after `iterations` steps of power iteration: a lower bound that rises to ‖A‖₂.

        The vector is kept for the next call (per shape, outside the state_dict and apart from the
        one that norm control uses, so that asking for an estimate changes no model's output).
        """
        shape = tuple(input_shape)
        self.output_shape(shape)
        weights = tuple(at_least_float32(w) for w in self.weights(shape))
        like = at_least_float32(next(chain(self.parameters(), self.buffers())))
        with graph_free(like):
            fixed = tuple(w.detach() for w in weights)
            kept = self._estimate_vectors.get(shape)
            start = seeded_vector((1, *shape), like) if kept is None else kept.to(like)
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
        """A scalar where the operator lives, in the dtype of norms."""
        return at_least_float32(self._anchor).new_tensor(value)

    @property
    def T(self) -> LinearOperator:  # noqa: N802 - the name torch and numpy give the transpose
        """The transpose as an operator of its own, sharing this one's parameters."""
        from equilibria.operators.compose import Adjoint

        return Adjoint(self)

    def __matmul__(self, other: LinearOperator) -> Compose:
        """A @ B: A after B."""
        if not isinstance(other, LinearOperator):
            raise TypeError(
                f"A @ B composes two operators, but B is a {type(other).__name__}; "
                "apply an operator by calling it: A(z)"
            )
        from equilibria.operators.compose import Compose

        return Compose(self, other)


def shape_error(operator: LinearOperator, side: str, expected: str, actual: Shape) -> ValueError:
    """The one wording for a wrong shape; `side` is "input" or "output"."""
    got = ", ".join(["B", *map(str, actual)])
    return ValueError(f"{operator}: expected an {side} of shape {expected}, got ({got})")
