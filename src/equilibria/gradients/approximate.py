"""Approximate gradients: of a few steps at the equilibrium, or of the iterations themselves."""

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

FEW_BLOCKS = 4
"""Up to so many blocks of samples are solved as one batch where that saves an evaluation."""

LEAST_DROPPED = 0.5
"""The share of finished samples that are dropped then: fewer are not worth that evaluation."""


@dataclass(frozen=True)
class Phantom(GradientRule):
    """The phantom gradient (Geng et al., 2021): `steps` damped steps after the solve.

    y ← (1 − damping)·y + damping·T(y; x), recorded from y*. **Approximate**: the Neumann series of
    the implicit gradient cut after `steps` terms, with an error of (1 − damping + damping·q)^steps
    for a map of contraction q. Cheap, and no backward solve that can fail. Second derivatives are
    those of the truncated steps.

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

    **Approximate**: the inverse (I − J)⁻¹ of the implicit gradient is replaced by the identity. A
    descent direction for well-conditioned contractions, and as cheap as it gets.

    The step is the last evaluation of the solve, which is recorded on the way. Another one is made
    where that is none of the whole batch: samples were dropped, or solved in many blocks.

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
            patient = solver
            if isinstance(solver, Solver):
                patient = replace(solver, drop_share=max(solver.drop_share, LEAST_DROPPED))
            solution = replace(patient.solve(recorded.problem), context=problem.context)
            state = recorded.state_at(solution)
            if state is not None:
                return state, solution
        else:
            solution = solve_in_blocks(solver, problem)
        return _record_steps(cell, solution, steps=1, damping=1.0), solution


def _may_be_recorded(cell: Map, problem: FixedPointProblem) -> bool:
    fixed = problem.refresh is None and not problem.trace
    few = not problem.separable or len(sample_blocks(problem.start)) <= FEW_BLOCKS
    return fixed and few and needs_graph(cell, problem.context)


class _LastStep:
    """A problem whose steps are recorded, each in the place of the one before."""

    def __init__(self, cell: Map, problem: FixedPointProblem) -> None:
        self.taken = problem.step
        self.image: State | None = None
        simplified = problem.in_context(simplify(cell, problem.context))
        self.problem = replace(simplified, step=self.step, records_step=True)

    def step(self, state: State, context: Context) -> State:
        self.image = None  # as large as the state, with all that its graph holds
        with torch.enable_grad():
            self.image = self.taken(state, context)
        return map_state(lambda tensor: tensor.detach(), self.image)

    def state_at(self, solution: Solution) -> State | None:
        """The state of a solution with the derivative of the last step, if that was near it."""
        if self.image is None or batch_size(self.image) != batch_size(solution.state):
            return None
        pairs = zip(state_tensors(solution.state), state_tensors(self.image), strict=True)
        gaps = [(state - image.detach()) for state, image in pairs]
        far = _norms(gaps) > solution.tolerance * _norms(state_tensors(solution.state))
        if bool((far | ~solution.converged).any()):
            return None
        # Samples that had converged before the last step keep the state that they had then.
        moved = iter(gaps)
        return map_state(lambda image: image + next(moved), self.image)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Of each sample, over all tensors of its state."""
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
    """`steps` iterations y ← T(y; x), recorded by autograd (OptEq, Algorithm 1).

    The output is the last iterate, in training and in evaluation alike. The iteration is the plain
    one, unless the solver has a differentiable step of its own (a damped `Picard`, or `SAM`: the
    paper's R†); its tolerance is used for the status, which is that of the point before the last.
    **Approximate** as a gradient of the equilibrium (the error falls like q^steps), exact for the
    iterate. Memory grows with `steps`; with `checkpoint=k` only every k-th iterate is kept and the
    rest is recomputed in the backward pass.

    Examples:
        >>> x = torch.tensor([[1.0]], requires_grad=True)
        >>> three = eq.Unrolled(steps=3)
        >>> z = eq.fixed_point(lambda z, x: z / 2 + x, x, gradient=three, tolerance=0.2)
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
