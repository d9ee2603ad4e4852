"""Transposes and products of operators, and operators from tensors and modules."""

from __future__ import annotations

import functools
import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equilibria.operators.base import LinearOperator, Shape, Weights
from equilibria.operators.conv import Conv1d, Conv2d
from equilibria.operators.dense import Dense
from equilibria.operators.sparse import Sparse


class Adjoint(LinearOperator):
    """The transpose Aᵀ of an operator, which shares its parameters and norm bound.

    Args:
        operator: A.

    Examples:
        >>> A = eq.Dense(4, 3)
        >>> from equilibria.operators.compose import Adjoint
        >>> Adjoint(A)(torch.ones(1, 3)).shape  # the same as A.T
        torch.Size([1, 4])
    """

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
    """Product A₁ A₂ … Aₙ of operators; the last one is applied first, as in A @ B.

    The norm bound is the product of the bounds, ‖A B‖ ≤ ‖A‖ ‖B‖. Nested products are flattened.

    Args:
        operators: The factors A₁, …, Aₙ, at least one.

    Examples:
        >>> A = eq.Conv2d(3, 8, 3) @ eq.AveragePool(2)  # applies the pooling first
        >>> A(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 8, 4, 4])
    """

    def __init__(self, *operators: LinearOperator) -> None:
        super().__init__()
        if not operators:
            raise ValueError("Compose needs at least one operator; use Identity() for none")
        flat: list[LinearOperator] = []
        for operator in operators:
            if not isinstance(operator, LinearOperator):
                raise TypeError(
                    f"Compose needs operators, got a {type(operator).__name__}; convert a tensor "
                    "or a module with as_operator(...)"
                )
            flat.extend(operator.factors if isinstance(operator, Compose) else [operator])
        self.operators = nn.ModuleList(flat)
        self._anchor = flat[0]._anchor
        self.weight_count = sum(operator.weight_count for operator in flat)

    @property
    def factors(self) -> list[LinearOperator]:
        """Factors A₁, …, Aₙ; the last one is applied first."""
        return cast("list[LinearOperator]", list(self.operators))

    @property
    def bias_shape(self) -> Shape | None:
        known = (operator.bias_shape for operator in self.factors)
        return next((shape for shape in known if shape is not None), None)

    def weights(self, input_shape: Shape | None = None) -> Weights:
        """Return the weights of all factors, in the order of their application.

        Args:
            input_shape: Shape of one sample; needed if the norm control of a factor depends on it.
        """
        weights: list[Tensor] = []
        shape = input_shape
        for operator in reversed(self.factors):
            weights.extend(operator.weights(shape))
            shape = None if shape is None else operator.output_shape(shape)
        return tuple(weights)

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
        shape, bounds = tuple(input_shape), []
        for operator in reversed(self.factors):
            bounds.append(operator.norm_bound(shape))
            shape = operator.output_shape(shape)
        return functools.reduce(torch.mul, bounds)

    def row_norms(self, input_shape: Shape) -> Tensor:
        """Return the row norms of the first factor, times the norm bounds of the others."""
        first, *others = self.factors
        if not others:
            return first.row_norms(input_shape)
        inner = Compose(*others)
        return first.row_norms(inner.output_shape(input_shape)) * inner.norm_bound(input_shape)

    def _split(self, weights: Weights) -> list[tuple[LinearOperator, Weights]]:
        """Return each factor with its weights, in the order of their application."""
        if len(weights) != self.weight_count:
            raise ValueError(
                f"the product has {self.weight_count} weights, got {len(weights)}; pass the result "
                "of its method weights()"
            )
        pairs, begin = [], 0
        for operator in reversed(self.factors):
            end = begin + operator.weight_count
            pairs.append((operator, weights[begin:end]))
            begin = end
        return pairs

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        for operator, factor_weights in self._split(weights):
            z = operator(z, factor_weights)
        return z

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        for operator, factor_weights in reversed(self._split(weights)):
            y = operator.adjoint(y, factor_weights)
        return y


OperatorLike = LinearOperator | nn.Module | Tensor
"""Types that `as_operator` accepts."""


def as_operator(obj: object) -> LinearOperator:
    """Convert a tensor or a module to a linear operator.

    Parameters are shared and remain trainable; plain tensors become constants.

    Args:
        obj: An operator, which is returned unchanged; a tensor of shape (out, in), (out, in, k) or
            (out, in, k, k); a sparse matrix; or nn.Linear, nn.Conv1d or nn.Conv2d without bias.

    Returns:
        The operator.

    Raises:
        TypeError: If `obj` has another type or shape.
        ValueError: If a module has a bias or another unsupported option.

    Examples:
        >>> eq.operators.as_operator(torch.eye(3))(torch.ones(1, 3))
        tensor([[1., 1., 1.]])
    """
    if isinstance(obj, LinearOperator):
        return obj
    if isinstance(obj, Tensor) and obj.layout is not torch.strided:
        return Sparse(obj)
    if isinstance(obj, Tensor) and obj.dim() == 2:
        return Dense.from_tensor(obj)
    if isinstance(obj, Tensor) and obj.dim() == 3:
        return Conv1d.from_tensor(obj)
    if isinstance(obj, Tensor) and obj.dim() == 4:
        return Conv2d.from_tensor(obj)
    if isinstance(obj, nn.Linear):
        _check_module(obj)
        return Dense.from_tensor(obj.weight)
    if isinstance(obj, nn.Conv1d | nn.Conv2d):
        _check_module(obj)
        return _from_conv(obj)
    shape = f" of shape {tuple(obj.shape)}" if isinstance(obj, Tensor) else ""
    raise TypeError(
        f"cannot convert a {type(obj).__name__}{shape} to a linear operator; pass a "
        "LinearOperator, a tensor of shape (out, in), (out, in, k) or (out, in, k, k), a sparse "
        "matrix, or nn.Linear, nn.Conv1d or nn.Conv2d without bias"
    )


def _check_module(module: nn.Linear | nn.Conv1d | nn.Conv2d) -> None:
    name = type(module).__name__
    if module.bias is not None:
        raise ValueError(
            f"nn.{name} has a bias, so it is not linear: create it with bias=False and add the "
            "bias to the input term, Input(U, bias=True)"
        )
    if parametrize.is_parametrized(module):
        raise ValueError(
            f"nn.{name} is parametrized, so its weight cannot be shared: use Dense, Conv1d or "
            'Conv2d, with norm="bound" to control the norm'
        )


def _from_conv(conv: nn.Conv1d | nn.Conv2d) -> LinearOperator:
    unsupported = {
        "groups": conv.groups != 1,
        "dilation": any(d != 1 for d in conv.dilation),
        "padding_mode": conv.padding_mode != "zeros",
        "stride": len(set(conv.stride)) != 1,
        "padding": conv.padding == "same" and any(k % 2 == 0 for k in conv.kernel_size),
    }
    if any(unsupported.values()):
        options = ", ".join(
            f"{key}={getattr(conv, key)}" for key, is_wrong in unsupported.items() if is_wrong
        )
        raise ValueError(
            f"nn.{type(conv).__name__} with {options} is not supported: use one group, no "
            "dilation, zero padding, and the same stride in all directions"
        )
    padding: Shape | int | None
    if isinstance(conv.padding, str):
        padding = None if conv.padding == "same" else 0
    else:
        padding = tuple(conv.padding)
    make = Conv1d.from_tensor if isinstance(conv, nn.Conv1d) else Conv2d.from_tensor
    return make(conv.weight, stride=conv.stride[0], padding=padding)
