"""Approximate gradients: of a few steps at the equilibrium, or of all iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as run_checkpointed

from equilibria.context import Context, State
from equilibria.context.state import batch_size, map_state, state_tensors
from equilibria.gradients.base import Backward, GradientRule, Map, needs_graph
from equilibria.gradients.capabilities import simplify
from equilibria.registry import check_at_least_one, check_share
from equilibria.solvers import FixedPointProblem, Solution, Solver
from equilibria.solvers._cpu import sample_blocks, solve_in_blocks
from equilibria.solvers.convergence import solution_of_last_iterate
from equilibria.solvers.method import Method

MAX_MERGED_BLOCKS = 4
"""Largest number of blocks that are solved as one batch to save an evaluation."""

MIN_DROP_SHARE = 0.5
"""Smallest `drop_share` of such a solve: dropping fewer samples does not pay for the evaluation
that it makes necessary."""


@dataclass(frozen=True)
class Phantom(GradientRule):
    """The phantom gradient (Geng et al., 2021): `steps` damped steps after the solve.

    The steps y ← (1 − damping)·y + damping·T(y; x) are recorded from the equilibrium y*.
    **Approximate**: the Neumann series of the implicit gradient, truncated after `steps` terms,
    with an error of (1 − damping + damping·q)^steps for a map with contraction factor q. It is
    cheap and needs no backward solve, which could fail. Second derivatives are those of the
    truncated steps.

    Args:
        steps: Number of recorded steps.
        damping: Step size in (0, 1]; 1 is the plain iteration.

    Examples:
        >>> x = torch.tensor([[1.0]], requires_grad=True)
        >>> z = eq.fixed_point(lambda z, x: z / 2 + x, x, gradient=eq.Phantom(steps=3, damping=1.0))
        >>> torch.autograd.grad(z.sum(), x)  # 1 + ½ + ¼
        (tensor([[1.7500]]),)
    """

    exact: ClassVar[bool] = False
    steps: int = 5
    damping: float = 0.8

    def __post_init__(self) -> None:
        check_at_least_one(steps=self.steps)
        check_share(damping=self.damping)

    def equilibrium(
        self, cell: Map, problem: FixedPointProblem, solver: Method, backward: Backward
    ) -> tuple[State, Solution]:
        solution = solve_in_blocks(solver, problem)
        return _record_steps(cell, solution, self.steps, self.damping), solution


@dataclass(frozen=True)
class OneStep(GradientRule):
    """The gradient of one step of the map at the equilibrium (Fung et al., 2022, "JFB").

    **Approximate**: replaces the inverse (I − J)⁻¹ of the implicit gradient, J = ∂T/∂y the Jacobian
    of the map T, by the identity. It is a descent direction for well-conditioned contractions, and
    the cheapest rule.

    The step is the last evaluation of the solve, recorded during the solve. One more evaluation is
    needed if the last one did not cover the whole batch, because samples were dropped or solved in
    many blocks.

    Examples:
        >>> x = torch.tensor([[1.0]], requires_grad=True)
        >>> z = eq.fixed_point(lambda z, x: z / 2 + x, x, gradient=eq.OneStep())  # dz/dx is 2
        >>> torch.autograd.grad(z.sum(), x)
        (tensor([[1.]]),)
    """

    exact: ClassVar[bool] = False

    def equilibrium(
        self, cell: Map, problem: FixedPointProblem, solver: Method, backward: Backward
    ) -> tuple[State, Solution]:
        if _may_be_recorded(cell, problem):
            recorded = _LastStep(cell, problem)
            merged: Method = solver
            if isinstance(solver, Solver):
                merged = replace(solver, drop_share=max(solver.drop_share, MIN_DROP_SHARE))
            solution = replace(merged.solve(recorded.problem), context=problem.context)
            state = recorded.state_at(solution)
            if state is not None:
                return state, solution
        else:
            solution = solve_in_blocks(solver, problem)
        return _record_steps(cell, solution, steps=1, damping=1.0), solution


def _may_be_recorded(cell: Map, problem: FixedPointProblem) -> bool:
    fixed = problem.refresh is None and not problem.trace
    few = not problem.separable or len(sample_blocks(problem.start)) <= MAX_MERGED_BLOCKS
    return fixed and few and needs_graph(cell, problem.context)


class _LastStep:
    """A problem that records the graph of its last step."""

    def __init__(self, cell: Map, problem: FixedPointProblem) -> None:
        self.original_step = problem.step
        self.image: State | None = None
        simplified = problem.in_context(simplify(cell, problem.context))
        self.problem = replace(simplified, step=self.step, records_step=True)

    def step(self, state: State, context: Context) -> State:
        self.image = None  # frees the previous image and its graph before the next evaluation
        with torch.enable_grad():
            self.image = self.original_step(state, context)
        return map_state(lambda tensor: tensor.detach(), self.image)

    def state_at(self, solution: Solution) -> State | None:
        """Return the state of a solution with the graph of the last step.

        Returns:
            The state, or None if the last step did not cover the whole batch, or if some sample did
            not converge.
        """
        if self.image is None or batch_size(self.image) != batch_size(solution.state):
            return None
        pairs = zip(state_tensors(solution.state), state_tensors(self.image), strict=True)
        gaps = [(state - image.detach()) for state, image in pairs]
        far = _norms(gaps) > solution.tolerance * _norms(state_tensors(solution.state))
        if bool((far | ~solution.converged).any()):
            return None
        # Samples that converged before the last step keep their state.
        remaining_gaps = iter(gaps)
        return map_state(lambda image: image + next(remaining_gaps), self.image)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each sample over all tensors of its state."""
    squares = [tensor.flatten(1).square().sum(dim=1) for tensor in tensors]
    return torch.stack(squares).sum(dim=0).sqrt()


