"""Descent on the hidden objective itself, which converges where the fixed-point map does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from equilibria.solvers.base import Memory
from equilibria.solvers.convergence import Iterate, Residuals, Scale, row_norms
from equilibria.solvers.minimize.base import Minimizer
from equilibria.solvers.minimize.objective import SHORTEST, CountedObjective, Point
from equilibria.solvers.minimize.quasi_newton import PAIRS, Pairs
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution, Status, Trace

NEWTON_LENGTHS = (1.0, 0.5, 0.2, 0.05, 0.01, 1e-3, 1e-4, 1e-5)
"""Shares of a Newton step that are tried before a gradient step."""
SUFFICIENT = 1e-4
"""The share of the decrease that the slope predicts which a Newton step must bring."""
SUFFICIENT_OF_GRADIENT = 0.1
"""‖y⁺ − y‖²/s times this is the decrease that a gradient step of length s must bring."""
GENTLE = 0.5
"""The length of a gradient step below which the curvature is too large for the plain map."""
NOISE = 4.0
"""Units of rounding by which two values of the objective may differ for nothing."""
PATIENCE = 30
"""Steps in a row without progress after which a descent ends."""
PROGRESS, FALL = 0.9, 1e-3
"""Progress: a distance to stationary of at most this share of what it was, or a fall of G by at
least this share of all that it has fallen since the start."""
QUASI_BUDGET = 200
"""Evaluations after which Newton steps follow, which bear any condition number."""
LARGEST_MEMORY = 2**30
"""Bytes of remembered steps beyond which there are Newton steps only."""
SHORTEST_SHARE = 1e-3
"""Of a quasi-Newton step, before a gradient step takes its place."""
LEAST_CUT, MOST_CUT = 0.66, 0.1
"""What is left of a quasi-Newton step that failed, wherever the cubic has its minimum."""
LOOSEST, TIGHTEST = 0.1, 1e-8
"""Relative residuals of the linear solve of a Newton step."""


@dataclass
class DescentMemory(Memory):
    """What each row has learned on its way."""

    length: Tensor
    """Of its next gradient step."""
    forcing: Tensor
    """How precisely its next Newton step is computed (Eisenstat and Walker, 1996)."""
    settled: Tensor
    """Whether its last Newton step was taken whole: no gradient step is needed then."""
    first: Tensor
    """G at the start."""
    lowest: Tensor
    """G, and"""
    nearest: Tensor
    """‖σ(d) − y‖, at the last step that brought progress."""
    idle: Tensor
    """Steps since then."""
    share: Tensor
    """Of its next quasi-Newton step; zero: a gradient step is due."""
    quasi: Tensor
    """Whether its next step is a quasi-Newton step."""


@dataclass(frozen=True, kw_only=True)
class Descent(Minimizer):
    """Newton's method on the hidden objective, safeguarded by proximal gradient steps.

    It begins with two hundred evaluations of a quasi-Newton method: Newton steps with an
    approximation of ∇²E by BFGS (`Pairs`), shortened by cubic interpolation.

    Stationary is a = d(σ(a)), d = −∇E. With S = σ′(a) a Newton step solves (I + ∇²E S) w = d − a
    by conjugate gradients in ⟨·,·⟩_S, the products with ∇²E coming from autograd, and shortens w
    until G falls by enough. Unless the last one was taken whole, a proximal gradient step
    y ← prox_{sf}(y − s(y − d)) goes before it, its length s found by backtracking on G: a short
    enough step always lowers G and finds the active units. So every convex energy is minimized,
    whether or not the plain map contracts; with another one the solve ends at a stationary point,
    and at a kink of the objective where it falls no more, as stalled.

    Float32 is lifted to float64: beside a large curvature its rounding would hide the minimum.

    max_iterations: evaluations of the map and of products with its Jacobian.

    Examples:
        >>> @eq.energy_term
        ... def steep(y, x):  # its plain iteration y = x − 50y would diverge
        ...     return 25 * y.square().sum(dim=1)
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(1)) + steep, solver=eq.solvers.Descent())
        >>> layer(torch.tensor([[51.0]])).round(decimals=3)
        tensor([[1.]], grad_fn=...)
    """

    def run(
        self,
        problem: FixedPointProblem,
        *,
        trace: bool | Literal["states"] = False,
        visited: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Solution:
        if problem.potential is None:
            raise ValueError(
                "descent needs a hidden objective, and this map has none: use 'auto' or 'anderson'"
            )
        warmed_up, start, warm_up = self.warm_up(problem)
        lifted = warmed_up.lifted()
        try:
            run = _DescentRun(self, lifted, start, trace or problem.trace, visited)
        except RuntimeError:
            if lifted is warmed_up:
                raise
            # A function that holds constants of another type takes no other state.
            lifted = warmed_up
            run = _DescentRun(self, lifted, start, trace or problem.trace, visited)
        while len(run.rows):
            run.observe()
            if len(run.rows):
                run.advance()
        run.map_where_that_contracts(lifted)
        return run.solution(warmed_up, warm_up)


class _DescentRun:
    """One solve: the rows that still run, and what became of the others."""

    def __init__(
        self,
        settings: Descent,
        problem: FixedPointProblem,
        start: Tensor,
        trace: bool | Literal["states"],
        visited: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.settings = settings
        self.rows = torch.arange(len(start), device=start.device)
        self.objective = CountedObjective(problem, self.rows)
        # A descent from next to a maximum grows by many orders of magnitude before it converges.
        self.scale = Scale(least=1.0)
        y = start.to(problem.buffer_dtype)
        ones = torch.ones_like(y[:, 0])
        self.pace = DescentMemory(
            length=ones.clone(),
            forcing=LOOSEST * ones,
            settled=torch.ones_like(self.rows, dtype=torch.bool),
            first=torch.inf * ones,
            lowest=torch.inf * ones,
            nearest=torch.inf * ones,
            idle=torch.zeros_like(self.rows),
            share=ones.clone(),
            quasi=torch.full_like(
                self.rows,
                2 * PAIRS * y.numel() * y.element_size() <= LARGEST_MEMORY,
                dtype=torch.bool,
            ),
        )
        self.gentle = torch.zeros_like(self.pace.quasi)
        """Rows along whose steps the plain map may have contracted."""
        self.pairs = Pairs(y) if bool(self.pace.quasi.any()) else None
        self.point = self._first_point(y, visited)
        self.pace.first = self.point.value
        self.result = Solution(
            state=y.clone(),
            status=torch.full_like(ones, int(Status.OUT_OF_ITERATIONS), dtype=torch.int8),
            residual=torch.full_like(ones, torch.inf),
            absolute_residual=torch.full_like(ones, torch.inf),
            iterations=torch.zeros_like(self.rows),
            evaluations=0,
            sample_evaluations=0,
            tolerance=settings.tolerance,
            solver=settings.method,
            epsilon=problem.epsilon,
            context=problem.context,
            remedy=problem.remedy,
        )
        self.traced: list[Tensor] | None = [] if trace else None
        self.states: list[Tensor] | None = [] if trace == "states" else None

    def observe(self) -> None:
        """Note where each row stands, and part with those that have come to their end."""
        point, result, rows = self.point, self.result, self.rows
        assert isinstance(result.state, Tensor)
        image = self.objective.potential.image(point.y, point.descent)
        residuals = self.scale.measure(image, image - point.y, None)
        sound = torch.isfinite(point.value) & residuals.bounded
        reached = sound & self.settings.criterion.reached(
            Iterate(self.objective.problem, image, residuals, is_state=False)
        )
        over = self.objective.spent >= self.settings.max_iterations
        stalled = self._stalled()
        status = torch.where(stalled, int(Status.STALLED), int(Status.OUT_OF_ITERATIONS))
        status = torch.where(reached, int(Status.CONVERGED), status)
        result.state[rows[sound]] = point.y[sound]
        result.residual[rows] = residuals.relative
        result.absolute_residual[rows] = residuals.absolute
        result.status[rows] = torch.where(sound, status, int(Status.DIVERGED)).to(torch.int8)
        result.iterations[rows] = self.objective.spent
        self.gentle[rows] = self.pace.length >= GENTLE
        self._record(residuals)
        going = sound & ~reached & ~over & ~stalled
        if not bool(going.all()):
            keep = going.nonzero().squeeze(1)
            self.rows, self.point = rows[keep], point.keep(keep)
            self.objective.keep(keep)
            self.pace.keep(keep)
            self.scale.keep(keep)
            if self.pairs is not None:
                self.pairs.keep(keep)

    def advance(self) -> None:
        """A trial of a quasi-Newton step in every row that begins; then Newton steps."""
        quasi = self.pace.quasi.nonzero().squeeze(1)
        if len(quasi) and self.pairs is not None:
            self._quasi_newton_step(quasi, self.pairs)
            self.pace.quasi = self.pace.quasi & (self.objective.spent < QUASI_BUDGET)
        else:
            self.pairs = None
            self._newton_step()

    def _quasi_newton_step(self, rows: Tensor, pairs: Pairs) -> None:
        """One trial in these rows, shorter than the last if that failed, or a gradient step."""
        pace = self.pace
        short = rows[pace.share[rows] == 0]
        if len(short):
            at = self.objective.opened(self._valued(self.point, short))
            self.point = self._gradient_step(at, short)
            pairs.add(short, *at.keep(short).step_to(self.point.keep(short)))
            pace.share[short] = 1.0
            rows = rows[~torch.isin(rows, short)]
            if not len(rows):
                return
        at = self.objective.opened(self.point)
        here, share = at.keep(rows), pace.share[rows]
        weight = self.objective.activation.derivative(here.a)
        direction, length = pairs.direction(rows, here.gap, weight, pace.length[rows])
        # Units that are off stay off in a shorter step: they may be why the whole one failed.
        shortened = (share < 1)[:, None] & (weight == 0)
        path = share[:, None] * torch.where(shortened, 0.0, direction)
        trial = self.objective.evaluate(here.a + path, rows)
        slope = -torch.linalg.vecdot(weight * here.gap, path)
        steepness = -torch.linalg.vecdot(
            self.objective.activation.derivative(trial.a) * trial.gap, path
        )
        # A convex function that still falls at the trial has fallen all the way.
        falling = here.value.isnan() & (steepness <= 0) & torch.isfinite(trial.value)
        at = self._valued(at, rows[~falling])
        here.value = at.value[rows]
        good = falling | self._good(here, trial, slope, self._noise(at)[rows])
        left = share * _minimum_of_cubic(trial.value - here.value, slope, steepness)
        left = torch.where(left > SHORTEST_SHARE, left, 0.0)
        pace.share[rows] = torch.where(good, 1.0, left)
        pace.length[rows] = length.clamp(SHORTEST, 1.0)
        pairs.forget(rows[~good & (left == 0)])
        taken = good.nonzero().squeeze(1)
        trial = trial.keep(taken)
        pairs.add(rows[taken], *here.keep(taken).step_to(trial))
        self.point = at.with_rows(rows[taken], trial)

    def _good(self, at: Point, trial: Point, predicted: Tensor, noise: Tensor) -> Tensor:
        """Whether a trial lowers G by enough of what was predicted."""
        lower = trial.value <= at.value + SUFFICIENT * predicted
        # Close to the minimum G falls by less than its rounding: the residual tells more.
        level = trial.value <= at.value + noise
        closer = self.objective.distance(trial) <= PROGRESS * self.objective.distance(at)
        return lower | (level & closer)

    def _newton_step(self) -> None:
        """A Newton step of every row, and a gradient step before it where that is needed."""
        at, pace = self.point, self.pace
        unsettled = (~pace.settled).nonzero().squeeze(1)
        if len(unsettled):
            at = self._gradient_step(at, unsettled)
        at = self.objective.opened(at)
        weight = self.objective.activation.derivative(at.a)
        direction = self.objective.newton_direction(
            at, weight, pace.forcing, self.settings.max_iterations // 10
        )
        slope = -torch.linalg.vecdot(weight * at.gap, direction)
        before = row_norms(at.gap)
        new = at
        pending = (slope < 0).nonzero().squeeze(1)
        pace.settled = torch.zeros_like(pace.settled)
        taken = torch.zeros_like(pace.settled)
        for share in NEWTON_LENGTHS:
            if not len(pending):
                break
            if share < 1:  # Units that are off stay off: they may be why the whole step failed.
                direction = torch.where(weight == 0, 0.0, direction)
            trial = self.objective.evaluate(at.a[pending] + share * direction[pending], pending)
            good = self._good(
                at.keep(pending), trial, share * slope[pending], self._noise(at)[pending]
            )
            taken[pending[good]] = True
            pace.settled[pending[good]] = share == 1
            new = new.with_rows(pending[good], trial.keep(good.nonzero().squeeze(1)))
            pending = pending[~good]
        # The linear solve becomes as precise as Newton's model has turned out to be, and more
        # precise where its result was of no use.
        progress = (row_norms(new.gap) / before).square()
        forcing = torch.where(taken, progress.clamp_max(LOOSEST), pace.forcing / 10)
        pace.forcing = forcing.clamp_min(TIGHTEST)
        self.point = new

    def map_where_that_contracts(self, problem: FixedPointProblem) -> None:
        """The state is T(y), as with other solvers, unless that is further from stationary.

        Which is so where steps were as short as a curvature above 1 makes them: not looked at.
        """
        y = self.result.state
        assert isinstance(y, Tensor)
        rows = self.gentle.nonzero().squeeze(1)
        if not len(rows):
            return
        images, some = [y[rows]], problem.keep(rows)
        for _ in range(2):
            _, descent = self.objective.potential.evaluate(some, images[-1])
            images.append(self.objective.potential.image(images[-1], descent))
        self.objective.calls += 2
        self.objective.sample_calls += 2 * len(rows)
        before, after = (row_norms(b - a) for a, b in pairwise(images))
        state = torch.where((after < before)[:, None], images[1], images[0])
        self.result = replace(self.result, state=y.index_copy(0, rows, state))

    def solution(self, given: FixedPointProblem, warm_up: int) -> Solution:
        result = self.result
        assert isinstance(result.state, Tensor)
        dtype = given.buffer_dtype
        trace = None
        if self.traced is not None:
            states = None if self.states is None else [given.unpack(s) for s in self.states]
            trace = Trace(torch.stack(self.traced).to(dtype), states)
        return replace(
            result,
            state=given.unpack(result.state.to(dtype)),
            residual=result.residual.to(dtype),
            absolute_residual=result.absolute_residual.to(dtype),
            iterations=result.iterations + warm_up,
            evaluations=self.objective.calls + warm_up,
            sample_evaluations=self.objective.sample_calls + warm_up * len(result.status),
            epsilon=given.epsilon,
            context=given.context,
            trace=trace,
        )

    def _stalled(self) -> Tensor:
        """Rows that have come as far as they can: at a kink, or to where all is rounding."""
        pace, value, distance = self.pace, self.point.value, self.objective.distance(self.point)
        enough = torch.maximum(self._noise(self.point), FALL * (pace.first - value))
        fell = value < pace.lowest - enough
        progress = fell | (distance < PROGRESS * pace.nearest)
        pace.lowest = torch.where(progress, torch.minimum(value, pace.lowest), pace.lowest)
        pace.nearest = torch.where(progress, torch.minimum(distance, pace.nearest), pace.nearest)
        # Newton steps wait until no row takes quasi-Newton steps.
        moved = pace.quasi | ~pace.quasi.any()
        pace.idle = torch.where(progress, 0, pace.idle + moved.to(pace.idle.dtype))
        stalled = (pace.idle >= PATIENCE) | (pace.length < SHORTEST)
        # Where quasi-Newton steps bring nothing, Newton steps may.
        again = stalled & pace.quasi
        pace.quasi = pace.quasi & ~again
        pace.idle = torch.where(again, 0, pace.idle)
        pace.length = torch.where(again, 1.0, pace.length)
        return stalled & ~again

    def _record(self, residuals: Residuals) -> None:
        if self.traced is not None:
            latest = torch.full_like(self.result.residual, torch.nan)
            self.traced.append(latest.index_copy(0, self.rows, residuals.relative))
        if self.states is not None:
            assert isinstance(self.result.state, Tensor)
            self.states.append(self.result.state.clone())

    def _first_point(self, y: Tensor, visited: Sequence[tuple[Tensor, Tensor]]) -> Point:
        """A step from the best of the points visited before, which are its first memory.

        What is not known of these is G.
        """
        points = [self.objective.prepared(at.to(y), descent.to(y)) for at, descent in visited]
        points = points if len(points) > 1 else self._plain_step(y)
        for before, after in pairwise(points):
            if self.pairs is not None:
                self.pairs.add(self.rows, *before.step_to(after))
            image = self.objective.activation(before.descent)
            mapped = (image == after.y).all(dim=1)[:, None]
            after.a = torch.where(mapped, before.descent, after.a)
        step, change = points[0].step_to(points[1])
        curvature = row_norms(change - step) / row_norms(step)
        self.pace.length = 1 / (1 + curvature.nan_to_num(0.0, posinf=0.0))
        self.point = self.objective.best(points)
        if self.pairs is None:
            return self._gradient_step(self._valued(self.point, self.rows), self.rows)
        while len(unknown := self.point.value.isnan().nonzero().squeeze(1)):
            self._quasi_newton_step(unknown, self.pairs)
        return self.point

    def _plain_step(self, y: Tensor) -> list[Point]:
        """The start, or zero where nothing is finite at the start, and its image."""
        value, descent = self.objective.energy(y, self.rows)
        broken = (~torch.isfinite(value + descent.sum(dim=1))).nonzero().squeeze(1)
        if len(broken):
            y = y.index_fill(0, broken, 0.0)
            _, other = self.objective.energy(y[broken], broken)
            descent = descent.index_copy(0, broken, other)
        image = self.objective.activation(descent)
        return [
            self.objective.prepared(y, descent),
            self.objective.prepared(image, self.objective.energy(image, self.rows)[1]),
        ]

    def _valued(self, at: Point, rows: Tensor) -> Point:
        """The same, with G known in these rows."""
        unknown = rows[at.value[rows].isnan()]
        if not len(unknown):
            return at
        return at.with_rows(unknown, self.objective.evaluate(at.a[unknown], unknown))

    def _noise(self, at: Point) -> Tensor:
        """How much of G may be rounding: of its terms, and of what has cancelled inside E.

        Backtracking has found the curvature of E to be about 1/s.
        """
        size = at.size + at.y.square().sum(dim=1) / self.pace.length
        return NOISE * torch.finfo(at.y.dtype).eps * size

    def _gradient_step(self, at: Point, rows: Tensor) -> Point:
        """prox_{sf}(y − s(y − d)) in these rows, s shortened until G falls by enough."""
        length = self.pace.length
        pending = rows
        new = at
        while len(pending):
            s = length[pending]
            y = at.y[pending]
            pull = y + s[:, None] * (at.descent[pending] - y)
            trial = self.objective.evaluate(
                self.objective.activation.prox_argument(pull, s[:, None]), pending
            )
            decrease = SUFFICIENT_OF_GRADIENT * (trial.y - y).square().sum(dim=1) / s
            enough = trial.value <= at.value[pending] - decrease + self._noise(at)[pending]
            good = enough | (s < SHORTEST)
            length[pending] = torch.where(
                enough, (2 * s).clamp_max(1.0), torch.where(good, s, s / 4)
            )
            new = new.with_rows(pending[good], trial.keep(good.nonzero().squeeze(1)))
            pending = pending[~good]
        return new


def _minimum_of_cubic(rise: Tensor, slope: Tensor, slope_there: Tensor) -> Tensor:
    """Where in (0, 1) the cubic with φ(1) − φ(0) = rise and these slopes at 0 and 1 is least."""
    middle = slope + slope_there - 3 * rise
    root = (middle.square() - slope * slope_there).clamp_min(0.0).sqrt()
    share = 1 - (slope_there + root - middle) / (slope_there - slope + 2 * root)
    # NaN where something is not finite.
    return share.nan_to_num(MOST_CUT).clamp(MOST_CUT, LEAST_CUT)
