"""A solve as a graph: the map, the iteration and the bookkeeping, with tensors only.

A graph cannot branch on data, nor change the size of the batch. So every iteration evaluates all
rows, masks freeze the rows that have finished, and a loop ends when no row is running:

1. `plain_steps` iterates y ← T(y) as long as it converges quickly;
2. `mixed_steps` continues with Anderson acceleration;
3. `conjugate_gradients` solves the symmetric linear systems of backward passes.

Each takes the function that runs a loop. `run_loop` is a Python loop; `traced_loop` records one
operator of the graph, for compilers and for exported programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

MAX_PLAIN_STEPS = 16
"""Plain steps continue while every row is expected to converge within this many iterations."""

MAX_GROWTH = 1e3
"""Rows whose norm exceeds that of the first three iterations by this factor have failed: far away,
the relative residual of a diverging map is small, too."""

SMALLEST_NORM = 1e-12
"""Rows with a smaller norm of T(y) count as failed, because float32 squares underflow near it."""

SMALLEST_SCALE = 1e-30
"""Smallest norm of T(y) that residuals are relative to if failures are not detected."""

FEW_SAMPLES = 8
"""Up to this many samples, selecting numbers takes less time than a view of each row."""

Variables = tuple[Tensor, ...]
Map = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""A map of a point, shape (rows, size), and of constants of the loop."""
StateMap = Callable[[Variables, Sequence[Tensor]], Variables]
"""A map of the tensors of a state, each with the rows first, and of constants of the loop."""


class Loop(Protocol):
    """Function that repeats `body` on the variables while `condition` holds.

    Both are called with the variables, followed by the constants.
    """

    def __call__(
        self,
        condition: Callable[..., Tensor],
        body: Callable[..., Variables],
        variables: Variables,
        constants: Variables,
    ) -> Variables: ...


def run_loop(
    condition: Callable[..., Tensor],
    body: Callable[..., Variables],
    variables: Variables,
    constants: Variables,
) -> Variables:
    """Run a loop in Python; see `Loop`."""
    while bool(condition(*variables, *constants)):
        variables = body(*variables, *constants)
    return variables


def traced_loop(
    condition: Callable[..., Tensor],
    body: Callable[..., Variables],
    variables: Variables,
    constants: Variables,
) -> Variables:
    """Record a loop as one operator of the graph that is being traced; see `Loop`."""
    from torch._higher_order_ops.while_loop import while_loop_op

    loop: Any = while_loop_op
    result: Variables = loop(condition, body, variables, constants)
    return result


class GraphResult(NamedTuple):
    """Result of a loop for each row.

    A row has failed if it did not converge, is not finite, or is too small; the caller solves such
    batches again with the eager solver, which finds out why.
    """

    state: Tensor
    """T(y) at the point y where the row converged."""
    converged: Tensor
    residual: Tensor
    """Relative residual ‖T(y) − y‖/‖T(y)‖."""
    absolute: Tensor
    """‖T(y) − y‖."""
    iterations: Tensor


@dataclass(frozen=True)
class GraphIteration:
    """Settings of an iteration in a graph.

    Args:
        tolerance: Relative residual at which a row has converged.
        max_iterations: Largest number of iterations.
        memory: Number of points that Anderson acceleration mixes; 1 takes plain steps only.
        plain_first: Whether to begin with plain steps, as long as they converge quickly.
        damping: Anderson's damping; above 1 it extrapolates.
        ridge: Regularization of Anderson's system, relative to the squared norm of each residual.
        cap: Largest 1-norm of Anderson's coefficients; a plain step replaces larger ones.
        detects_failures: Whether rows that are not finite, grow or are too small stop as failed.
            Otherwise, every row runs until it reaches the tolerance.
    """

    tolerance: float
    max_iterations: int
    memory: int = 1
    plain_first: bool = True
    damping: float = 1.0
    ridge: float = 1e-8
    cap: float = 1e3
    detects_failures: bool = True

    def solve(
        self,
        evaluate: Map,
        start: Tensor,
        constants: Variables,
        loop: Loop,
        scale: Tensor | None = None,
    ) -> GraphResult:
        """Iterate until all rows have converged or failed.

        Args:
            evaluate: The map T, called with a point and the constants.
            start: First point, shape (rows, size).
            constants: Tensors that the map reads.
            loop: Runs the loops.
            scale: Norm of each row that residuals are relative to; by default that of T(y).
        """
        progress = _initial_progress(self, start)
        scales = () if scale is None else (scale,)
        point = start
        if self.plain_first or self.memory == 1:

            def step(points: Variables, constants: Sequence[Tensor]) -> Variables:
                return (evaluate(points[0], constants),)

            progress, (point,) = plain_steps(
                self, step, progress, (point,), constants, scales, loop
            )
        if self.memory > 1:
            progress, point = mixed_steps(self, evaluate, progress, point, constants, scales, loop)
        (facts,) = progress
        return GraphResult(
            point,
            facts[CONVERGED] > 0,
            facts[RESIDUAL],
            facts[ABSOLUTE],
            facts[ITERATIONS].to(torch.int64),
        )

    def iterate(
        self, evaluate: StateMap, start: Variables, constants: Variables, loop: Loop
    ) -> tuple[Variables, Tensor, Tensor]:
        """Take plain steps on a state of any shape until all rows have reached the tolerance.

        Args:
            evaluate: The map T, called with the tensors of a state and the constants.
            start: Tensors of the first state, each with the rows first.
            constants: Tensors that the map reads.
            loop: Runs the loop.

        Returns:
            The tensors of the state T(y), ‖T(y) − y‖ of each row, and its iterations.
        """
        settings = replace(self, memory=1, detects_failures=False)
        progress = _initial_progress(settings, start[0])
        progress, state = plain_steps(settings, evaluate, progress, start, constants, (), loop)
        return state, progress[2], progress[3]


