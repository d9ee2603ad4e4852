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

    tr (C₁C₂)^½ is the sum of the singular values of R₁R₂ with Rᵢ the symmetric root of Cᵢ: nothing
    is inverted, and rounding cannot make a square root of a negative number.
    """
    roots = _symmetric_root(covariance) @ _symmetric_root(other_covariance)
    shared = float(np.linalg.svd(roots, compute_uv=False).sum())
    apart = float(np.square(mean - other_mean).sum())
    distance = apart + float(np.trace(covariance) + np.trace(other_covariance)) - 2 * shared
    return max(distance, 0.0)


def _covariance(rows: Matrix) -> Matrix:
    covariance: Matrix = np.atleast_2d(np.cov(rows, rowvar=False))
    return covariance


def _symmetric_root(matrix: Matrix) -> Matrix:
    values, vectors = np.linalg.eigh(matrix)
    root: Matrix = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    return root
