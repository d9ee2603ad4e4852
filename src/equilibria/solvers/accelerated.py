"""Accelerated proximal gradient descent on the hidden objective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from equilibria.solvers.base import Memory, Solver
from equilibria.solvers.problem import FixedPointProblem


@dataclass
class NesterovMemory(Memory):
    """Memory of `Accelerated`."""

    previous: Tensor
    """Image of the previous point."""
    age: Tensor
    """Number of steps of each row since its last restart."""
    factors: Tensor
    """Momentum factor by age, the same for all rows."""
    zero: Tensor
    one: Tensor
    """Constants; operations with tensors are faster than with Python numbers."""

    def keep(self, rows: Tensor) -> None:
        self.previous, self.age = self.previous[rows], self.age[rows]


@lru_cache(maxsize=8)
def momentum_factors(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (t_k − 1)/t_{k+1} for k < count, with t_0 = 1, t_{k+1} = ½(1 + √(1 + 4t_k²))."""
    factors, time = [], 1.0
    for _ in range(count):
        following = 0.5 * (1 + math.sqrt(1 + 4 * time * time))
        factors.append((time - 1) / following)
        time = following
    return torch.tensor(factors, dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class Accelerated(Solver[NesterovMemory]):
    """Nesterov's method with adaptive restart (O'Donoghue and Candès, 2015, gradient scheme).

    T(y) = prox_f(−∇E(y)) is one proximal gradient step of unit length on the hidden objective, so
    y ← T(y) + (t−1)/t⁺ · (T(y) − T(y_prev)) is its accelerated form. A sample whose momentum points
    uphill restarts. The method stores two vectors. Use it for maps with an objective (OptEq,
    energies with 0 ≼ −∇²E ≼ I); for others, such as Deep OptEq or MDEQ, use `Anderson`.

    Args:
        tolerance, max_iterations, stop, check_minimum: See `Method`.
        patience, check_every, drop_share, iterate: See `Solver`.

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)), solver=eq.Accelerated())
        >>> layer(torch.tensor([[1.0, -1.0]]))
        tensor([[1., 0.]], grad_fn=...)
    """

    drop_share: float = 0.25

    def starts_steady(self, problem: FixedPointProblem) -> bool:
        return True  # the first step has no momentum

    def begin(self, start: Tensor) -> NesterovMemory:
        age = torch.zeros(start.shape[0], dtype=torch.int64, device=start.device)
        factors = momentum_factors(self.max_iterations, start.dtype, start.device)
        return NesterovMemory(
            previous=start,
            age=age,
            factors=factors,
            zero=start.new_zeros(()),
            one=age.new_ones(()),
        )

    def propose(
        self, memory: NesterovMemory, point: Tensor, image: Tensor, change: Tensor
    ) -> Tensor:
        advance = image - memory.previous
        uphill = torch.linalg.vecdot(change, advance) < memory.zero
        memory.previous = image
        age = memory.age.masked_fill_(uphill, 0)
        momentum = memory.factors.index_select(0, age)
        age += memory.one
        return torch.addcmul(image, momentum.unsqueeze(1), advance, out=advance)
