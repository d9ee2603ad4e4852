"""Every operator, small: the contract suite runs over this list. A new operator adds one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.operators import (
    Adjoint,
    AveragePool,
    Blur,
    Compose,
    Conv2d,
    Dense,
    Identity,
    LinearOperator,
    Mask,
    SeparableConv2d,
    Shape,
)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], LinearOperator]
    shape: Shape
    wrong: Shape | None

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("dense", lambda: Dense(5, 7), (5,), (6,)),
    Case("dense-bound", lambda: Dense(7, 5, norm="bound", zeta=0.7), (7,), (7, 1)),
    Case("dense-estimate", lambda: Dense(6, 6, norm="estimate", zeta=0.7), (6,), (5,)),
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
    """The matrix of the operator, by applying it to a basis."""
    like = next((p for p in operator.parameters()), operator._anchor)
    size = int(torch.tensor(shape).prod())
    basis = torch.eye(size, dtype=like.dtype, device=like.device).view(size, *shape)
    return operator(basis).flatten(1).mT


def true_norm(operator: LinearOperator, shape: Shape) -> float:
    return float(torch.linalg.matrix_norm(dense(operator, shape).detach(), 2))
