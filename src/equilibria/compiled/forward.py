"""Compiled solves of an equilibrium layer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equilibria.compiled.store import (
    GraphStore,
    padded,
    padded_size,
    plain,
)
from equilibria.compiled.tracing import split, trace
from equilibria.context import Context
from equilibria.context.twin import twin
from equilibria.operators.norm_control import is_wrapped
from equilibria.solvers import Accelerated, Anderson, Auto, Picard
from equilibria.solvers.auto import SMALL_STATE, SMALL_STATE_MEMORY
from equilibria.solvers.graph import GraphIteration, traced_loop
from equilibria.solvers.method import Method
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution, Status

LARGEST_HISTORY = 2**17
"""Batches whose states have this many numbers or more are solved eagerly where Anderson
acceleration is needed: a graph copies its history in every iteration, which takes longer than the
overhead that it saves."""


@dataclass(frozen=True, kw_only=True)
class CompiledSolver(Method):
    """Solver whose loop is a compiled graph; results and statuses are those of another solver.

    The graph takes plain steps while they converge quickly, then Anderson acceleration. If a sample
    does not converge in the graph, the batch is solved again by `base`, which may descend on the
    objective and reports what is wrong.

    Args:
        base: Solver whose settings the graph takes, and which solves what the graph does not.
        graphs: Graphs of the layer.
        tolerance, max_iterations, stop, check_minimum: See `Method`.
    """

    base: Method = field(default_factory=Auto)
    graphs: GraphStore = field(default_factory=GraphStore)

    @classmethod
    def of(cls, base: Method, graphs: GraphStore) -> CompiledSolver:
        """Return the compiled form of a solver.

        Args:
            base: The solver.
            graphs: Where compiled graphs are kept.
        """
        settings = {f.name: getattr(base, f.name) for f in fields(Method)}
        return cls(base=base, graphs=graphs, **settings)

    @property
    def eager(self) -> Method:
        """The base solver with the current settings."""
        settings = {f.name: getattr(self, f.name) for f in fields(Method)}
        if all(getattr(self.base, name) == value for name, value in settings.items()):
            return self.base
        return replace(self.base, **settings)

    @property
    def couples_batch(self) -> bool:
        return self.base.couples_batch

    @property
    def method(self) -> str:
        return self.base.method

    def run(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        eager = self.eager
        iteration = graph_iteration(eager, problem, self.graphs)
        if isinstance(iteration, str) or trace or problem.trace:
            if isinstance(iteration, str) and iteration:
                self.graphs.warn(iteration)
            return eager.run(problem, trace=trace)
        problem, point, warm_up = eager.warm_up(problem)
        solution = self._in_graph(problem, point, warm_up, iteration)
        if solution is not None:
            return solution
        return eager.run(problem.started_at(problem.unpack(point)))

    def _in_graph(
        self, problem: FixedPointProblem, point: Tensor, warm_up: int, iteration: GraphIteration
    ) -> Solution | None:
        """Return the solution of a compiled graph; None if it has none for every sample."""
        rows = len(point)
        size = rows if problem.couples_batch else padded_size(rows)
        context = problem.context
        if size > rows:
            point = padded(point, size)
            context = padded_context(context, size)
        cell: nn.Module = problem.step.__self__  # type: ignore[attr-defined]
        parts = self.graphs.parts(cell)
        held = parts.tensors()
        inputs = [point, *context.tensors(), *held]

        def build() -> tuple[fx.GraphModule, None]:
            return solve_graph(problem, cell, context, held, iteration, inputs), None

        key: Hashable = (iteration, problem.packing.channels_last, parts.fingerprint())
        graph = self.graphs.get("forward", key, size, inputs, build)
        if graph is None:
            return None
        state, converged, residual, absolute, iterations = graph(inputs)
        if not bool(converged.all()):
            return None
        evaluations = int(iterations.max())
        status = torch.zeros_like(converged[:rows], dtype=torch.int8)
        return Solution(
            state=problem.unpack(state[:rows]),
            status=status,
            residual=residual[:rows],
            absolute_residual=absolute[:rows],
            iterations=iterations[:rows] + warm_up,
            evaluations=warm_up + evaluations,
            sample_evaluations=size * (warm_up + evaluations),
            tolerance=self.tolerance,
            solver=self.method,
            epsilon=problem.epsilon,
            context=problem.context,
            remedy=problem.remedy,
        )


def padded_context(context: Context, size: int) -> Context:
    """Return a context whose per-sample tensors are padded to a batch size."""
    tensors = zip(context.tensors(), context.is_per_sample(), strict=True)
    return context.replace([padded(t, size) if is_sample else t for t, is_sample in tensors])


def solve_graph(
    problem: FixedPointProblem,
    cell: nn.Module,
    context: Context,
    held: list[Tensor],
    iteration: GraphIteration,
    inputs: list[Tensor],
) -> fx.GraphModule:
    """Trace the solve of a problem as a function of start, context and held tensors."""
    examples = plain(inputs)
    samples = context_size(context, problem, len(examples[0]))
    packing = replace(problem.packing, samples=samples)
    count = 1 + len(context.tensors())
    skeleton = context.skeleton()

    def evaluate(flat: Tensor, *given: Tensor) -> Tensor:
        tensors = dict(zip(map(id, held), given[count - 1 :], strict=True))
        moved = twin(cell, lambda tensor: tensors.get(id(tensor), tensor))
        state = packing.unpack(flat.to(problem.state_dtype))
        image = moved.step(state, skeleton.replace(given[: count - 1]))  # type: ignore[operator]
        return packing.pack(image)

    step = split(trace(evaluate, *examples))

    def solve(start: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        constants = tuple(step.prepare(*given))
        result = iteration.solve(lambda y, c: step.finish(y, *c), start, constants, traced_loop)
        return tuple(result)

    return trace(solve, *examples)


def context_size(context: Context, problem: FixedPointProblem, rows: int) -> int:
    """Return the number of samples of a (padded) problem."""
    return problem.packing.samples if problem.couples_batch else rows


def graph_iteration(
    base: Method, problem: FixedPointProblem, graphs: GraphStore
) -> GraphIteration | str:
    """Return the iteration of a graph for a problem, or why it must be solved eagerly.

    The reason is empty if it needs no report, because the caller asked for what a graph cannot do.
    """
    cell = getattr(problem.step, "__self__", None)
    if problem.records_step or not isinstance(cell, nn.Module) or len(problem.packing.layout) == 0:
        return ""
    if any(is_wrapped(tensor) for tensor in problem.context.tensors()):
        return ""
    if torch.is_autocast_enabled(problem.device_type):
        return "compiled solves do not support autocast; this one runs eagerly"
    if problem.state_dtype not in (torch.float32, torch.float64):
        return f"compiled solves need float32 or float64, got {problem.state_dtype}; run eagerly"
    if problem.packing.samples == 0:
        return ""
    if base.stop is not None:
        return "compiled solves do not support stopping criteria; this one runs eagerly"
    parts = graphs.parts(cell)
    if any(isinstance(m, _BatchNorm) and m.training for m in parts.modules):
        return "the map updates batch statistics in training, so its solve runs eagerly"
    if parts.has_replaced_methods:
        return "a method of the map was replaced by a function, so its solve runs eagerly"
    iteration = _settings(base, problem)
    numbers = problem.packing.size * problem.packing.samples
    if isinstance(iteration, GraphIteration) and iteration.memory > 1:
        return iteration if numbers < LARGEST_HISTORY else ""
    return iteration


def _settings(base: Method, problem: FixedPointProblem) -> GraphIteration | str:
    limits: dict[str, Any] = {
        "tolerance": base.tolerance,
        "max_iterations": base.max_iterations,
    }
    chosen: Method | None = base
    if isinstance(base, Auto):
        chosen = base.choose(problem)
        if chosen is None or isinstance(chosen, Accelerated):
            small = problem.packing.size <= SMALL_STATE
            memory = max(base.memory, SMALL_STATE_MEMORY) if small else base.memory
            return GraphIteration(memory=memory, ridge=base.ridge, cap=base.cap, **limits)
        if isinstance(chosen, Anderson):
            options = {name: getattr(chosen, name) for name in ("memory", "ridge", "cap")}
            return GraphIteration(damping=chosen.damping, **options, **limits)
    if type(chosen) is Picard and chosen.damping == 1:
        return GraphIteration(memory=1, **limits)
    if type(chosen) is Accelerated:
        return GraphIteration(memory=SMALL_STATE_MEMORY, **limits)
    if type(chosen) is Anderson:
        names = ("memory", "ridge", "cap", "damping")
        options = {name: getattr(chosen, name) for name in names}
        return GraphIteration(plain_first=False, **options, **limits)
    return f"{type(chosen).__name__} has no compiled form, so the solve runs eagerly"


def converged_status(converged: Tensor) -> Tensor:
    """Return the status of rows that have converged or not."""
    status = torch.where(converged, int(Status.CONVERGED), int(Status.OUT_OF_ITERATIONS))
    return status.to(torch.int8)
