"""SAM: selects the fixed point with the smallest regularizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from equilibria.context import State
from equilibria.context.state import map_state
from equilibria.energies import Regularizer, get_regularizer
from equilibria.registry import check_positive
from equilibria.solvers.convergence import solution_of_last_iterate
from equilibria.solvers.picard import Picard
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution, Trace


@dataclass(frozen=True, kw_only=True)
class SAM(Picard):
    """Sequential averaging, which selects the fixed point with the smallest regularizer R.

    z ← β_k S_{λ_k}(z) + (1 − β_k) T(z), S_λ(z) = (1 − γλ) z − γ∇R(z) (OptEq Eq. 11, Theorem 5), for
    maps whose fixed points are not unique (‖W‖ = 1). The schedule is β_k = η/k^ρ, λ_k = η/k^c with
    γ = 1/2L and η = min(√2L, L/2, ½). The paper prints ρ/k^c for both, which leaves η unused and
    hardly selects. Selection is slow, like k^−c: the twenty iterations of the paper's training
    reduce R only a little. R acts on the state, so the state must be the feature (Deep OptEq, or
    OptEq in z-space).

    Every solve takes K = `max_iterations` steps, because a small residual does not imply a small R.
    The state is z^K, as in Eq. 12, which is not a value T(z). Residual and status are those of
    z^(K−1), the last point at which T was evaluated.

    Args:
        regularizer: Regularizer R, or its name.
        lipschitz: Lipschitz constant L of ∇R.
        rho, c: Exponents of the schedule; ρ, c > 0 and ρ + 2c < 1.
        max_iterations: Number of iterations K.
        damping, patience, check_every, drop_share, iterate, stop: Not used.
        tolerance, check_minimum: See `Method`.

    Examples:
        >>> sam = eq.solvers.SAM(regularizer="l2", max_iterations=20, tolerance=0.1)
        >>> layer = eq.EquilibriumLayer(lambda z, x: 0 * z + x, solver=sam)
        >>> layer.solve(torch.ones(1, 2)).state.shape
        torch.Size([1, 2])
    """

    regularizer: Regularizer = "l2"  # type: ignore[assignment]
    lipschitz: float = 1.0
    rho: float = 0.6
    c: float = 0.15
    max_iterations: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "regularizer", get_regularizer(self.regularizer))
        check_positive(lipschitz=self.lipschitz)
        if not (self.rho > 0 and self.c > 0 and self.rho + 2 * self.c < 1):
            raise ValueError(
                "rho and c must be positive with rho + 2c < 1 (OptEq Theorem 5), "
                f"got rho = {self.rho}, c = {self.c}"
            )

    @property
    def couples_batch(self) -> bool:
        return self.regularizer.couples_batch

    @property
    def gamma(self) -> float:
        """Step size γ = 1 / (2 · `lipschitz`)."""
        return 1 / (2 * self.lipschitz)

    def schedule(self, iteration: int) -> tuple[float, float]:
        """Return β_k and λ_k.

        Args:
            iteration: Number k of the iteration, from 1.
        """
        eta = min((2 * self.lipschitz) ** 0.5, self.lipschitz / 2, 0.5)
        return eta / iteration**self.rho, eta / iteration**self.c

    def unrolled_step(self, point: State, image: State, iteration: int) -> State:
        """Return the next iterate of Eq. 11; differentiable, for training by unrolling (R†).

        Args:
            point: Iterate z.
            image: T(z).
            iteration: Number k of the iteration, from 1.
        """
        beta, shrinkage = self.schedule(iteration)

        def mix(z: Tensor, mapped: Tensor) -> Tensor:
            pulled = (1 - self.gamma * shrinkage) * z - self.gamma * self.regularizer.gradient(z)
            return beta * pulled + (1 - beta) * mapped

        return map_state(mix, point, image)

    def run(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        """Run all iterations of Eq. 11.

        Args:
            problem: Map, context and start.
            trace: True records the residuals of all iterations, "states" also the states.
        """
        trace = trace or problem.trace
        point = problem.unpack(problem.take_start())
        recorded: list[Solution] = []
        for iteration in range(1, self.max_iterations + 1):
            image = problem.step(point, problem.context)
            solution = solution_of_last_iterate(
                problem,
                problem.context,
                point,
                image,
                steps=iteration,
                tolerance=self.tolerance,
                solver=self.method,
            )
            if iteration <= problem.refresh_until:
                problem = problem.refreshed(problem.pack(image))
            point = self.unrolled_step(point, image, iteration)
            solution = replace(solution, state=point)
            if trace:
                recorded.append(solution)
        if not trace:
            return solution
        states = [s.state for s in recorded] if trace == "states" else None
        return replace(solution, trace=Trace(torch.stack([s.residual for s in recorded]), states))
