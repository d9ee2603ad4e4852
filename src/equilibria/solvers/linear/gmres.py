"""GMRES with restarts, for batches of independent rows."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.solvers._cpu import Scratch
from equilibria.solvers.linear.base import KrylovRun, LinearMap, LinearSolution, refine

INITIAL_CAPACITY = 8
"""Number of vectors for which a basis is allocated at first; most solves need no more."""

MIN_REMAINDER = 0.1
"""Orthogonalization is repeated if it leaves less than this share of a vector's length."""


def gmres(
    operator: LinearMap,
    rhs: Tensor,
    *,
    start: Tensor | None = None,
    tolerance: float,
    max_iterations: int,
    epsilon: float | None = None,
    relative_to: Tensor | None = None,
    restart: int = 30,
    jacobian: LinearMap | None = None,
) -> LinearSolution:
    """Solve A u = g by GMRES(restart) (Saad and Schultz, 1986) for any square A.

    Stores one vector more than it takes steps, at most `restart` + 1.

    Args:
        operator: v ↦ A v on rows, shape (rows, size) to (rows, size).
        rhs: g, shape (rows, size).
        start: Start of u; by default zero.
        tolerance: Relative residual ‖g − A u‖ / ‖g‖ at which a row has converged.
        max_iterations: Largest number of products with A.
        epsilon: Relative precision of the products; by default the machine epsilon of `rhs`.
        relative_to: Vectors to whose norm residuals are relative; by default `rhs`.
        restart: Number of steps between two restarts.
        jacobian: v ↦ Jv with A = I − J, if it is available. A and J have the same Krylov spaces,
            but orthogonalizing Jv instead of v − Jv avoids cancellation.

    Returns:
        Solution, status and residual of each row.

    Examples:
        >>> A, g = torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), torch.tensor([[1.0, 2.0]])
        >>> result = eq.solvers.gmres(lambda u: u @ A.T, g, tolerance=1e-5, max_iterations=9)
        >>> result.value.round(decimals=3)
        tensor([[-2.,  1.]])
    """

    def run(residual: Tensor, goal: Tensor, limit: int) -> KrylovRun:
        cycle = _Cycle(operator, jacobian, residual, goal, min(restart, limit))
        unbroken = torch.zeros_like(goal, dtype=torch.bool)
        norm = cycle.target[:, cycle.steps].abs()
        correction = cycle.correction()
        cycle.scratch.give_back()
        return KrylovRun(correction, cycle.iterations, cycle.steps, unbroken, norm)

    return refine(
        "GMRES", run, operator, rhs, start, tolerance, max_iterations, epsilon, relative_to
    )


class _Cycle:
    """Arnoldi cycle with Givens rotations, which give the residual of every step."""

    def __init__(
        self,
        operator: LinearMap,
        jacobian: LinearMap | None,
        residual: Tensor,
        goal: Tensor,
        steps: int,
    ) -> None:
        rows, size = residual.shape
        norm = torch.linalg.vector_norm(residual, dim=1)
        # Slots are read only once they have been written.
        capacity = min(steps + 1, INITIAL_CAPACITY)
        self.scratch = Scratch(residual, rows * capacity * size)
        self.basis = self.scratch.room.view(rows, capacity, size)
        smallest = torch.finfo(residual.dtype).tiny
        torch.div(residual, norm.clamp_min(smallest)[:, None], out=self.basis[:, 0])
        self.triangle = residual.new_zeros(rows, steps, steps)
        self.target = residual.new_zeros(rows, steps + 1)
        self.target[:, 0] = norm
        self.iterations = torch.zeros(rows, dtype=torch.int64, device=residual.device)
        self.steps = 0
        cosines, sines = residual.new_zeros(rows, steps), residual.new_zeros(rows, steps)
        running = ~(norm <= goal) & torch.isfinite(norm)
        for step in range(steps):
            if not bool(running.any()):
                break
            self.steps = step + 1
            self.iterations += running
            if step + 1 == self.basis.shape[1]:
                more = residual.new_empty(rows, min(step + 1, steps - step), size)
                self.basis = torch.cat([self.basis, more], dim=1)
            newest = self.basis[:, step]
            if jacobian is None:
                column = self._orthogonalize(operator(newest), step)
            else:
                column = self._orthogonalize(jacobian(newest), step).neg_()
                column[:, step] += 1
            for k in range(step):
                upper, lower = column[:, k].clone(), column[:, k + 1].clone()
                column[:, k] = cosines[:, k] * upper + sines[:, k] * lower
                column[:, k + 1] = cosines[:, k] * lower - sines[:, k] * upper
            length = torch.hypot(column[:, step], column[:, step + 1])
            safe = torch.where(length > 0, length, 1.0)
            cosines[:, step] = torch.where(length > 0, column[:, step] / safe, 1.0)
            sines[:, step] = torch.where(length > 0, column[:, step + 1] / safe, 0.0)
            self.triangle[:, : step + 1, step] = column[:, : step + 1]
            self.triangle[:, step, step] = length
            self.target[:, step + 1] = -sines[:, step] * self.target[:, step]
            self.target[:, step] = cosines[:, step] * self.target[:, step]
            running = running & (self.target[:, step + 1].abs() > goal)

    def _orthogonalize(self, vector: Tensor, step: int) -> Tensor:
        """Store the new direction; return its coefficients in the basis, then its length."""
        previous, new = self.basis[:, : step + 1], self.basis[:, step + 1]
        before = torch.linalg.vector_norm(vector, dim=1)
        # The vector comes first in the product: the other order is ten times slower.
        coefficients = torch.bmm(vector[:, None], previous.transpose(1, 2))
        # Written into the basis: allocating memory would cost more than the arithmetic.
        torch.baddbmm(vector[:, None], coefficients, previous, alpha=-1, out=new[:, None])
        length = torch.linalg.vector_norm(new, dim=1)
        # After much cancellation, rounding dominates; one repetition is enough.
        if bool((length < MIN_REMAINDER * before).any()):
            again = torch.bmm(new[:, None], previous.transpose(1, 2))
            new[:, None].baddbmm_(again, previous, alpha=-1)
            coefficients = coefficients + again
            length = torch.linalg.vector_norm(new, dim=1)
        new.div_(length.clamp_min(torch.finfo(new.dtype).tiny)[:, None])
        return torch.cat([coefficients[:, 0], length[:, None]], dim=1)

    def correction(self) -> Tensor:
        """Return the combination of the basis that minimizes the residual of each row."""
        if self.steps == 0:
            return torch.zeros_like(self.basis[:, 0])
        triangle = self.triangle[:, : self.steps, : self.steps]
        diagonal = torch.diagonal(triangle, dim1=1, dim2=2)
        # Finished rows have empty columns, which get no weight.
        empty = diagonal == 0
        triangle = triangle + torch.diag_embed(empty.to(triangle.dtype))
        target = torch.where(empty, 0.0, self.target[:, : self.steps])
        weights = torch.linalg.solve_triangular(triangle, target[:, :, None], upper=True)
        return torch.bmm(weights.transpose(1, 2), self.basis[:, : self.steps])[:, 0]
