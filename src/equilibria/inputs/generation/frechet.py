"""The Fréchet distance between two sets of features (Heusel et al., 2017)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Matrix = NDArray[np.float64]


def frechet_distance(features: Tensor, references: Tensor) -> float:
    """‖m₁ − m₂‖² + tr(C₁ + C₂ − 2 (C₁C₂)^½) of the Gaussians fitted to two sets of rows.

    With more columns than rows the covariances are singular; the distance is finite all the same.
    It falls as the number of rows grows, so compare only what was computed with equally many.
    """
    for rows in (features, references):
        if rows.dim() != 2 or len(rows) < 2:
            raise ValueError(
                f"expected at least two rows of features, not a tensor of {tuple(rows.shape)}"
            )
    one, other = (rows.detach().cpu().double().numpy() for rows in (features, references))
    return gaussian_distance(
        one.mean(axis=0), _covariance(one), other.mean(axis=0), _covariance(other)
    )


def gaussian_distance(
    mean: Matrix, covariance: Matrix, other_mean: Matrix, other_covariance: Matrix
) -> float:
    """The squared Fréchet (2-Wasserstein) distance between two Gaussians, in double precision.

    tr (C₁C₂)^½ = tr (R C₂ R)^½ with R the symmetric root of C₁, so it is the sum of the roots of
    symmetric eigenvalues. Those within rounding of zero count as zero: the root of a rounding
    error of 1e-15 is 3e-8, and singular covariances would add up many of them.
    """
    values, vectors = _nonnegative_eigh(covariance)
    root = (vectors * np.sqrt(values)) @ vectors.T
    shared = float(np.sqrt(_nonnegative_eigh(root @ other_covariance @ root)[0]).sum())
    apart = float(np.square(mean - other_mean).sum())
    distance = apart + float(np.trace(covariance) + np.trace(other_covariance)) - 2 * shared
    return max(distance, 0.0)


def _covariance(rows: Matrix) -> Matrix:
    covariance: Matrix = np.atleast_2d(np.cov(rows, rowvar=False))
    return covariance


def _nonnegative_eigh(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Eigenvalues and eigenvectors of a positive semi-definite matrix, free of rounding at zero."""
    values, vectors = np.linalg.eigh(matrix)
    rounding = len(values) * np.finfo(np.float64).eps * values[-1]
    return np.where(values > rounding, values, 0.0), vectors
