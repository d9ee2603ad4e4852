"""Small examples of every operator for the contract tests. A new operator adds one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.operators import (
    Adjacency,
    AveragePool,
    Blur,
    Compose,
    Conv1d,
    Conv2d,
    Dense,
    GraphConv,
    Identity,
    Incidence,
    LinearOperator,
    Mask,
    SeparableConv2d,
    Sparse,
)
from equilibria.operators.base import Shape
from equilibria.operators.compose import Adjoint


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], LinearOperator]
    shape: Shape
    wrong: Shape | None

    def __str__(self) -> str:
        return self.name


EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 0, 4, 5], [1, 0, 2, 1, 3, 2, 3, 1, 5]])
"""A path with edges in both directions, three edges in one direction (including a loop), and an
isolated node."""


def scattered(rows: int, columns: int) -> Tensor:
    """Return a sparse matrix with random numbers at a fixed third of its entries."""
    entries = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(1))
    entries = entries[: rows * columns // 3]
    indices = torch.stack([entries // columns, entries % columns])
    values = torch.randn(len(entries)) * columns**-0.5
    return torch.sparse_coo_tensor(indices, values, (rows, columns), check_invariants=True)


def compressed(matrix: Tensor) -> Tensor:
    """Convert to CSR format, without PyTorch's warning that it is in beta state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return matrix.to_sparse_csr()


