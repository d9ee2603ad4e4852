"""Problems of a search whose plain steps diverge: their z and μ are solved for at every x."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equilibria.inputs.engines.base import EngineRun
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import FixedInput, InputProblem, JointEvaluation, JointLinearization
from equilibria.solvers.convergence import DIVERGENCE_FACTOR

STREAK = 3
"""Iterations in a row with a residual above 1 after which sweeps are suspected to diverge."""


@dataclass
class Steep:
    """Brings z and μ up to date by an engine, or by solves in the problems where sweeps diverge.

    The sweeps z ← T(z; x) and μ ← Jᵀμ + ∂ℓ/∂z diverge where T expands, for example where the
    curvature of a convex energy is above 1. The equilibrium exists all the same, and the layer's
    solver finds it by descent on the hidden objective. A problem is steep from the iteration on in
    which its sweeps are seen to diverge. Its search then starts over, because the gradients so far
    were wrong. Only cells with a hidden objective are watched.

    Args:
        problem: The problems of the search.
        method: The engine's run.
        start: Inputs that the search starts from, one row per problem.
        tolerance: Relative residual of z and μ that the solves reach.
    """

    problem: InputProblem
    method: EngineRun[Any]
    start: Tensor
    tolerance: float

    def __post_init__(self) -> None:
        self.rows = torch.zeros(len(self.start), dtype=torch.bool, device=self.start.device)
        """The problems that are steep."""
        self.streak: Tensor | None = None
        """Iterations in a row with a residual above 1, per problem; None if there are none."""
        self.iteration = 0
        self.any = False
        """Whether there is a steep problem."""

    def follow(
        self, here: FixedInput, now: JointIterate, *, running: Tensor, largest: Tensor
    ) -> tuple[JointIterate, JointEvaluation]:
        """Bring z and μ up to date at x.

        Args:
            here: The problem at x. Its scale is set in the first iteration.
            now: The iterate to start from.
            running: Problems whose search goes on.
            largest: The norm of the first z, which sweeps that converge do not exceed by far.

        Returns:
            The iterate with new z and μ, and the evaluation at them. Its x is that of `now`, except
            in problems that start over.
        """
        scale, first = here.scale, self.iteration == 0
        self.iteration += 1
        if self.any and bool(self.rows.all()):
            return self._solved(here, now, running)
        updated, evaluation = self.method.follow(here, now, first=first)
        if not self.problem.may_expand:
            return updated, evaluation
        new = self._diverging(here, updated, evaluation, running, largest)
        if new is not None:
            self.rows, self.any = self.rows | new, True
            now = JointIterate(now.z, now.mu, torch.where(new[:, None], self.start, now.x))
            self.method.restart(new, now.x)
        elif not self.any:
            return updated, evaluation
        # The graph of `here` is used up.
        again = FixedInput(self.problem, now.x, scale)
        # Sweeps that diverged have left nothing to start from.
        exact, there = self._solved(again, now, running, afresh=new is not None)
        assert here.scale is not None
        assert again.scale is not None
        here.scale = torch.where(self.rows, again.scale, here.scale)
        groups = self.problem.groups
        return (
            exact.where(self.rows, updated, groups),
            there.where(self.rows, evaluation, groups),
        )

    def _diverging(
        self,
        here: FixedInput,
        updated: JointIterate,
        evaluation: JointEvaluation,
        running: Tensor,
        largest: Tensor,
    ) -> Tensor | None:
        """Find the problems in which a sweep at one x takes z or μ further away, if there are any.

        A relative residual of 1 or more is the sign of it: as soon as a mode with the factor −q,
        q > 1, dominates, the residual is 1 + 1/q. Where T contracts it has other causes, such as a
        long step of x. These pass, and two more sweeps rule them out.
        """
        # Written so that NaN counts as far.
        z_is_far, mu_is_far = ~(evaluation.state_residual < 1), ~(evaluation.adjoint_residual < 1)
        is_far = z_is_far | mu_is_far
        if not bool(is_far.any()):
            self.streak = None
            return None
        groups = self.problem.groups
        is_far = is_far & running & ~self.rows
        self.streak = is_far * (1 if self.streak is None else self.streak + 1)
        # The first sweeps are those of a z and μ that no step of x has changed. From zero, one
        # sweep leaves a residual of 1, which says nothing.
        from_zero = self.method.engine.from_zero
        if self.iteration <= (2 if from_zero else 1):
            suspects = is_far & (self.iteration > from_zero)
        else:
            lost = ~evaluation.finite | ~(groups.norm(updated.z) <= DIVERGENCE_FACTOR * largest)
            # Joint mixing may leave large residuals behind where the sweeps contract.
            lasting = self.method.residual_limit < torch.inf
            suspects = is_far & (lost | ((self.streak >= STREAK) & lasting))
        if not bool(suspects.any()):
            return None
        self.streak = torch.where(suspects, 0, self.streak)
        here = FixedInput(self.problem, updated.x, here.scale)
        linear = JointLinearization(here, updated.z)
        image = here.image(linear.image)
        adjoint = linear.pull(updated.mu)
        pulled = linear.pull(adjoint)
        z_leaves = self._leaves(updated.z, linear.image, image)
        mu_leaves = self._leaves(updated.mu, adjoint, pulled)
        new = suspects & ((z_is_far & z_leaves) | (mu_is_far & mu_leaves))
        return new if bool(new.any()) else None

    def _leaves(self, point: Tensor, image: Tensor, following: Tensor) -> Tensor:
        """Whether of two sweeps the second is longer, or too long for the numbers."""
        before, after = (
            self.problem.groups.norm(step) for step in (image - point, following - image)
        )
        return ~((after <= before) & torch.isfinite(after))

    def _solved(
        self, here: FixedInput, now: JointIterate, running: Tensor, *, afresh: bool = False
    ) -> tuple[JointIterate, JointEvaluation]:
        """Solve for z and μ at x in the steep problems that run; other problems keep theirs."""
        problem, groups = self.problem, self.problem.groups
        mask = groups.to_samples(self.rows & running)
        rows = mask.nonzero().squeeze(1)
        found = problem.solve(
            here.context,
            None if afresh else now.z,
            tolerance=self.tolerance,
            max_iterations=problem.longest_solve,
            rows=rows,
        )
        problem.evaluations += found.evaluations
        z = now.z.index_copy(0, rows, problem.packing.pack(found.state))
        linear = JointLinearization(here, z)
        adjoint = linear.solve_adjoint(now.mu, tolerance=self.tolerance, rows=mask)
        mu = torch.where(mask[:, None], adjoint.value, now.mu)
        # Where T expands, the solves know these better than one more evaluation of T or Jᵀ.
        residual = found.residual.new_zeros(len(mask)).index_copy(0, rows, found.residual)
        evaluation = replace(
            linear.evaluation(mu),
            state_residual=groups.largest(residual),
            adjoint_residual=groups.largest(adjoint.residual),
        )
        return JointIterate(z, mu, now.x), evaluation
