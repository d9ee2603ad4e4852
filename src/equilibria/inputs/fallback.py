"""Fallback of a search for problems whose sweeps diverge: solve for z and μ at every x."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equilibria.inputs.engines.base import EngineRun
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import FixedInput, InputProblem, JointEvaluation, JointLinearization
from equilibria.solvers.convergence import DIVERGENCE_FACTOR

MIN_STREAK = 3
"""Consecutive iterations with a residual above 1 after which sweeps are suspected to diverge."""


@dataclass
class SolveFallback:
    """Update of equilibrium z and adjoint μ by an engine, or by solves where its sweeps diverge.

    The sweeps z ← T(z; x) and μ ← Jᵀμ + ∂ℓ/∂z, with J = ∂T/∂z and the loss ℓ, diverge if T expands,
    for example if the curvature of a convex energy is above 1. The equilibrium exists nevertheless,
    and the layer's solver computes it by descent on the hidden objective. Once the sweeps of a
    problem are found to diverge, its search starts over, because the gradients so far were wrong.
    Only cells with a hidden objective are monitored.

    Args:
        problem: The problems of the search.
        method: State of the engine.
        start: Inputs that the search starts from, one row per problem.
        tolerance: Relative residual of the solves for z and μ.
    """

    problem: InputProblem
    method: EngineRun[Any]
    start: Tensor
    tolerance: float

    def __post_init__(self) -> None:
        self.rows = torch.zeros(len(self.start), dtype=torch.bool, device=self.start.device)
        """Mask of the problems whose sweeps diverge."""
        self.streak: Tensor | None = None
        """Consecutive iterations with a residual above 1, per problem; None if there are none."""
        self.iteration = 0
        self.any = False
        """Whether the sweeps of any problem diverge."""

    def update(
        self, fixed: FixedInput, current: JointIterate, *, running: Tensor, largest: Tensor
    ) -> tuple[JointIterate, JointEvaluation]:
        """Update equilibrium z and adjoint μ at the inputs of an iterate.

        Args:
            fixed: The problems at x. Its scale is set in the first iteration.
            current: The iterate to start from.
            running: Mask of the problems whose search continues.
            largest: Norm of the first z, which convergent sweeps do not exceed by far.

        Returns:
            The iterate with new z and μ, and the evaluation there. Its x is that of `current`,
            except in problems that start over.
        """
        scale, first = fixed.scale, self.iteration == 0
        self.iteration += 1
        if self.any and bool(self.rows.all()):
            return self._solved(fixed, current, running)
        updated, evaluation = self.method.update(fixed, current, first=first)
        if not self.problem.may_expand:
            return updated, evaluation
        new = self._diverging(fixed, updated, evaluation, running, largest)
        if new is not None:
            self.rows, self.any = self.rows | new, True
            current = JointIterate(
                current.z, current.mu, torch.where(new[:, None], self.start, current.x)
            )
            self.method.restart(new, current.x)
        elif not self.any:
            return updated, evaluation
        # The graph of `fixed` has been freed.
        rebuilt = FixedInput(self.problem, current.x, scale)
        # Diverged iterates are no good start for the first solve.
        solved, solved_evaluation = self._solved(rebuilt, current, running, reset=new is not None)
        assert fixed.scale is not None
        assert rebuilt.scale is not None
        fixed.scale = torch.where(self.rows, rebuilt.scale, fixed.scale)
        groups = self.problem.groups
        return (
            solved.where(self.rows, updated, groups),
            solved_evaluation.where(self.rows, evaluation, groups),
        )

    def _diverging(
        self,
        fixed: FixedInput,
        updated: JointIterate,
        evaluation: JointEvaluation,
        running: Tensor,
        largest: Tensor,
    ) -> Tensor | None:
        """Return a mask of the problems whose sweeps started to diverge, or None if there are none.

        A relative residual of 1 or more makes a problem suspect: if a mode with the factor −q,
        q > 1, dominates, the residual is 1 + 1/q. If T contracts, a long step of x can cause such a
        residual, too. Two more sweeps at the same x then get closer to each other.
        """
        # Negated such that NaN counts as far.
        z_is_far, mu_is_far = ~(evaluation.state_residual < 1), ~(evaluation.adjoint_residual < 1)
        is_far = z_is_far | mu_is_far
        if not bool(is_far.any()):
            self.streak = None
            return None
        groups = self.problem.groups
        is_far = is_far & running & ~self.rows
        self.streak = is_far * (1 if self.streak is None else self.streak + 1)
        # In the first iteration no step of x can be the cause. After one sweep from zero the
        # residual is always 1.
        from_zero = self.method.engine.from_zero
        if self.iteration <= (2 if from_zero else 1):
            suspects = is_far & (self.iteration > from_zero)
        else:
            lost = ~evaluation.finite | ~(groups.norm(updated.z) <= DIVERGENCE_FACTOR * largest)
            # Joint mixing may cause large residuals although the sweeps contract.
            counts_streak = self.method.residual_limit < torch.inf
            suspects = is_far & (lost | ((self.streak >= MIN_STREAK) & counts_streak))
        if not bool(suspects.any()):
            return None
        self.streak = torch.where(suspects, 0, self.streak)
        fixed = FixedInput(self.problem, updated.x, fixed.scale)
        linear = JointLinearization(fixed, updated.z)
        image = fixed.image(linear.image)
        adjoint = linear.pull(updated.mu)
        pulled = linear.pull(adjoint)
        z_grows = self._step_grows(updated.z, linear.image, image)
        mu_grows = self._step_grows(updated.mu, adjoint, pulled)
        new = suspects & ((z_is_far & z_grows) | (mu_is_far & mu_grows))
        return new if bool(new.any()) else None

    def _step_grows(self, point: Tensor, image: Tensor, next_image: Tensor) -> Tensor:
        """Return a mask of the problems whose second sweep is longer than the first."""
        first, second = (
            self.problem.groups.norm(step) for step in (image - point, next_image - image)
        )
        return ~((second <= first) & torch.isfinite(second))

    def _solved(
        self, fixed: FixedInput, current: JointIterate, running: Tensor, *, reset: bool = False
    ) -> tuple[JointIterate, JointEvaluation]:
        """Solve for z and μ at x in the running problems whose sweeps diverge; keep the others."""
        problem, groups = self.problem, self.problem.groups
        mask = groups.to_samples(self.rows & running)
        rows = mask.nonzero().squeeze(1)
        solution = problem.solve(
            fixed.context,
            None if reset else current.z,
            tolerance=self.tolerance,
            max_iterations=problem.generous_limit,
            rows=rows,
        )
        problem.evaluations += solution.evaluations
        z = current.z.index_copy(0, rows, problem.packing.pack(solution.state))
        linear = JointLinearization(fixed, z)
        adjoint = linear.solve_adjoint(current.mu, tolerance=self.tolerance, rows=mask)
        mu = torch.where(mask[:, None], adjoint.value, current.mu)
        # One more evaluation of T or Jᵀ would amplify rounding errors; use the solves' residuals.
        residual = solution.residual.new_zeros(len(mask)).index_copy(0, rows, solution.residual)
        evaluation = replace(
            linear.evaluation(mu),
            state_residual=groups.largest(residual),
            adjoint_residual=groups.largest(adjoint.residual),
        )
        return JointIterate(z, mu, current.x), evaluation