CASES = [
    Case("dense", lambda: Dense(5, 7), (5,), (6,)),
    Case("dense-bound", lambda: Dense(7, 5, norm="bound", zeta=0.7), (7,), (7, 1)),
    Case("dense-estimate", lambda: Dense(6, 6, norm="estimate", zeta=0.7), (6,), (5,)),
    Case("dense-orthonormal", lambda: Dense(6, 4, norm="orthonormal", zeta=0.7), (6,), (5,)),
    Case("dense-sequence", lambda: Dense(5, 3), (4, 5), (5, 4)),
    Case("dense-sequence-bound", lambda: Dense(5, 3, norm="bound", zeta=0.7), (2, 3, 5), (5, 1)),
    Case("dense-sequence-estimate", lambda: Dense(4, 4, norm="estimate"), (3, 4), (3,)),
    Case("conv1d", lambda: Conv1d(2, 3, 3), (2, 7), (3, 7)),
    Case("conv1d-pointwise", lambda: Conv1d(3, 2, 1), (3, 5), (3, 5, 5)),
    Case("conv1d-valid", lambda: Conv1d(2, 2, 3, padding=0), (2, 5), (2, 2)),
    Case("conv1d-full", lambda: Conv1d(2, 2, 3, padding=2), (2, 4), (1, 4)),
    Case("conv1d-even", lambda: Conv1d(2, 2, 4), (2, 6), (2, 1)),
    Case("conv1d-stride", lambda: Conv1d(2, 3, 3, stride=2), (2, 6), (2, 5)),
    Case("conv1d-stride3", lambda: Conv1d(2, 3, 5, stride=3), (2, 9), (2, 8)),
    Case("conv1d-bound", lambda: Conv1d(3, 2, 3, norm="bound"), (3, 5), (2, 5)),
    Case("conv1d-large", lambda: Conv1d(8, 9, 3, norm="bound", zeta=0.6), (8, 30), (8,)),
    Case("conv1d-large-stride", lambda: Conv1d(9, 7, 5, stride=2), (9, 30), (9, 29)),
    Case("conv1d-estimate", lambda: Conv1d(3, 2, 3, norm="estimate"), (3, 5), (2, 5)),
    Case("adjoint-conv1d", lambda: Conv1d(2, 3, 3, stride=2).T, (3, 4), (2, 4)),
    Case("product-conv1d", lambda: Conv1d(2, 3, 3) @ Conv1d(4, 2, 5), (4, 8), (2, 8)),
    Case("sparse", lambda: Sparse(scattered(5, 6)), (6,), (5,)),
    Case("sparse-csr", lambda: Sparse(compressed(scattered(5, 6))), (6, 2), (5, 2)),
    Case("sparse-trained", lambda: Sparse(scattered(6, 5), trainable=True), (5, 2, 3), (6, 2)),
    Case(
        "sparse-bound",
        lambda: Sparse(scattered(6, 5), trainable=True, norm="bound", zeta=0.7),
        (5, 2),
        (2, 5),
    ),
    Case(
        "sparse-estimate",
        lambda: Sparse(scattered(6, 6), trainable=True, norm="estimate", zeta=0.7),
        (6, 2),
        (2, 6),
    ),
    Case("sparse-large", lambda: Sparse(scattered(40, 300)), (300,), (40,)),
    Case(
        "sparse-large-bound",
        lambda: Sparse(scattered(300, 40), trainable=True, norm="bound", zeta=0.6),
        (40, 2),
        (300, 2),
    ),
    Case("adjacency", lambda: Adjacency(EDGES, nodes=7), (7,), (6,)),
    Case("adjacency-plain", lambda: Adjacency(EDGES, nodes=7, self_loops=False), (7, 2), (6, 2)),
    Case("graph-conv", lambda: GraphConv(EDGES, 2, 3, nodes=7), (7, 2), (7, 3)),
    Case("graph-conv-bound", lambda: GraphConv(EDGES, 4, 3, norm="bound"), (6, 4), (7, 4)),
    Case("incidence", lambda: Incidence(EDGES, nodes=7), (7,), (6,)),
    Case("incidence-normalized", lambda: Incidence(EDGES, normalized=True), (6, 3), (7, 3)),
    Case("adjoint-incidence", lambda: Incidence(EDGES).T, (5, 3), (6, 3)),
    Case("conv", lambda: Conv2d(2, 3, 3), (2, 5, 4), (3, 5, 4)),
    Case("conv1x1", lambda: Conv2d(3, 2, 1), (3, 3, 3), (3, 3)),
    Case("conv-valid", lambda: Conv2d(2, 2, 3, padding=0), (2, 5, 5), (2, 2, 5)),
    Case("conv-full", lambda: Conv2d(2, 2, 3, padding=2), (2, 3, 4), (1, 3, 4)),
    Case("conv-even", lambda: Conv2d(2, 2, 4), (2, 5, 6), (2, 1, 6)),
    Case("conv-rectangular", lambda: Conv2d(2, 3, (1, 3)), (2, 4, 5), (2, 4)),
    Case("conv-stride", lambda: Conv2d(2, 3, 3, stride=2), (2, 6, 4), (2, 5, 4)),
    Case("conv-patches", lambda: Conv2d(2, 5, 2, stride=2), (2, 6, 4), (2, 6, 3)),
    Case("conv-stride3", lambda: Conv2d(2, 3, 5, stride=3), (2, 6, 9), (2, 6, 8)),
    Case("conv-bound", lambda: Conv2d(3, 2, 3, norm="bound"), (3, 5, 5), (2, 5, 5)),
    Case("conv-large", lambda: Conv2d(3, 4, 3, norm="bound", zeta=0.6), (3, 11, 10), (3, 11)),
    Case("conv-large-stride", lambda: Conv2d(3, 4, 3, stride=2), (3, 12, 10), (3, 12, 9)),
    Case("conv-estimate", lambda: Conv2d(3, 2, 3, norm="estimate"), (3, 5, 5), (2, 5, 5)),
    Case("separable", lambda: SeparableConv2d(2, 3, 3), (2, 5, 4), (3, 5, 4)),
    Case("separable-stride", lambda: SeparableConv2d(3, 2, 3, stride=2), (3, 6, 4), (3, 5, 4)),
    Case("separable-even", lambda: SeparableConv2d(2, 2, (4, 2), padding=0), (2, 5, 6), (2, 3, 6)),
    Case(
        "separable-large",
        lambda: SeparableConv2d(3, 4, 3, norm="bound", zeta=0.6),
        (3, 11, 10),
        (3, 11),
    ),
    Case(
        "separable-large-stride",
        lambda: SeparableConv2d(4, 3, 5, stride=2, norm="bound", zeta=0.6),
        (4, 12, 10),
        (4, 12, 9),
    ),
    Case(
        "separable-estimate",
        lambda: SeparableConv2d(3, 2, 3, norm="estimate"),
        (3, 5, 5),
        (2, 5, 5),
    ),
    Case("pool", lambda: AveragePool(3), (2, 6, 9), (2, 6, 8)),
    Case("pool-sequence", lambda: AveragePool(3, directions=1), (2, 9), (2, 8)),
    Case("mask", lambda: Mask(torch.eye(4, 5)[None, None]), (2, 4, 5), (2, 4, 4)),
    Case("blur", lambda: Blur(0.9), (2, 6, 5), (2, 3, 6)),
    Case("identity", Identity, (4,), None),
    Case("adjoint", lambda: Conv2d(2, 3, 3, stride=2).T, (3, 3, 2), (2, 3, 2)),
    Case("adjoint-separable", lambda: SeparableConv2d(2, 3, 3).T, (3, 4, 4), (2, 4, 4)),
    Case("adjoint-bound", lambda: Adjoint(Dense(4, 6, norm="bound")), (6,), (4,)),
    Case(
        "product-separable",
        lambda: Conv2d(2, 3, 3) @ SeparableConv2d(4, 2, 3, norm="bound"),
        (4, 4, 5),
        (2, 4, 5),
    ),
    Case("product", lambda: Dense(4, 3) @ Dense(5, 4, norm="bound"), (5,), (4,)),
    Case(
        "product-nested",
        lambda: Compose(
            AveragePool(2), Compose(Conv2d(3, 2, 3).T, Identity()), Conv2d(2, 2, 3, norm="bound")
        ),
        (2, 4, 6),
        (3, 4, 6),
    ),
]


def dense(operator: LinearOperator, shape: Shape) -> Tensor:
    """Return the matrix of the operator, by application to a basis."""
    like = next((p for p in operator.parameters()), operator._anchor)
    size = int(torch.tensor(shape).prod())
    basis = torch.eye(size, dtype=like.dtype, device=like.device).view(size, *shape)
    return operator(basis).flatten(1).mT


def true_norm(operator: LinearOperator, shape: Shape) -> float:
    return float(torch.linalg.matrix_norm(dense(operator, shape).detach(), 2))
