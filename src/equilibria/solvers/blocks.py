"""A batch, some samples at a time: what a solve works on then stays in the processor's cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from equilibria.context import State, map_state, state_tensors, unflatten_state
from equilibria.solvers.base import Solver
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution

BLOCK_BYTES = 2**21
"""Of state, for each thread: a solve has some ten vectors of that size at hand."""


def sample_blocks(state: State, copies: int = 1) -> list[slice]:
    """The samples of a batch in blocks of equal size: on a CPU, whose caches are small.

    Args:
        state: State of the batch.
        copies: How many times the memory of a sample's state the work on that sample takes, where a
            solve takes it once (float64 for a state in float32: 2).

    Returns:
        Consecutive slices that cover the batch; a single one on other devices.
    """
    tensors = state_tensors(state)
    samples = len(tensors[0])
    if tensors[0].device.type != "cpu" or not samples:
        return [slice(0, samples)]
    size = copies * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    count = min(samples, max(1, round(size / (BLOCK_BYTES * torch.get_num_threads()))))
    ends = [samples * place // count for place in range(count + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def solve_in_blocks(
    solver: Solver[Any], problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
) -> Solution:
    """Solve a problem, in blocks of samples where it is `separable` and large.

    Each sample stops on its own, so that nothing but rounding depends on the blocks. A trace and a
    stopping criterion of one's own see the whole batch.
    """
    whole = trace or problem.trace or solver.stop is not None or not problem.separable
    blocks = [] if whole else sample_blocks(problem.start)
    if len(blocks) < 2:
        return solver.solve(problem, trace=trace)
    start = problem.start
    found = map_state(torch.empty_like, start)
    solutions = []
    for rows in blocks:
        solution = solver.solve(problem.block(rows))
        for whole_state, piece in zip(
            state_tensors(found), state_tensors(solution.state), strict=True
        ):
            whole_state[rows] = piece
        solutions.append(solution.facts())
    return replace(
        # What was needed at most is what the batch needed.
        max(solutions, key=lambda one: len(one.solver)),
        state=unflatten_state(start, state_tensors(found)),
        status=joined(solutions, "status"),
        residual=joined(solutions, "residual"),
        absolute_residual=joined(solutions, "absolute_residual"),
        iterations=joined(solutions, "iterations"),
        evaluations=max(one.evaluations for one in solutions),
        sample_evaluations=sum(one.sample_evaluations for one in solutions),
        context=problem.context,
    )


def joined(solutions: Sequence[object], name: str) -> Tensor:
    """What each block says of its samples."""
    return torch.cat([getattr(one, name) for one in solutions])
