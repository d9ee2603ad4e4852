"""Operators made of operators: identity, transpose, product."""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor, nn

from equilibria.operators.base import LinearOperator, Shape, Weights


class Identity(LinearOperator):
    """z itself; norm 1."""

    def output_shape(self, input_shape: Shape) -> Shape:
        return tuple(input_shape)

    def input_shape(self, output_shape: Shape) -> Shape:
        return tuple(output_shape)

    @property
    def norm_limit(self) -> float:
        return 1.0

    def norm_bound(self, input_shape: Shape) -> Tensor:
        return self._constant(1.0)

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        return z

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        return y


class Adjoint(LinearOperator):
    """Aᵀ as an operator; it shares A's parameters and norm (‖Aᵀ‖ = ‖A‖)."""

    def __init__(self, operator: LinearOperator) -> None:
        super().__init__()
        self.operator = operator
        self._anchor = operator._anchor
        self.weight_count = operator.weight_count

    def weights(self, input_shape: Shape | None = None) -> Weights:
        if input_shape is None:
            return self.operator.weights()
        return self.operator.weights(self.operator.input_shape(tuple(input_shape)))

    def output_shape(self, input_shape: Shape) -> Shape:
        return self.operator.input_shape(input_shape)

    def input_shape(self, output_shape: Shape) -> Shape:
        return self.operator.output_shape(output_shape)

    @property
    def norm_limit(self) -> float | None:
        return self.operator.norm_limit

    def norm_bound(self, input_shape: Shape) -> Tensor:
        return self.operator.norm_bound(self.operator.input_shape(input_shape))

    @property
    def T(self) -> LinearOperator:  # noqa: N802
        return self.operator

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        return self.operator.adjoint(z, weights)

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        return self.operator(y, weights)  # type: ignore[no-any-return]


class Compose(LinearOperator):
    """The product A₁ A₂ … Aₙ: the last operator is applied first, as in A @ B.

    Its bound is the product of the bounds, ‖A B‖ ≤ ‖A‖ ‖B‖. Products inside are flattened.
    """

    def __init__(self, *operators: LinearOperator) -> None:
        super().__init__()
        if not operators:
            raise ValueError("Compose needs at least one operator; the empty product is Identity()")
        flat: list[LinearOperator] = []
        for operator in operators:
            if not isinstance(operator, LinearOperator):
                raise TypeError(
                    f"Compose takes operators, got a {type(operator).__name__}; "
                    "as_operator(...) makes one of a tensor or a module"
                )
            flat.extend(operator.factors if isinstance(operator, Compose) else [operator])
        self.operators = nn.ModuleList(flat)
        self._anchor = flat[0]._anchor
        self.weight_count = sum(operator.weight_count for operator in flat)

    @property
    def factors(self) -> list[LinearOperator]:
        """The operators as written: the last one is applied first."""
        return cast("list[LinearOperator]", list(self.operators))

    @property
    def bias_shape(self) -> Shape | None:
        known = (operator.bias_shape for operator in self.factors)
        return next((shape for shape in known if shape is not None), None)

    def weights(self, input_shape: Shape | None = None) -> Weights:
        """The factors' weights one after the other, in the order in which they are applied."""
        gathered: list[Tensor] = []
        shape = input_shape
        for operator in reversed(self.factors):
            gathered.extend(operator.weights(shape))
            shape = None if shape is None else operator.output_shape(shape)
        return tuple(gathered)

    def output_shape(self, input_shape: Shape) -> Shape:
        shape = tuple(input_shape)
        for operator in reversed(self.factors):
            shape = operator.output_shape(shape)
        return shape

    def input_shape(self, output_shape: Shape) -> Shape:
        shape = tuple(output_shape)
        for operator in self.factors:
            shape = operator.input_shape(shape)
        return shape

    @property
    def norm_limit(self) -> float | None:
        limits = [operator.norm_limit for operator in self.factors]
        known = [limit for limit in limits if limit is not None]
        return math.prod(known) if len(known) == len(limits) else None

    def norm_bound(self, input_shape: Shape) -> Tensor:
        shape = tuple(input_shape)
        first, *rest = reversed(self.factors)
        bound = first.norm_bound(shape)
        previous = first
        for operator in rest:
            shape = previous.output_shape(shape)
            bound = bound * operator.norm_bound(shape)
            previous = operator
        return bound

    def _split(self, weights: Weights) -> list[tuple[LinearOperator, Weights]]:
        """Each factor with its own weights, in the order in which they are applied."""
        if len(weights) != self.weight_count:
            raise ValueError(
                f"the product has {self.weight_count} weights, got {len(weights)}; "
                "pass what its weights() returned"
            )
        pairs, begin = [], 0
        for operator in reversed(self.factors):
            end = begin + operator.weight_count
            pairs.append((operator, weights[begin:end]))
            begin = end
        return pairs

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        for operator, own in self._split(weights):
            z = operator(z, own)
        return z

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        for operator, own in reversed(self._split(weights)):
            y = operator.adjoint(y, own)
        return y
