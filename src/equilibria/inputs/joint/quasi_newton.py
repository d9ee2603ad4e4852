"""Limited-memory BFGS on the rows of a buffer, each a problem of its own."""

from __future__ import annotations

import torch
from torch import Tensor

CURVED = 1e-3
"""The smallest cosine of a step with its change of the gradient that counts as curvature."""

Pair = tuple[Tensor, Tensor, Tensor]
"""A step, the change of the gradient over it, and one over their product, or 0 to leave it out."""


class QuasiNewton:
    """H g with H the inverse Hessian as the last steps show it (Nocedal, 1980).

    Steps without positive curvature, which kinks and lagging gradients bring, are left out row by
    row, and push nothing out of a full memory: a row that rests keeps what it knows.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.pairs: list[Pair] = []
        self.last: tuple[Tensor, Tensor] | None = None

    def observe(self, x: Tensor, gradient: Tensor, usable: Tensor) -> None:
        """The gradient at the latest x; `usable`: the rows where its change means something."""
        if self.last is not None:
            step, change = x - self.last[0], gradient - self.last[1]
            product = (step * change).sum(dim=1)
            sizes = torch.linalg.vector_norm(step, dim=1) * torch.linalg.vector_norm(change, dim=1)
            curved = usable & (product > CURVED * sizes) & torch.isfinite(sizes)
            weight = torch.where(curved, 1 / torch.where(curved, product, 1.0), 0.0)
            self._remember((step, change, weight), curved)
        self.last = (x, gradient)

    def _remember(self, pair: Pair, curved: Tensor) -> None:
        if len(self.pairs) < self.memory:
            self.pairs.append(pair)
            return
        shifted = [*self.pairs[1:], pair]
        if not bool(curved.all()):
            rows = curved[:, None]
            shifted = [
                (
                    torch.where(rows, step, old_step),
                    torch.where(rows, change, old_change),
                    torch.where(curved, weight, old_weight),
                )
                for (step, change, weight), (old_step, old_change, old_weight) in zip(
                    shifted, self.pairs, strict=True
                )
            ]
        self.pairs = shifted

    def direction(self, gradient: Tensor, first: Tensor) -> Tensor:
        """H g, or `first` · g in rows that know no curvature yet."""
        result, coefficients = gradient, []
        scale = torch.full_like(first, torch.nan)
        for step, change, weight in reversed(self.pairs):
            coefficient = weight * (step * result).sum(dim=1)
            coefficients.append(coefficient)
            # A row without weight may hold anything: it must not be multiplied by zero.
            result = result - _scaled(coefficient, change, weight)
            square = change.square().sum(dim=1)
            known = torch.isnan(scale) & (weight > 0) & (square > 0)
            scale = torch.where(known, 1 / (weight * torch.where(known, square, 1.0)), scale)
        result = result * torch.where(torch.isnan(scale), first, scale)[:, None]
        for (step, change, weight), coefficient in zip(
            self.pairs, reversed(coefficients), strict=True
        ):
            back = weight * (change * result).sum(dim=1)
            result = result + _scaled(coefficient - back, step, weight)
        downhill = (result * gradient).sum(dim=1) > 0
        return torch.where(downhill[:, None], result, first[:, None] * gradient)


def _scaled(factor: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return torch.where((weight > 0)[:, None], factor[:, None] * rows, 0.0)