def _record_steps(cell: Map, solution: Solution, steps: int, damping: float) -> State:
    state = solution.state
    if needs_graph(cell, solution.context):
        context = simplify(cell, solution.context)
        for _ in range(steps):
            image = cell.step(state, context)
            state = map_state(lambda y, mapped: y + damping * (mapped - y), state, image)
    return state


@dataclass(frozen=True)
class Unrolled(GradientRule):
    """The gradient of `steps` iterations y ← T(y; x), recorded by autograd (OptEq, Algorithm 1).

    The output is the last iterate, in training and in evaluation. The iteration is the plain one,
    unless the solver has another differentiable step: a damped `Picard`, or `SAM`. The solver's
    tolerance decides the status, which is that of the second-to-last iterate. **Approximate** as a
    gradient of the equilibrium (the error falls like q^steps), but exact for the iterate. Memory
    grows with `steps`.

    Args:
        steps: Number of iterations.
        checkpoint: Store only every `checkpoint`-th iterate and recompute the others in the
            backward pass; None stores all.

    Examples:
        >>> x = torch.tensor([[1.0]], requires_grad=True)
        >>> rule = eq.Unrolled(steps=3)
        >>> z = eq.fixed_point(lambda z, x: z / 2 + x, x, gradient=rule, tolerance=0.2)
        >>> torch.autograd.grad(z.sum(), x)  # 1 + ½ + ¼
        (tensor([[1.7500]]),)
    """

    exact: ClassVar[bool] = False
    from_zero: ClassVar[bool] = True
    steps: int = 20
    checkpoint: int | None = None

    def __post_init__(self) -> None:
        check_at_least_one(steps=self.steps, checkpoint=self.checkpoint)

    def equilibrium(
        self, cell: Map, problem: FixedPointProblem, solver: Method, backward: Backward
    ) -> tuple[State, Solution]:
        point, context = problem.start, problem.context
        warm_up = min(problem.refresh_until, self.steps - 1) if problem.refresh else 0
        for iteration in range(1, warm_up + 1):
            point = _iterate(cell, context, solver, point, iteration, 1)
            assert problem.refresh is not None
            context = problem.refresh(point, context)
        done = warm_up
        save = self.checkpoint if needs_graph(cell, context) else None
        while done < self.steps - 1:
            count = min(save or self.steps, self.steps - 1 - done)
            arguments = (cell, context, solver, point, done + 1, count)
            if save is None:
                point = _iterate(*arguments)
            else:
                point = run_checkpointed(_iterate, *arguments, use_reentrant=False)
            done += count
        image = cell.step(point, context)
        last = solver.unrolled_step(point, image, self.steps)
        solution = solution_of_last_iterate(
            problem,
            context,
            point,
            image,
            steps=self.steps,
            tolerance=solver.tolerance,
            solver=f"unrolled {solver.method}",
        )
        return last, replace(solution, state=map_state(lambda t: t.detach(), last))


def _iterate(
    cell: Map, context: Context, solver: Method, point: State, first: int, count: int
) -> State:
    for iteration in range(first, first + count):
        point = solver.unrolled_step(point, cell.step(point, context), iteration)
    return point
