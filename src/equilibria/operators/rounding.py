"""How far a linear map that is computed in floating point is from the map itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equilibria.operators.base import LinearOperator, Shape
from equilibria.operators.compose import Adjoint, Compose
from equilibria.operators.conv import PlainConvolution
from equilibria.operators.dense import Dense
from equilibria.operators.measurements import AveragePool, Identity

NORM_SLACK = 1e-9
"""Eigenvalues in float64 are right to about n·2⁻⁵² of the largest one: this is for n of a million.
A bound that has to hold is larger by this share."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """u: the largest relative error of one rounded operation."""
    return torch.finfo(dtype).eps / 2


def accumulated(terms: int, unit: float) -> float:
    """γ_n = nu/(1 − nu): of a sum of n products, in any order (Higham, 2002, Section 3.1)."""
    share = terms * unit
    return share / (1 - share) if share < 1 else math.inf


@torch.no_grad()
def upper_norm(operator: LinearOperator, input_shape: Shape) -> float:
    """‖A‖ from above, rounding included; for operators in float64."""
    return float(operator.norm_bound(input_shape)) * (1 + NORM_SLACK)


@torch.no_grad()
def application_rounding(
    operator: LinearOperator, exact: LinearOperator, input_shape: Shape, unit: float
) -> float | None:
    """ε with ‖fl(Az) − Az‖ ≤ ε‖z‖, for Aᵀ too; None for a kind of map that is not known.

    `operator` is applied in the type whose unit roundoff is given, by sums of products in any order
    (no Winograd or Fourier transform, which torch uses on no CPU); `exact`, its twin in float64, is
    the A that is meant.

    An output is a sum of N products: it is wrong by γ_N|a_i|ᵀ|z| ≤ γ_N‖a_i‖‖z restricted to its
    window‖. A window of k numbers a channel covers every input k times at most, so that the squares
    add up to γ_N² k‖K‖_F²‖z‖². The effective weights themselves (norm control is computed in the
    same type) are wrong by a share ρ, which is measured: ρ√k‖K‖_F.
    """
    if isinstance(operator, Identity):
        return 0.0
    if isinstance(operator, Adjoint) and isinstance(exact, Adjoint):
        inner = operator.operator
        shape = inner.input_shape(input_shape)
        return application_rounding(inner, exact.operator, shape, unit)
    if isinstance(operator, Compose) and isinstance(exact, Compose):
        return _of_product(operator, exact, input_shape, unit)
    if isinstance(operator, AveragePool):
        terms = operator.scale**operator.directions
        return accumulated(terms + 2, unit) * upper_norm(exact, input_shape)
    if type(operator) is Dense or isinstance(operator, PlainConvolution):
        return _of_kernel(operator, exact, input_shape, unit)
    return None


def _of_kernel(
    operator: Dense | PlainConvolution, exact: LinearOperator, input_shape: Shape, unit: float
) -> float:
    (used,), (meant,) = (one.weights(input_shape) for one in (operator, exact))
    window = math.prod(used.shape[2:])
    terms = max(used.shape[0], used.shape[1]) * window
    size = math.sqrt(window) * float(torch.linalg.vector_norm(meant.double()))
    return (accumulated(terms + 1, unit) + relative_difference(used, meant)) * size * (1 + 1e-3)


def relative_difference(used: Tensor, meant: Tensor) -> float:
    """The largest share by which a number in float64 and its rounded version differ."""
    gap = (used.double() - meant.double()).abs()
    return float(torch.where(gap > 0, gap / meant.double().abs(), 0.0).amax())


def _of_product(operator: Compose, exact: Compose, input_shape: Shape, unit: float) -> float | None:
    """∏(‖Aᵢ‖ + εᵢ) − ∏‖Aᵢ‖."""
    shape, with_errors, without = tuple(input_shape), 1.0, 1.0
    for one, meant in zip(reversed(operator.factors), reversed(exact.factors), strict=True):
        own = application_rounding(one, meant, shape, unit)
        if own is None:
            return None
        norm = upper_norm(meant, shape)
        with_errors, without = with_errors * (norm + own), without * norm
        shape = one.output_shape(shape)
    return with_errors - without
