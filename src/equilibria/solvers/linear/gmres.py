"""GMRES with restarts, each row on its own."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.solvers._cpu import Scratch
from equilibria.solvers.linear.base import KrylovRun, LinearMap, LinearSolution, refine

FIRST_ROOM = 8
"""Vectors that a basis has room for at first; most solves need no more."""

CANCELED = 0.1
"""The share of a vector's length that is left of it where one orthogonalization is not enough."""


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

    Memory: as many vectors as steps, and one; `restart` + 1 at most.

    jacobian: v ↦ Jv where A = I − J. Both have the same Krylov spaces, and next to nothing cancels
        where Jv, and not v − Jv, is made orthogonal to them.

    Examples:
        >>> A, g = torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), torch.tensor([[1.0, 2.0]])
        >>> found = eq.solvers.gmres(lambda u: u @ A.T, g, tolerance=1e-5, max_iterations=9)
        >>> found.value.round(decimals=3)
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
    """One Arnoldi cycle, with Givens rotations, so that each step knows its residual."""

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
        room = min(steps + 1, FIRST_ROOM)
        self.scratch = Scratch(residual, rows * room * size)
        self.basis = self.scratch.room.view(rows, room, size)
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
        """Store the new direction; its coefficients in the basis, and its length last."""
        known, room = self.basis[:, : step + 1], self.basis[:, step + 1]
        before = torch.linalg.vector_norm(vector, dim=1)
        # The vector comes first in the product: the other way round is ten times slower.
        coefficients = torch.bmm(vector[:, None], known.transpose(1, 2))
        # In its place in the basis from here on: fresh memory would cost more than the arithmetic.
        torch.baddbmm(vector[:, None], coefficients, known, alpha=-1, out=room[:, None])
        length = torch.linalg.vector_norm(room, dim=1)
        # Where much has cancelled, rounding has too: once more is then enough, and needed.
        if bool((length < CANCELED * before).any()):
            again = torch.bmm(room[:, None], known.transpose(1, 2))
            room[:, None].baddbmm_(again, known, alpha=-1)
            coefficients = coefficients + again
            length = torch.linalg.vector_norm(room, dim=1)
        room.div_(length.clamp_min(torch.finfo(room.dtype).tiny)[:, None])
        return torch.cat([coefficients[:, 0], length[:, None]], dim=1)

    def correction(self) -> Tensor:
        """The combination of the basis that minimizes each row's residual."""
        if self.steps == 0:
            return torch.zeros_like(self.basis[:, 0])
        triangle = self.triangle[:, : self.steps, : self.steps]
        diagonal = torch.diagonal(triangle, dim1=1, dim2=2)
        # A row that is done has nothing left to expand in: its empty columns get no weight.
        empty = diagonal == 0
        triangle = triangle + torch.diag_embed(empty.to(triangle.dtype))
        target = torch.where(empty, 0.0, self.target[:, : self.steps])
        weights = torch.linalg.solve_triangular(triangle, target[:, :, None], upper=True)
        return torch.bmm(weights.transpose(1, 2), self.basis[:, : self.steps])[:, 0]
