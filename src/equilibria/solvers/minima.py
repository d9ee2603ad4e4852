"""Whether a stationary point is a minimum of the hidden objective, and the way out if it is not.

The objective is G(y) = 1ᵀf(y) + ½‖y‖² + E(y). At a stationary point, with S = σ′(−∇E(y)), its
Hessian on the active set is positive exactly if the largest eigenvalue of M = −S^½ ∇²E S^½ is
below 1. A few steps of Lanczos' method from a random vector estimate that eigenvalue; where it is
above 1, its eigenvector is a direction of negative curvature, along which G falls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equilibria.solvers.convergence import row_norms
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution, Status

STEPS = 12
"""Hessian products per test, at most."""
FEWEST_STEPS = 3
"""Hessian products before a test may end early."""
MARGIN = 1e-3
"""How far above 1 the eigenvalue must be: flat directions have 1 itself."""
FIRST_LENGTH = 0.1
"""Length of the first trial step along negative curvature, relative to the state."""
HALVINGS = 30
"""How often a trial step that does not lower the objective is halved."""
ROUNDS = 5
"""How often a sample is tested; one that is at a saddle in the last round has stalled."""

SADDLE = (
    "the point is a saddle or a maximum of the objective, and no lower point was found near it: "
    "start elsewhere (start=...), or add curvature to the energy"
)
"""The remedy of a solve that ended at a saddle."""

Descend = Callable[[FixedPointProblem], Solution]
"""Minimizes the objective of a problem from its start."""


def at_minima(
    problem: FixedPointProblem, solution: Solution, tolerance: float, descend: Descend
) -> Solution:
    """Return the solution with every sample that converged to a saddle or maximum moved on.

    Args:
        problem: The problem that was solved; it has a hidden objective.
        solution: Its solution.
        tolerance: The tolerance of the solve.
        descend: Solves some rows of the problem from a lower point.

    Returns:
        The solution. Samples that stay at a saddle have `Status.STALLED`.
    """
    for remaining in reversed(range(ROUNDS)):
        rows = (solution.status == int(Status.CONVERGED)).nonzero().squeeze(1)
        if not len(rows):
            break
        test = _CurvatureTest(problem, solution, rows, tolerance)
        saddles = test.find_negative_curvature()
        lower, found = saddles.new_empty(0), torch.zeros_like(saddles, dtype=torch.bool)
        if len(saddles) and remaining:
            lower, found = test.lower_points(saddles)
        solution = test.counted_in(solution)
        stuck, left = rows[saddles[~found]], rows[saddles[found]]
        if len(stuck):
            status = solution.status.index_fill(0, stuck, int(Status.STALLED))
            solution = replace(solution, status=status, remedy=SADDLE)
        if not len(left):
            break
        start = problem.unpack(lower[found].to(problem.buffer_dtype))
        rest = problem.in_context(solution.context).keep(left).started_at(start)
        solution = solution.continued(problem, left, descend(rest))
    return solution


@dataclass
class _Tridiagonal:
    """What Lanczos' method has found: the coefficients, and the vectors if they were kept."""

    diagonal: list[Tensor]
    beside: list[Tensor]
    vectors: list[Tensor]
    is_below_one: bool = False
    """Whether the norm seems to be below 1 in every row."""

    def largest(self) -> tuple[Tensor, Tensor]:
        """The largest Ritz value of each row, and its coefficients."""
        values, vectors = self._eigen()
        return values[:, -1], vectors[:, :, -1]

    def norm(self) -> Tensor:
        """About the norm of the matrix in each row, with the residuals of the two ends added."""
        values, vectors = self._eigen()
        ends = [
            values[:, end].abs() + self.beside[-1].double() * vectors[:, -1, end].abs()
            for end in (0, -1)
        ]
        return torch.maximum(*ends)

    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Ritz values in ascending order and their coefficients; zero for rows with NaN."""
        size = len(self.diagonal)
        matrix = torch.diag_embed(torch.stack(self.diagonal, dim=1).double())
        for place, value in enumerate(self.beside[: size - 1]):
            matrix[:, place, place + 1] = matrix[:, place + 1, place] = value.double()
        finite = torch.isfinite(matrix).all(dim=2).all(dim=1)
        values: tuple[Tensor, Tensor] = torch.linalg.eigh(
            torch.where(finite[:, None, None], matrix, 0.0)
        )
        return values


class _CurvatureTest:
    """The curvature of the objective at the states of some samples, which are stationary."""

    def __init__(
        self, problem: FixedPointProblem, solution: Solution, rows: Tensor, tolerance: float
    ) -> None:
        assert problem.potential is not None
        self.potential = potential = problem.potential
        self.y = y = problem.pack(solution.state)[rows]
        self.problem = problem = problem.in_context(solution.context).keep(rows)
        self.calls, self.sample_calls = 0, 0
        """Evaluations and Hessian products so far; of the batch, and counted per sample."""
        self.argument, self.product = potential.linearize(problem, y)
        self._count(y)
        a, activation = self.argument, potential.activation
        # A unit at a kink can move to either side, so the steeper side counts.
        size = (row_norms(a) + row_norms(y)) / max(1, a.shape[1]) ** 0.5
        near = (tolerance * size + torch.finfo(a.dtype).tiny ** 0.5)[:, None]
        slopes = [activation.derivative(a + side * near) for side in (-1, 0, 1)]
        self.slope = torch.stack(slopes).amax(dim=0)
        self.threshold = 1 + max(MARGIN, 10 * problem.epsilon)

    def _count(self, rows: Tensor) -> None:
        self.calls += 1
        self.sample_calls += len(rows)

    def counted_in(self, solution: Solution) -> Solution:
        """The solution with what the test cost."""
        return replace(
            solution,
            evaluations=solution.evaluations + self.calls,
            sample_evaluations=solution.sample_evaluations + self.sample_calls,
        )

    def find_negative_curvature(self) -> Tensor:
        """The rows at which the curvature is negative in some direction."""
        run = self._lanczos(self.product, self.slope, keep=False)
        if run.is_below_one:
            return torch.empty(0, dtype=torch.int64, device=self.y.device)
        largest, _ = run.largest()
        return (largest > self.threshold).nonzero().squeeze(1)

    def lower_points(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Points near these rows where the objective is lower, and whether there is one."""
        problem = self.problem.keep(rows)
        slope, a = self.slope[rows], self.argument[rows]
        product = self.potential.hessian_product(problem, self.y[rows])
        self._count(rows)
        run = self._lanczos(product, slope, keep=True)
        _, coefficients = run.largest()
        vector = torch.stack(run.vectors[: coefficients.shape[1]], dim=2)
        vector = (vector.double() * coefficients[:, None, :]).sum(dim=2)
        root = slope.double().sqrt()
        way = torch.where(root > 0, vector / root, 0.0)
        way = way / row_norms(way)[:, None]
        lifted, (before, size) = self._lifted_objective(problem, a)
        way, a = way.to(before), a.to(before)
        scale = torch.maximum(row_norms(a), row_norms(self.y[rows]).to(a))
        length = FIRST_LENGTH * torch.where(scale > 0, scale, a.shape[1] ** 0.5)[:, None]
        best, value = a, before - 4 * torch.finfo(a.dtype).eps * size
        found = torch.zeros_like(rows, dtype=torch.bool)
        for _ in range(HALVINGS):
            for trial in (a + length * way, a - length * way, a + length * way.abs()):
                after, _ = self._objective(lifted, trial)
                better = (after < value) & torch.isfinite(after)
                best = torch.where(better[:, None], trial, best)
                value = torch.where(better, after, value)
                found = found | better
            if bool(found.all()):
                break
            length = torch.where(found[:, None], length, length / 2)
        return self.potential.activation(best), found

    def _lifted_objective(
        self, problem: FixedPointProblem, a: Tensor
    ) -> tuple[FixedPointProblem, tuple[Tensor, Tensor]]:
        """The problem in float64, if the energy takes that, and its objective at σ(a)."""
        lifted = problem.lifted()
        try:
            return lifted, self._objective(lifted, a.to(lifted.buffer_dtype))
        except RuntimeError:
            if lifted is problem:
                raise
            return problem, self._objective(problem, a)

    def _objective(self, problem: FixedPointProblem, a: Tensor) -> tuple[Tensor, Tensor]:
        """G(σ(a)) of each row, and the size of its terms."""
        assert problem.potential is not None
        self._count(a)
        y = self.potential.activation(a)
        energy, _ = problem.potential.evaluate(problem, y)
        separable = a * y - self.potential.activation.primitive(a)
        return separable.sum(dim=1) + energy, separable.abs().sum(dim=1) + energy.abs()

    def _lanczos(
        self, product: Callable[[Tensor], Tensor], slope: Tensor, *, keep: bool
    ) -> _Tridiagonal:
        """Lanczos' method on M = −S^½ ∇²E S^½, which ends when no row is in doubt."""
        root, info = slope.sqrt(), torch.finfo(slope.dtype)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(1, slope.shape[1], generator=generator).to(slope)
        vector = torch.where(root > 0, drawn, 0.0)
        vector = vector / row_norms(vector).clamp_min(info.tiny)[:, None]
        run = _Tridiagonal([], [], [])
        previous = torch.zeros_like(vector)
        for step in range(STEPS):
            if keep:
                run.vectors.append(vector)
            image = -root * product(root * vector)
            self._count(vector)
            diagonal = torch.linalg.vecdot(image, vector)
            image = image - diagonal[:, None] * vector
            if run.beside:
                image = image - run.beside[-1][:, None] * previous
            beside = row_norms(image)
            run.diagonal.append(diagonal)
            run.beside.append(beside)
            previous = vector
            small = info.eps * (diagonal.abs() + 1)
            vector = torch.where((beside > small)[:, None], image / beside[:, None], 0.0)
            # A matrix whose norm seems to be below 1 has no eigenvalue above it.
            if step + 1 >= FEWEST_STEPS and bool((run.norm() < 1).all()):
                run.is_below_one = True
                break
        return run
