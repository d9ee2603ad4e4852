"""Bounds on the rounding error of linear operators in floating point."""

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
"""Relative margin of rigorous norms. Eigenvalues in float64 have errors of about n·2⁻⁵² times the
largest one; the margin covers n up to a million."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff, the largest relative error of one rounded operation."""
    return torch.finfo(dtype).eps / 2


def accumulated(terms: int, unit: float) -> float:
    """Return γ_n = nu/(1 − nu), the relative error of a sum of n products in any order.

    See Higham (2002), Section 3.1.
    """
    share = terms * unit
    return share / (1 - share) if share < 1 else math.inf


@torch.no_grad()
def upper_norm(operator: LinearOperator, input_shape: Shape) -> float:
    """Return an upper bound on ‖A‖ that includes rounding, for operators in float64."""
    return float(operator.norm_bound(input_shape)) * (1 + NORM_SLACK)


@torch.no_grad()
def application_rounding(
    operator: LinearOperator, exact: LinearOperator, input_shape: Shape, unit: float
) -> float | None:
    """Return ε with ‖fl(Az) − Az‖ ≤ ε‖z‖, fl(Az) the computed product; None if unknown.

    It holds for Aᵀ too. It is unknown for some types of operators.

    The operator must compute sums of products in any order, without Winograd or Fourier transforms,
    which PyTorch does not use on the CPU.

    An output is a sum of N products, with an error of γ_N|a_i|ᵀ|z| ≤ γ_N‖a_i‖‖z restricted to its
    window‖. A window of k numbers per channel covers every input at most k times, so the squares
    sum to γ_N² k‖K‖_F²‖z‖². The effective weights, whose norm control is computed in the same type,
    have a relative error ρ, which is measured; it adds ρ√k‖K‖_F.

    Args:
        operator: Operator as applied.
        exact: The operator A in float64.
        input_shape: Shape of one sample.
        unit: Unit roundoff of the type in which `operator` is applied.
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
    (rounded,), (reference,) = (a.weights(input_shape) for a in (operator, exact))
    window = math.prod(rounded.shape[2:])
    terms = max(rounded.shape[0], rounded.shape[1]) * window
    size = math.sqrt(window) * float(torch.linalg.vector_norm(reference.double()))
    error = accumulated(terms + 1, unit) + relative_difference(rounded, reference)
    return error * size * (1 + 1e-3)


def relative_difference(rounded: Tensor, reference: Tensor) -> float:
    """Return the largest relative difference between numbers and their reference in float64."""
    gap = (rounded.double() - reference.double()).abs()
    return float(torch.where(gap > 0, gap / reference.double().abs(), 0.0).amax())


def _of_product(operator: Compose, exact: Compose, input_shape: Shape, unit: float) -> float | None:
    """Return ∏(‖Aᵢ‖ + εᵢ) − ∏‖Aᵢ‖."""
    shape, with_errors, without = tuple(input_shape), 1.0, 1.0
    factors = zip(reversed(operator.factors), reversed(exact.factors), strict=True)
    for factor, exact_factor in factors:
        error = application_rounding(factor, exact_factor, shape, unit)
        if error is None:
            return None
        norm = upper_norm(exact_factor, shape)
        with_errors, without = with_errors * (norm + error), without * norm
        shape = factor.output_shape(shape)
    return with_errors - without
