"""Test of stationary points for minima of the hidden objective, and the step away from saddles.

The objective is G(y) = 1ᵀf(y) + ½‖y‖² + E(y). At a stationary point, with S = σ′(−∇E(y)), its
Hessian on the active set is positive exactly if the largest eigenvalue of M = −S^½ ∇²E S^½ is
below 1. A few steps of Lanczos' method from a random vector estimate that eigenvalue. If it is
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

MAX_LANCZOS_STEPS = 12
"""Largest number of Hessian products per test."""
MIN_LANCZOS_STEPS = 3
"""Number of Hessian products before a test may end early."""
MIN_EXCESS = 1e-3
"""Excess of the eigenvalue over 1 that counts as negative curvature; flat directions have 0."""
FIRST_STEP_LENGTH = 0.1
"""Length of the first trial step along negative curvature, relative to the state."""
MAX_HALVINGS = 30
"""Largest number of halvings of a trial step that does not lower the objective."""
MAX_TESTS = 5
"""Largest number of tests per sample; one that is at a saddle in the last test has stalled."""

SADDLE = (
    "the point is a saddle or a maximum of the objective, and no lower point was found nearby: "
    "start elsewhere (start=...), or add curvature to the energy"
)
"""Remedy of a solve that ended at a saddle."""

Descend = Callable[[FixedPointProblem], Solution]
"""Minimizes the objective of a problem from its start."""


def at_minima(
    problem: FixedPointProblem, solution: Solution, tolerance: float, descend: Descend
) -> Solution:
    """Continue every sample that converged to a saddle or a maximum of the objective.

    Args:
        problem: Problem with a hidden objective.
        solution: Its solution.
        tolerance: Tolerance of the solve.
        descend: Solves some rows of the problem from a lower point.

    Returns:
        The solution. Samples that remain at a saddle have `Status.STALLED`.
    """
    for remaining in reversed(range(MAX_TESTS)):
        rows = (solution.status == int(Status.CONVERGED)).nonzero().squeeze(1)
        if not len(rows):
            break
        test = _CurvatureTest(problem, solution, rows, tolerance)
        saddles = test.find_negative_curvature()
        lower, is_lower = saddles.new_empty(0), torch.zeros_like(saddles, dtype=torch.bool)
        if len(saddles) and remaining:
            lower, is_lower = test.lower_points(saddles)
        solution = test.with_cost(solution)
        stuck, movable = rows[saddles[~is_lower]], rows[saddles[is_lower]]
        if len(stuck):
            status = solution.status.index_fill(0, stuck, int(Status.STALLED))
            solution = replace(solution, status=status, remedy=SADDLE)
        if not len(movable):
            break
        start = problem.unpack(lower[is_lower].to(problem.buffer_dtype))
        rest = problem.in_context(solution.context).keep(movable).started_at(start)
        solution = solution.continued(problem, movable, descend(rest))
    return solution


@dataclass
class _Tridiagonal:
    """Result of Lanczos' method: the coefficients, and the vectors if they were stored."""

    diagonal: list[Tensor]
    beside: list[Tensor]
    vectors: list[Tensor]
    is_below_one: bool = False
    """Whether the estimated norm is below 1 in every row."""

    def largest(self) -> tuple[Tensor, Tensor]:
        """Return the largest Ritz value of each row and its coefficients."""
        values, vectors = self._eigen()
        return values[:, -1], vectors[:, :, -1]

    def norm(self) -> Tensor:
        """Estimate the norm of the matrix of each row, including the residuals of both ends."""
        values, vectors = self._eigen()
        ends = [
            values[:, end].abs() + self.beside[-1].double() * vectors[:, -1, end].abs()
            for end in (0, -1)
        ]
        return torch.maximum(*ends)

    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Return Ritz values in ascending order and their coefficients; zero for rows with NaN."""
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
    """Curvature of the objective at the stationary states of some samples."""

    def __init__(
        self, problem: FixedPointProblem, solution: Solution, rows: Tensor, tolerance: float
    ) -> None:
        assert problem.potential is not None
        self.potential = potential = problem.potential
        self.y = y = problem.pack(solution.state)[rows]
        self.problem = problem = problem.in_context(solution.context).keep(rows)
        self.calls, self.sample_calls = 0, 0
        """Number of evaluations and Hessian products: of the batch, and summed over samples."""
        self.argument, self.product = potential.linearize(problem, y)
        self._count(y)
        a, activation = self.argument, potential.activation
        # A unit at a kink can move to either side, so the steeper side counts.
        size = (row_norms(a) + row_norms(y)) / max(1, a.shape[1]) ** 0.5
        near = (tolerance * size + torch.finfo(a.dtype).tiny ** 0.5)[:, None]
        slopes = [activation.derivative(a + side * near) for side in (-1, 0, 1)]
        self.slope = torch.stack(slopes).amax(dim=0)
        self.threshold = 1 + max(MIN_EXCESS, 10 * problem.epsilon)

    def _count(self, rows: Tensor) -> None:
        self.calls += 1
        self.sample_calls += len(rows)

    def with_cost(self, solution: Solution) -> Solution:
        """Return the solution with the evaluations of the test added."""
        return replace(
            solution,
            evaluations=solution.evaluations + self.calls,
            sample_evaluations=solution.sample_evaluations + self.sample_calls,
        )

    def find_negative_curvature(self) -> Tensor:
        """Return the rows at which the curvature is negative in some direction."""
        run = self._lanczos(self.product, self.slope, keep=False)
        if run.is_below_one:
            return torch.empty(0, dtype=torch.int64, device=self.y.device)
        largest, _ = run.largest()
        return (largest > self.threshold).nonzero().squeeze(1)

    def lower_points(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return points near these rows where the objective is lower, and whether there is one."""
        problem = self.problem.keep(rows)
        slope, a = self.slope[rows], self.argument[rows]
        product = self.potential.hessian_product(problem, self.y[rows])
        self._count(rows)
        run = self._lanczos(product, slope, keep=True)
        _, coefficients = run.largest()
        vector = torch.stack(run.vectors[: coefficients.shape[1]], dim=2)
        vector = (vector.double() * coefficients[:, None, :]).sum(dim=2)
        root = slope.double().sqrt()
        path = torch.where(root > 0, vector / root, 0.0)
        path = path / row_norms(path)[:, None]
        lifted, (before, size) = self._lifted_objective(problem, a)
        path, a = path.to(before), a.to(before)
        scale = torch.maximum(row_norms(a), row_norms(self.y[rows]).to(a))
        length = FIRST_STEP_LENGTH * torch.where(scale > 0, scale, a.shape[1] ** 0.5)[:, None]
        best, value = a, before - 4 * torch.finfo(a.dtype).eps * size
        is_lower = torch.zeros_like(rows, dtype=torch.bool)
        for _ in range(MAX_HALVINGS):
            for trial in (a + length * path, a - length * path, a + length * path.abs()):
                after, _ = self._objective(lifted, trial)
                better = (after < value) & torch.isfinite(after)
                best = torch.where(better[:, None], trial, best)
                value = torch.where(better, after, value)
                is_lower = is_lower | better
            if bool(is_lower.all()):
                break
            length = torch.where(is_lower[:, None], length, length / 2)
        return self.potential.activation(best), is_lower

    def _lifted_objective(
        self, problem: FixedPointProblem, a: Tensor
    ) -> tuple[FixedPointProblem, tuple[Tensor, Tensor]]:
        """Return the problem in float64, if the energy supports it, and its objective at σ(a)."""
        lifted = problem.lifted()
        try:
            return lifted, self._objective(lifted, a.to(lifted.buffer_dtype))
        except RuntimeError:
            if lifted is problem:
                raise
            return problem, self._objective(problem, a)

    def _objective(self, problem: FixedPointProblem, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return G(σ(a)) of each row, and the sum of the absolute values of its terms."""
        assert problem.potential is not None
        self._count(a)
        y = self.potential.activation(a)
        energy, _ = problem.potential.evaluate(problem, y)
        separable = a * y - self.potential.activation.primitive(a)
        return separable.sum(dim=1) + energy, separable.abs().sum(dim=1) + energy.abs()

    def _lanczos(
        self, product: Callable[[Tensor], Tensor], slope: Tensor, *, keep: bool
    ) -> _Tridiagonal:
        """Run Lanczos' method on M = −S^½ ∇²E S^½ until every row is decided.

        Args:
            product: v ↦ ∇²E v.
            slope: Diagonal of S.
            keep: Whether to store the vectors.
        """
        root, info = slope.sqrt(), torch.finfo(slope.dtype)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(1, slope.shape[1], generator=generator).to(slope)
        vector = torch.where(root > 0, drawn, 0.0)
        vector = vector / row_norms(vector).clamp_min(info.tiny)[:, None]
        run = _Tridiagonal([], [], [])
        previous = torch.zeros_like(vector)
        for step in range(MAX_LANCZOS_STEPS):
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
            # A matrix whose norm is below 1 has no eigenvalue above 1.
            if step + 1 >= MIN_LANCZOS_STEPS and bool((run.norm() < 1).all()):
                run.is_below_one = True
                break
        return run
