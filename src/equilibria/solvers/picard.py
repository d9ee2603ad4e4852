"""Fixed-point iteration."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from equilibria.context import State
from equilibria.context.state import map_state
from equilibria.registry import check_share
from equilibria.solvers.base import Memory, Solver


@dataclass(frozen=True, kw_only=True)
class Picard(Solver[Memory]):
    """Picard iteration y ← (1 − damping)·y + damping·T(y).

    The OptEq, MOptEqs and GEQ papers use it. It converges at the rate of the contraction, so prefer
    `Accelerated` or `Anderson` for contraction factors near 1. For a layer defined by an energy
    E(y; x) with ‖∇²E‖ ≤ 1 and an activation σ = prox_f, each iteration is a proximal gradient step
    of length 1 on the layer's objective 1ᵀf(y) + ½‖y‖² + E(y; x), so the objective falls in every
    iteration.

    Args:
        damping: Step size in (0, 1]; 1 is the plain iteration.
        tolerance, max_iterations, stop, check_minimum: See `Method`.
        patience, check_every, drop_share, iterate: See `Solver`.

    Examples:
        >>> f = lambda z, x: z / 2 + x
        >>> eq.fixed_point(f, torch.ones(1, 1), solver=eq.Picard(tolerance=1e-6)).round(decimals=4)
        tensor([[2.]])
    """

    damping: float = 1.0
    drop_share: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(damping=self.damping)

    @property
    def steady(self) -> bool:
        return True

    def begin(self, start: Tensor) -> Memory:
        return Memory()

    def propose(self, memory: Memory, point: Tensor, image: Tensor, change: Tensor) -> Tensor:
        return image if self.damping == 1 else point + self.damping * change

    def unrolled_step(self, point: State, image: State, iteration: int) -> State:
        if self.damping == 1:
            return image
        return map_state(lambda y, mapped: y + self.damping * (mapped - y), point, image)
