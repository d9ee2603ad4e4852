"""Descent on the hidden objective, which converges even if the fixed-point map does not."""

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
"""Step sizes that a Newton step tries before a gradient step."""
SUFFICIENT_DECREASE = 1e-4
"""Smallest decrease by a Newton step, as a share of the decrease that the slope predicts."""
SUFFICIENT_GRADIENT_DECREASE = 0.1
"""Smallest decrease by a gradient step of length s, in units of ‖y⁺ − y‖²/s."""
MIN_MAP_LENGTH = 0.5
"""Length of a gradient step below which the curvature is too large for the map to contract."""
NOISE = 4.0
"""Rounding error of the objective, in units of the machine epsilon times the size of its terms."""
PATIENCE = 30
"""Number of consecutive steps without progress after which a descent ends."""
PROGRESS, MIN_DECREASE = 0.9, 1e-3
"""A step makes progress if the distance to a stationary point falls to this share, or G falls by
this share of its decrease since the start."""
QUASI_NEWTON_BUDGET = 200
"""Number of evaluations before Newton steps, which work at any condition number."""
MAX_PAIR_BYTES = 2**30
"""Largest memory for quasi-Newton pairs in bytes; larger problems use Newton steps only."""
MIN_STEP_SIZE = 1e-3
"""Smallest step size of a quasi-Newton step before a gradient step replaces it."""
MAX_CUT, MIN_CUT = 0.66, 0.1
"""Largest and smallest factor by which a failed quasi-Newton step is shortened."""
LOOSEST_FORCING, TIGHTEST_FORCING = 0.1, 1e-8
"""Largest and smallest relative residual of the linear solve of a Newton step."""


@dataclass
class DescentMemory(Memory):
    """Per-row state of a descent."""

    length: Tensor
    """Length of the next gradient step."""
    forcing: Tensor
    """Relative residual of the next Newton system (Eisenstat and Walker, 1996)."""
    settled: Tensor
    """Whether the last Newton step was a full step; no gradient step is needed then."""
    first: Tensor
    """G at the start."""
    lowest: Tensor
    """G at the last step with progress."""
    nearest: Tensor
    """‖σ(d) − y‖ at the last step with progress."""
    idle: Tensor
    """Number of steps since the last progress."""
    share: Tensor
    """Step size of the next quasi-Newton step; 0 requests a gradient step."""
    quasi: Tensor
    """Whether the next step is a quasi-Newton step."""