COUNT, RUNNING, CONVERGED, RESIDUAL, ABSOLUTE, ITERATIONS, FIRST_SIZE, SLOW = range(8)
"""Rows of the progress of a loop that detects failures, with one column per sample: the number of
iterations of the loop, whether the sample is running and has converged, its relative and absolute
residuals, its iterations, its largest norm in the first iterations, and whether plain steps are too
slow for it. One tensor, because a compiled loop spends a microsecond per variable and iteration."""


def _initial_progress(settings: GraphIteration, start: Tensor) -> Variables:
    """Return the variables that `_observed` updates in every iteration.

    One tensor if failures are detected. Otherwise the number of iterations, and for each row if
    it is running, ‖T(y) − y‖ and its own number of iterations.
    """
    number = start.flatten(1)[:, 0]
    zeros, infinite = torch.zeros_like(number), torch.full_like(number, torch.inf)
    if settings.detects_failures:
        ones = torch.ones_like(number)
        return (_stacked([zeros, ones, zeros, infinite, infinite, zeros, zeros, zeros]),)
    return (
        torch.zeros((), dtype=torch.int64, device=start.device),
        torch.ones_like(number, dtype=torch.bool),
        infinite,
        torch.zeros_like(number, dtype=torch.int64),
    )


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return `torch.stack(rows)`, for which compilers make a view per row."""
    if len(rows[0]) > FEW_SAMPLES:
        return torch.stack(list(rows))
    place = torch.arange(len(rows), device=rows[0].device)[:, None]
    result = rows[-1].expand(len(rows), -1)
    for i, row in enumerate(rows[:-1]):
        result = torch.where(place == i, row, result)
    return result


def row_norms(tensors: Variables) -> Tensor:
    """Return the norm of each row of a state."""
    # ONNX Runtime takes half as much time again for the operator of `vector_norm`.
    squares = [t.flatten(1).square().sum(dim=1) for t in tensors]
    return functools.reduce(torch.add, squares).sqrt()


def _per_row(flags: Tensor, like: Tensor) -> Tensor:
    """Return flags of rows in a shape that broadcasts with a tensor of a state."""
    return flags.reshape(-1, *[1] * (like.dim() - 1))


def _observed(
    settings: GraphIteration,
    progress: Variables,
    images: Variables,
    changes: Variables,
    scales: Variables,
    *,
    may_leave: bool = False,
) -> Variables:
    """Return the progress after one iteration.

    Args:
        settings: Settings of the iteration.
        progress: Progress before it.
        images: T(y).
        changes: T(y) − y.
        scales: The norm that residuals are relative to, if it is not that of T(y).
        may_leave: Whether to note samples for which plain steps are too slow.
    """
    change_norm, size = row_norms(changes), row_norms(images)
    if not settings.detects_failures:
        count, running, absolute, iterations = progress
        absolute = torch.where(running, change_norm, absolute)
        reached = change_norm <= settings.tolerance * size.clamp_min(SMALLEST_SCALE)
        return count + 1, running & ~reached, absolute, iterations + running
    (facts,) = progress
    count, active, converged, residual, absolute, iterations, first_size, _ = facts.unbind()
    running = active > 0
    relative = change_norm / (scales[0] if scales else size)
    exact = change_norm == 0
    first_size = torch.where(count < 3, torch.maximum(first_size, size), first_size)
    sound = torch.isfinite(change_norm) & (size <= MAX_GROWTH * first_size)
    reached = relative <= settings.tolerance
    if not scales:
        reached = reached & (size > SMALLEST_NORM)
    reached = running & sound & (reached | exact)
    relative = torch.where(running, torch.where(exact, 0.0, relative), residual)
    goes_on = running & ~reached & sound
    slow = torch.zeros_like(size)
    if may_leave:
        slow = (goes_on & _is_slow(settings, count + 1, relative, residual)).to(size.dtype)
    rows = [
        count + 1,
        goes_on.to(size.dtype),
        torch.where(reached, 1.0, converged),
        relative,
        torch.where(running, change_norm, absolute),
        iterations + active,
        first_size,
        slow,
    ]
    return (_stacked(rows),)


def _is_slow(settings: GraphIteration, count: Tensor, residual: Tensor, previous: Tensor) -> Tensor:
    """Return whether plain steps are not expected to finish a row soon enough."""
    rate = (residual / previous).clamp(min=1e-6, max=1 - 1e-6)
    ahead = torch.log(settings.tolerance / residual) / torch.log(rate)
    # The first residual has no predecessor.
    return ~(count + ahead <= MAX_PLAIN_STEPS) & (count >= 2)


def _goes_on(settings: GraphIteration, progress: Variables) -> Tensor:
    """Return whether a row is running and the limit of iterations is not reached."""
    if not settings.detects_failures:
        return progress[1].any() & (progress[0] < settings.max_iterations)
    facts = progress[0]
    return ((facts[RUNNING] > 0) & (facts[COUNT] < settings.max_iterations)).any()


def _running(progress: Variables) -> Tensor:
    """Return which rows are running."""
    return progress[0][RUNNING] > 0 if len(progress) == 1 else progress[1]


def plain_steps(
    settings: GraphIteration,
    evaluate: StateMap,
    progress: Variables,
    state: Variables,
    constants: Variables,
    scales: Variables,
    loop: Loop,
) -> tuple[Variables, Variables]:
    """Iterate y ← T(y) until all rows have finished, or until it converges too slowly.

    If `settings.memory` is 1, slow rows continue to the limit of iterations.
    """
    may_leave = settings.memory > 1
    size, begin = len(scales), len(progress)
    end = begin + len(state)

    def condition(*variables: Tensor) -> Tensor:
        goes_on = _goes_on(settings, variables)
        return goes_on & ~(variables[0][SLOW] > 0).any() if may_leave else goes_on

    def body(*variables: Tensor) -> Variables:
        before, points, rest = variables[:begin], variables[begin:end], variables[end:]
        scales, constants = rest[:size], rest[size:]
        images = evaluate(points, constants)
        changes = tuple(image - y for image, y in zip(images, points, strict=True))
        after = _observed(settings, before, images, changes, scales, may_leave=may_leave)
        following = tuple(
            torch.where(_per_row(_running(before), y), image, y).contiguous()
            for image, y in zip(images, points, strict=True)
        )
        return *after, *following

    first = tuple(tensor.clone() for tensor in state)
    variables = loop(condition, body, (*progress, *first), (*scales, *constants))
    return variables[:begin], variables[begin:]


def mixed_steps(
    settings: GraphIteration,
    evaluate: Map,
    progress: Variables,
    point: Tensor,
    constants: Variables,
    scales: Variables,
    loop: Loop,
) -> tuple[Variables, Tensor]:
    """Iterate with Anderson acceleration of type II (see `solvers.Anderson`)."""
    rows, width = point.shape
    memory, size = settings.memory, len(scales)

    def condition(*variables: Tensor) -> Tensor:
        return _goes_on(settings, variables)

    def body(*variables: Tensor) -> Variables:
        facts, point, goals, residuals, gram, *rest = variables
        scales, constants = tuple(rest[:size]), rest[size:]
        image = evaluate(point, constants)
        change = image - point
        (after,) = _observed(settings, (facts,), (image,), (change,), scales)
        # Slots are written in turn, whichever is the first: the others do not count yet.
        turn = facts[COUNT, 0] % memory
        slot = torch.arange(memory, device=point.device, dtype=point.dtype) == turn
        goal = image if settings.damping == 1 else image + (settings.damping - 1) * change
        goals = torch.where(slot[None, :, None], goal[:, None], goals)
        residuals = torch.where(slot[None, :, None], change[:, None], residuals)
        gram = _updated_gram(settings, gram, residuals, change, slot)
        weights = _weights(settings, gram, slot).to(image.dtype)
        mixed = (weights[:, :, None] * goals).sum(dim=1)
        was_running, is_running = facts[RUNNING, :, None] > 0, after[RUNNING, :, None] > 0
        following = torch.where(is_running, mixed, torch.where(was_running, image, point))
        return after, following, goals, residuals, gram

    double = torch.float32 if point.device.type == "mps" else torch.float64
    # Slots that were never written have infinite diagonals, so that their coefficients are zero.
    empty = torch.full((memory,), torch.inf, dtype=double, device=point.device).diag()
    history = (
        point.clone(),
        point.new_zeros(rows, memory, width),
        point.new_zeros(rows, memory, width),
        empty.expand(rows, memory, memory).clone(),
    )
    facts, point, *_ = loop(condition, body, (*progress, *history), (*scales, *constants))
    return (facts,), point


def _updated_gram(
    settings: GraphIteration, gram: Tensor, residuals: Tensor, change: Tensor, slot: Tensor
) -> Tensor:
    """Replace one row and one column of the Gram matrices of the residuals."""
    products = (residuals * change[:, None]).sum(dim=2).to(gram.dtype)
    products = torch.where(slot, products * (1 + settings.ridge), products)
    row = torch.where(slot[None, :, None], products[:, None, :], gram)
    return torch.where(slot[None, None, :], products[:, :, None], row)


def _weights(settings: GraphIteration, gram: Tensor, slot: Tensor) -> Tensor:
    """Return the coefficients of each row; the newest point alone where they are unsound.

    The elimination is written out because compilers cannot fuse a call of a linear solver.
    """
    size = gram.shape[1]
    matrix = [[gram[:, i, j] for j in range(size)] for i in range(size)]
    right = [torch.ones_like(matrix[0][0]) for _ in range(size)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[i][j] / matrix[i][i]
            right[j] = right[j] - factor * right[i]
            for k in range(j, size):
                matrix[j][k] = matrix[j][k] - factor * matrix[i][k]
    solution: list[Any] = [None] * size
    for i in reversed(range(size)):
        total = right[i]
        for k in range(i + 1, size):
            total = total - matrix[i][k] * solution[k]
        solution[i] = total / matrix[i][i]
    weights = torch.stack(solution, dim=1)
    weights = weights / weights.sum(dim=1, keepdim=True)
    sound = weights.abs().sum(dim=1, keepdim=True) <= settings.cap
    return torch.where(sound, weights, slot.to(weights.dtype))


def conjugate_gradients(
    operator: Map,
    rhs: Tensor,
    scale: Tensor,
    constants: Variables,
    loop: Loop,
    *,
    tolerance: float,
    max_iterations: int,
) -> GraphResult:
    """Solve A u = g for a symmetric positive definite A, separately for each row.

    Args:
        operator: u ↦ Au, called with u and the constants.
        rhs: g, shape (rows, size).
        scale: Norm of each row that residuals are relative to.
        constants: Tensors that the operator reads.
        loop: Runs the loop.
        tolerance: Relative residual at which a row has converged.
        max_iterations: Largest number of products.
    """
    dtype = rhs.dtype

    def condition(*variables: Tensor) -> Tensor:
        count, running = variables[0][:2].unbind()
        return ((running > 0) & (count < max_iterations)).any()

    def body(*variables: Tensor) -> Variables:
        progress, vectors, scale, *constants = variables
        count, active, iterations, square = progress.unbind()
        value, residual, direction = vectors.unbind()
        running = active > 0
        image = operator(direction, constants)
        curvature = (direction * image).sum(dim=1)
        length = torch.where(running, square / curvature, 0.0)
        value = value + length[:, None] * direction
        residual = residual - length[:, None] * image
        following = (residual * residual).sum(dim=1)
        direction = residual + torch.where(running, following / square, 0.0)[:, None] * direction
        goes_on = running & (curvature > 0) & (following.sqrt() > tolerance * scale)
        goes_on = goes_on & torch.isfinite(following)
        progress = _stacked([count + 1, goes_on.to(dtype), iterations + active, following])
        return progress, torch.stack([value, residual, direction])

    square = (rhs * rhs).sum(dim=1)
    zeros = torch.zeros_like(square)
    running = (square.sqrt() > tolerance * scale).to(dtype)
    progress, vectors = loop(
        condition,
        body,
        (
            _stacked([zeros, running, zeros, square]),
            torch.stack([torch.zeros_like(rhs), rhs, rhs]),
        ),
        (scale, *constants),
    )
    _, _, iterations, square = progress.unbind()
    absolute = square.sqrt()
    relative = torch.where(absolute > 0, absolute / scale, absolute)
    return GraphResult(
        vectors[0], relative <= tolerance, relative, absolute, iterations.to(torch.int64)
    )
