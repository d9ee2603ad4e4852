"""Norms of linear maps, compared with their matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equilibria.papers.theory import linear_maps
from tests.papers.theory.geq_branches import normal


def test_norms_agree_with_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = normal(9, 6)

    def mapped(v: Tensor) -> Tensor:
        return v.flatten(1) @ matrix.T

    squares = float(matrix.square().sum())
    gram = float((matrix.T @ matrix).square().sum())
    assert linear_maps.frobenius(mapped, (2, 3)) == pytest.approx(squares)
    assert linear_maps.gram_frobenius(mapped, (2, 3)) == pytest.approx(gram)
    smallest = float(torch.linalg.svdvals(matrix)[-1])
    assert linear_maps.least_singular(mapped, (2, 3)) == pytest.approx(smallest)
    monkeypatch.setattr(linear_maps, "MAX_MATRIX_COLUMNS", 5)
    assert linear_maps.frobenius(mapped, (2, 3)) == pytest.approx(squares, rel=0.2)
    assert linear_maps.gram_frobenius(mapped, (2, 3)) == pytest.approx(gram, rel=0.3)
    assert linear_maps.least_singular(mapped, (2, 3)) == 0
