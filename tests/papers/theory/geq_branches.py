"""Branches and classifiers of GEQ for the tests of its theory."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.energies.gaussian import GaussianKernel
from equilibria.equilibrium import EquilibriumLayer
from equilibria.models import EquilibriumClassifier, GEQCell
from equilibria.models.geq.model import geq
from equilibria.operators import Conv2d
from equilibria.papers.theory.geq_bounds import BranchFacts, layer_facts


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def pixels(matrix: Tensor) -> Conv2d:
    """Return a matrix as a convolution of images with one pixel."""
    return Conv2d.from_tensor(matrix[:, :, None, None])


def whole(W: Tensor, U: Tensor, gamma: float, bias: Tensor | None = None) -> EquilibriumLayer:
    """Return a branch of the paper's theory, for vectors: one patch, no W_h."""
    given = None if bias is None else bias[:, None, None]
    kernel = GaussianKernel(pixels(U), pixels(W), patch=None, gamma=gamma, bias=given)
    return EquilibriumLayer(GEQCell(kernel), tolerance=1e-12, max_iterations=2000)


def of_norm(matrix: Tensor, norm: float) -> Tensor:
    return matrix * norm / torch.linalg.matrix_norm(matrix, 2)


def vectors(count: int, size: int, seed: int = 3) -> Tensor:
    return normal(count, size, 1, 1, seed=seed)


def facts_of(seed: int, norm: float, gamma: float) -> BranchFacts:
    W, U = of_norm(normal(5, 4, seed=seed), norm), normal(5, 3, seed=seed + 100)
    (facts,) = layer_facts(whole(W, U, gamma), 1.5 * vectors(6, 3, seed + 200))
    return facts


def small(**options: object) -> EquilibriumClassifier:
    torch.manual_seed(0)
    model = geq(
        num_classes=3,
        in_channels=1,
        channels=6,
        widths=(4, 6),
        channel_split=2,
        hidden=7,
        **options,
    )
    return model.double()


def images(count: int = 5) -> Tensor:
    return normal(count, 1, 4, 4, seed=9).sigmoid()
