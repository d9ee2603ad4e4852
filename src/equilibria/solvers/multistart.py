"""Several starts per sample, solved as one larger batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from equilibria.context import State
from equilibria.context.state import batch_size, in_format_of, map_state, state_tensors
from equilibria.solvers._cpu import solve_in_blocks
from equilibria.solvers.method import Method
from equilibria.solvers.picard import Picard
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution, Status, Trace

Pick: TypeAlias = Literal["residual", "vote"]

SAME_DISTANCE = 0.05
"""Two states agree if the norm of their difference is at most this share of the larger norm."""
SAME_TOLERANCES = 10
"""Two states also agree at this many tolerances."""


def _not_drawn(like: State, *, index: int) -> State:
    raise TypeError("MultiStart needs a function `draw`")


@dataclass(frozen=True, kw_only=True)
class MultiStart(Method):
    """Method that solves every sample from several starts and picks one of the solutions.

    The first start is that of the problem. A map that is proven to contract has one fixed point,
    and is solved from the first start only.

    The iterations of a sample are those of its picked solution; `evaluations` and
    `sample_evaluations` count all starts. `agreement` is the share of its starts that ended at the
    picked state, up to 5 % of its norm or ten tolerances.

    Args:
        base: Method that solves.
        starts: Number of starts per sample.
        pick: Picks the solution with the smallest residual ("residual"), or that with which most
            solutions of the sample agree ("vote"), of equals that with the smallest residual.
        draw: Returns the start with an index for all samples, called with the first start and
            `index`.
        tolerance, max_iterations, stop, check_minimum: See `Method`.
    """

    base: Method = field(default_factory=Picard)
    starts: int = 1
    pick: Pick = "residual"
    draw: Callable[..., State] = _not_drawn

    @property
    def couples_batch(self) -> bool:
        return self.base.couples_batch

    @property
    def method(self) -> str:
        return self.base.method

    def solve(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        """Solve every sample from several starts, and pick one solution per sample.

        Args:
            problem: Map, context and start.
            trace: True records the residuals of all iterations, "states" also the states.
        """
        base = replace(
            self.base, tolerance=self.tolerance, max_iterations=self.max_iterations, stop=self.stop
        )
        if problem.contraction is not None and problem.contraction < 1:
            solution = solve_in_blocks(base, problem, trace=trace)
            return replace(solution, agreement=torch.ones_like(solution.residual))
        if problem.couples_batch:
            raise ValueError(
                f"starts={self.starts} needs samples that are solved independently, but the layer "
                "couples the samples of a batch: set starts=1"
            )
        if self.base.stop is not None and self.base.stop.notes():
            raise ValueError(
                f"starts={self.starts} cannot be combined with {type(self.base.stop).__name__}, "
                "which decides about each sample of the batch: set starts=1"
            )
        samples = batch_size(problem.start)
        rows = torch.arange(samples, device=state_tensors(problem.start)[0].device)
        rows = rows.repeat_interleave(self.starts)
        larger = replace(problem, context=problem.context.keep(rows), start=self._starts(problem))
        return self._picked(problem, solve_in_blocks(base, larger, trace=trace), samples)

    def run(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        return self.solve(problem, trace=trace)

    def _starts(self, problem: FixedPointProblem) -> State:
        """Return the starts of all samples; those of a sample are neighbors."""
        first = problem.start
        drawn = [self.draw(first, index=index) for index in range(1, self.starts)]
        return map_state(
            lambda *tensors: in_format_of(tensors[0], torch.stack(tensors, dim=1).flatten(0, 1)),
            first,
            *drawn,
        )

    def _picked(self, problem: FixedPointProblem, all_starts: Solution, samples: int) -> Solution:
        """Return the picked solution of every sample."""
        shape = (samples, self.starts)
        score = all_starts.residual.masked_fill(
            all_starts.status == int(Status.DIVERGED), torch.inf
        )
        score = score.nan_to_num(nan=torch.inf, posinf=torch.inf).reshape(shape)
        same = self._agreement([t.reshape(*shape, -1) for t in state_tensors(all_starts.state)])
        votes = same.sum(dim=2)
        candidates = score
        if self.pick == "vote":
            candidates = score.masked_fill(votes < votes.amax(dim=1, keepdim=True), torch.inf)
        best = candidates.argmin(dim=1)
        sample = torch.arange(samples, device=best.device)
        rows = sample * self.starts + best
        trace = all_starts.trace
        if trace is not None:
            states = trace.states
            kept = None if states is None else [map_state(lambda t: t[rows], s) for s in states]
            trace = Trace(trace.residual[:, rows], kept)
        return replace(
            all_starts,
            state=map_state(lambda tensor: tensor[rows], all_starts.state),
            status=all_starts.status[rows],
            residual=all_starts.residual[rows],
            absolute_residual=all_starts.absolute_residual[rows],
            iterations=all_starts.iterations[rows],
            context=problem.context if problem.refresh is None else all_starts.context.keep(rows),
            trace=trace,
            agreement=votes[sample, best].to(score.dtype) / self.starts,
        )

    def _agreement(self, tensors: list[Tensor]) -> Tensor:
        """Return which pairs of states of a sample agree, shape (samples, starts, starts)."""
        limit = max(SAME_DISTANCE, SAME_TOLERANCES * self.tolerance)
        squared: Tensor | float = 0.0
        gaps: list[Tensor] = []
        for tensor in tensors:
            wide = tensor if tensor.dtype == torch.float64 else tensor.float()
            squared = squared + wide.square().sum(dim=2)
        assert isinstance(squared, Tensor)
        for index in range(self.starts):
            gap: Tensor | float = 0.0
            for tensor in tensors:
                wide = tensor if tensor.dtype == torch.float64 else tensor.float()
                gap = gap + (wide - wide[:, index : index + 1]).square().sum(dim=2)
            assert isinstance(gap, Tensor)
            gaps.append(gap <= limit**2 * torch.maximum(squared, squared[:, index : index + 1]))
        return torch.stack(gaps, dim=1)