@dataclass(frozen=True, kw_only=True)
class Descent(Minimizer):
    """Newton's method on the hidden objective, safeguarded by proximal gradient steps.

    The first two hundred evaluations are a quasi-Newton method: Newton steps with a BFGS
    approximation of ∇²E (`Pairs`), shortened by cubic interpolation.

    A point is stationary if a = d(σ(a)), d = −∇E. With S = σ′(a), a Newton step solves
    (I + ∇²E S) w = d − a by conjugate gradients in ⟨·,·⟩_S, with products with ∇²E by autograd, and
    shortens w until G falls by enough. Unless the last Newton step was a full step, a proximal
    gradient step y ← prox_{sf}(y − s(y − d)) precedes it, with s found by backtracking on G. A
    sufficiently short gradient step always lowers G and identifies the active units. So every
    convex energy is minimized, whether or not the plain map contracts. With other energies the
    solve ends at a stationary point, or with `Status.STALLED` at a kink of the objective.

    Float32 is converted to float64, because at large curvature its rounding would hide the minimum.

    Args:
        max_iterations: Largest number of gradients and Hessian products per sample.
        tolerance, stop, check_minimum: See `Method`.

    Examples:
        >>> @eq.energy_term
        ... def steep(y, x):  # the plain iteration y = x − 50y would diverge
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
                "Descent needs a hidden objective, but this map has none; use the solver 'auto' or "
                "'anderson'"
            )
        warmed_up, start, warm_up = self.warm_up(problem)
        lifted = warmed_up.lifted()
        try:
            run = _DescentRun(self, lifted, start, trace or problem.trace, visited)
        except RuntimeError:
            if lifted is warmed_up:
                raise
            # An energy with constants of another type cannot take a state in float64.
            lifted = warmed_up
            run = _DescentRun(self, lifted, start, trace or problem.trace, visited)
        while len(run.rows):
            run.observe()
            if len(run.rows):
                run.advance()
        run.apply_map(lifted)
        return run.solution(warmed_up, warm_up)


class _DescentRun:
    """One solve: the state of running rows, and the results of finished ones."""

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
            forcing=LOOSEST_FORCING * ones,
            settled=torch.ones_like(self.rows, dtype=torch.bool),
            first=torch.inf * ones,
            lowest=torch.inf * ones,
            nearest=torch.inf * ones,
            idle=torch.zeros_like(self.rows),
            share=ones.clone(),
            quasi=torch.full_like(
                self.rows,
                2 * PAIRS * y.numel() * y.element_size() <= MAX_PAIR_BYTES,
                dtype=torch.bool,
            ),
        )
        self.may_contract = torch.zeros_like(self.pace.quasi)
        """Rows whose steps were so long that the plain map may contract."""
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
        """Store the result of each row and remove finished rows."""
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
        self.may_contract[rows] = self.pace.length >= MIN_MAP_LENGTH
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
        """Try one quasi-Newton step in the rows that use them; later, take Newton steps."""
        quasi = self.pace.quasi.nonzero().squeeze(1)
        if len(quasi) and self.pairs is not None:
            self._quasi_newton_step(quasi, self.pairs)
            self.pace.quasi = self.pace.quasi & (self.objective.spent < QUASI_NEWTON_BUDGET)
        else:
            self.pairs = None
            self._newton_step()

    def _quasi_newton_step(self, rows: Tensor, pairs: Pairs) -> None:
        """Try one quasi-Newton step in these rows, or take a gradient step where one is due."""
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
        # Inactive units stay inactive in a shorter step: they may be why the full step failed.
        shortened = (share < 1)[:, None] & (weight == 0)
        path = share[:, None] * torch.where(shortened, 0.0, direction)
        trial = self.objective.evaluate(here.a + path, rows)
        slope = -torch.linalg.vecdot(weight * here.gap, path)
        steepness = -torch.linalg.vecdot(
            self.objective.activation.derivative(trial.a) * trial.gap, path
        )
        # A convex function that still decreases at the trial point has decreased all the way.
        falling = here.value.isnan() & (steepness <= 0) & torch.isfinite(trial.value)
        at = self._valued(at, rows[~falling])
        here.value = at.value[rows]
        good = falling | self._good(here, trial, slope, self._noise(at)[rows])
        shorter = share * _minimum_of_cubic(trial.value - here.value, slope, steepness)
        shorter = torch.where(shorter > MIN_STEP_SIZE, shorter, 0.0)
        pace.share[rows] = torch.where(good, 1.0, shorter)
        pace.length[rows] = length.clamp(SHORTEST, 1.0)
        pairs.forget(rows[~good & (shorter == 0)])
        taken = good.nonzero().squeeze(1)
        trial = trial.keep(taken)
        pairs.add(rows[taken], *here.keep(taken).step_to(trial))
        self.point = at.with_rows(rows[taken], trial)

    def _good(self, at: Point, trial: Point, predicted: Tensor, noise: Tensor) -> Tensor:
        """Return whether a trial lowers G by a sufficient share of the predicted decrease."""
        lower = trial.value <= at.value + SUFFICIENT_DECREASE * predicted
        # Near the minimum, rounding hides the decrease of G, so the residual decides.
        level = trial.value <= at.value + noise
        closer = self.objective.distance(trial) <= PROGRESS * self.objective.distance(at)
        return lower | (level & closer)

    def _newton_step(self) -> None:
        """Take a Newton step in every row, after a gradient step where one is needed."""
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
            if share < 1:  # inactive units stay inactive: they may be why the full step failed
                direction = torch.where(weight == 0, 0.0, direction)
            trial = self.objective.evaluate(at.a[pending] + share * direction[pending], pending)
            good = self._good(
                at.keep(pending), trial, share * slope[pending], self._noise(at)[pending]
            )
            taken[pending[good]] = True
            pace.settled[pending[good]] = share == 1
            new = new.with_rows(pending[good], trial.keep(good.nonzero().squeeze(1)))
            pending = pending[~good]
        # The next linear solve is as precise as the quadratic model was, or ten times more precise
        # if no step was accepted.
        progress = (row_norms(new.gap) / before).square()
        forcing = torch.where(taken, progress.clamp_max(LOOSEST_FORCING), pace.forcing / 10)
        pace.forcing = forcing.clamp_min(TIGHTEST_FORCING)
        self.point = new

    def apply_map(self, problem: FixedPointProblem) -> None:
        """Replace the state by T(y), as other solvers do, unless its residual is larger.

        Rows with short gradient steps are skipped: the curvature is above 1, so the map expands.
        """
        y = self.result.state
        assert isinstance(y, Tensor)
        rows = self.may_contract.nonzero().squeeze(1)
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

    def solution(self, problem: FixedPointProblem, warm_up: int) -> Solution:
        """Return the result in the data type and context of `problem`."""
        result = self.result
        assert isinstance(result.state, Tensor)
        dtype = problem.buffer_dtype
        trace = None
        if self.traced is not None:
            states = None if self.states is None else [problem.unpack(s) for s in self.states]
            trace = Trace(torch.stack(self.traced).to(dtype), states)
        return replace(
            result,
            state=problem.unpack(result.state.to(dtype)),
            residual=result.residual.to(dtype),
            absolute_residual=result.absolute_residual.to(dtype),
            iterations=result.iterations + warm_up,
            evaluations=self.objective.calls + warm_up,
            sample_evaluations=self.objective.sample_calls + warm_up * len(result.status),
            epsilon=problem.epsilon,
            context=problem.context,
            trace=trace,
        )

    def _stalled(self) -> Tensor:
        """Return the rows that make no more progress, because of a kink or of rounding."""
        pace, value, distance = self.pace, self.point.value, self.objective.distance(self.point)
        enough = torch.maximum(self._noise(self.point), MIN_DECREASE * (pace.first - value))
        fell = value < pace.lowest - enough
        progress = fell | (distance < PROGRESS * pace.nearest)
        pace.lowest = torch.where(progress, torch.minimum(value, pace.lowest), pace.lowest)
        pace.nearest = torch.where(progress, torch.minimum(distance, pace.nearest), pace.nearest)
        # Rows with Newton steps wait until no row takes quasi-Newton steps.
        moved = pace.quasi | ~pace.quasi.any()
        pace.idle = torch.where(progress, 0, pace.idle + moved.to(pace.idle.dtype))
        stalled = (pace.idle >= PATIENCE) | (pace.length < SHORTEST)
        # Newton steps may make progress where quasi-Newton steps do not.
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
        """Return the point after a step from the best of the visited points.

        The visited points, at which G is unknown, provide the first quasi-Newton pairs.
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
        """Return y and T(y) for the start y, or for y = 0 where its energy is not finite."""
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
        """Return the point with G evaluated in these rows."""
        unknown = rows[at.value[rows].isnan()]
        if not len(unknown):
            return at
        return at.with_rows(unknown, self.objective.evaluate(at.a[unknown], unknown))

    def _noise(self, at: Point) -> Tensor:
        """Return a bound on the rounding error of G: of its terms, and by cancellation inside E.

        The curvature of E is about 1/s, with s from backtracking.
        """
        size = at.size + at.y.square().sum(dim=1) / self.pace.length
        return NOISE * torch.finfo(at.y.dtype).eps * size

    def _gradient_step(self, at: Point, rows: Tensor) -> Point:
        """Return prox_{sf}(y − s(y − d)) in these rows; shortens s until G falls by enough."""
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
            decrease = SUFFICIENT_GRADIENT_DECREASE * (trial.y - y).square().sum(dim=1) / s
            enough = trial.value <= at.value[pending] - decrease + self._noise(at)[pending]
            good = enough | (s < SHORTEST)
            length[pending] = torch.where(
                enough, (2 * s).clamp_max(1.0), torch.where(good, s, s / 4)
            )
            new = new.with_rows(pending[good], trial.keep(good.nonzero().squeeze(1)))
            pending = pending[~good]
        return new


def _minimum_of_cubic(rise: Tensor, slope: Tensor, end_slope: Tensor) -> Tensor:
    """Return the minimizer in (0, 1) of the cubic φ with φ(1) − φ(0) = rise and these slopes."""
    middle = slope + end_slope - 3 * rise
    root = (middle.square() - slope * end_slope).clamp_min(0.0).sqrt()
    share = 1 - (end_slope + root - middle) / (end_slope - slope + 2 * root)
    # NaN if an input is not finite.
    return share.nan_to_num(MIN_CUT).clamp(MIN_CUT, MAX_CUT)
