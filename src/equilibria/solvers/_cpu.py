"""Optimizations for the CPU: cheap reads, reused buffers, and solves in blocks of samples."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from equilibria.context import State
from equilibria.context.state import map_state, state_tensors, unflatten_state

if TYPE_CHECKING:
    from equilibria.solvers.method import Method
    from equilibria.solvers.problem import FixedPointProblem
    from equilibria.solvers.solution import Solution

BLOCK_BYTES = 2**21
"""Bytes of state per block and thread. A solve uses about ten vectors of this size."""

LARGEST_SCRATCH = 2**25
"""Largest number of bytes cached between solves, per thread of PyTorch."""


def is_cheap_to_read(tensor: Tensor) -> bool:
    """Return whether reading a value needs no device synchronization.

    If so, a solver tests for the usual case, which needs little computation. On other devices it
    computes the general case.
    """
    return tensor.device.type == "cpu"


class _BufferCache(threading.local):
    """Buffer that this thread keeps between solves."""

    buffer: Tensor | None = None


_cache = _BufferCache()


class Scratch:
    """Memory for `count` numbers of the type of `like`, until `give_back` is called.

    On a CPU, newly allocated memory causes a page fault at the first write to each page, which
    takes up to a fifth of the time of a solve. So each thread keeps the largest returned buffer.
    Nested solves get separate memory. Other devices have a caching allocator.
    """

    def __init__(self, like: Tensor, count: int) -> None:
        size = count * like.element_size()
        # Tracing tensors, used for example during export, have no memory to share.
        shared = like.device.type == "cpu" and type(like) in (Tensor, torch.nn.Parameter)
        self._shared = shared and 0 < size <= LARGEST_SCRATCH * torch.get_num_threads()
        self._buffer: Tensor | None = None
        if not self._shared:
            self.room = like.new_empty(count)
            return
        cached, _cache.buffer = _cache.buffer, None
        if cached is None or cached.numel() < size:
            with torch.inference_mode(False):  # inference tensors cannot be used elsewhere
                cached = torch.empty(size, dtype=torch.uint8)
        self._buffer = cached
        self.room = cached[:size].view(like.dtype)

    def give_back(self) -> None:
        """Release the memory for the next solve."""
        buffer, self._buffer = self._buffer, None
        del self.room
        cached = _cache.buffer
        if buffer is not None and (cached is None or cached.numel() < buffer.numel()):
            _cache.buffer = buffer


def sample_blocks(state: State, copies: int = 1) -> list[slice]:
    """Split the samples of a batch into blocks of equal size that fit into a CPU cache.

    Args:
        state: State of the batch.
        copies: Memory per sample in units of its state: 1 for a solve, 2 for work in float64 on a
            state in float32.

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
    solver: Method, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
) -> Solution:
    """Solve a problem, in blocks of samples if it is `separable` and large.

    Each sample stops independently, so only rounding depends on the blocks. With a trace or a
    custom stopping criterion the batch is solved as a whole.
    """
    whole = trace or problem.trace or solver.stop is not None or not problem.separable
    blocks = [] if whole else sample_blocks(problem.start)
    if len(blocks) < 2:
        return solver.solve(problem, trace=trace)
    start = problem.start
    result = map_state(torch.empty_like, start)
    solutions = []
    for rows in blocks:
        solution = solver.solve(problem.block(rows))
        for whole_state, piece in zip(
            state_tensors(result), state_tensors(solution.state), strict=True
        ):
            whole_state[rows] = piece
        solutions.append(solution.facts())
    return replace(
        # A block that needed a second solver names both: its solver has the longest name.
        max(solutions, key=lambda solution: len(solution.solver)),
        state=unflatten_state(start, state_tensors(result)),
        status=concatenated(solutions, "status"),
        residual=concatenated(solutions, "residual"),
        absolute_residual=concatenated(solutions, "absolute_residual"),
        iterations=concatenated(solutions, "iterations"),
        evaluations=max(solution.evaluations for solution in solutions),
        sample_evaluations=sum(solution.sample_evaluations for solution in solutions),
        context=problem.context,
        agreement=None if solutions[0].agreement is None else concatenated(solutions, "agreement"),
    )


def concatenated(solutions: Sequence[object], name: str) -> Tensor:
    """Concatenate a per-sample tensor of the solutions of all blocks."""
    return torch.cat([getattr(solution, name) for solution in solutions])
