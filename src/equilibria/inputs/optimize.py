"""Joint inference and input optimization (JIIO).

Gurumurthy et al., "Joint inference and input optimization in equilibrium networks", NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context import State, map_state, run_eagerly, warn_caller
from equilibria.equilibrium import capabilities
from equilibria.inputs.constraints import Constraint, Region
from equilibria.inputs.engines import Engine, get_engine
from equilibria.inputs.groups import Groups
from equilibria.inputs.problem import (
    SMALL_RESIDUAL,
    Check,
    FixedInput,
    InputProblem,
    Linearization,
    Loss,
    Penalty,
)
from equilibria.inputs.search import Search, SearchResult
from equilibria.inputs.steps import Steps
from equilibria.registry import check_at_least_one, check_positive, check_tolerances
from equilibria.solvers import ConvergenceWarning, Status
from equilibria.solvers.convergence import final_status
from equilibria.solvers.solution import describe

NORMALIZED_SWEEPS, MEASURED_SWEEPS = 1, 3
"""How often z and μ are swept for each step of x, with normalized steps and with others."""

SOLVED_SHARE, LOOSEST_SOLVE = 0.1, 1e-3
"""Tolerance of the solves for z and μ where sweeps diverge: as a share of that of the search, and
at most."""


@dataclass(frozen=True)
class InputResult:
    """Optimized inputs with their equilibria, adjoints and true losses.

    Per-problem tensors have one entry per row of x0. The losses are those at equilibria that were
    solved anew, tightly, at the inputs themselves.

    Examples:
        >>> model, image = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> found = eq.optimize_input(model, lambda y: y[:, 3], image, iterations=5)
        >>> found.x.shape, found.iterations
        (torch.Size([1, 1, 8, 8]), tensor([5]))
    """

    x: Tensor
    """The inputs: feasible to the last bit."""
    state: State
    """z*, the equilibrium at x."""
    adjoint: State
    """μ = (I − Jᵀ)⁻¹ ∂ℓ/∂z at x (the raw one of the search where `polish=False`)."""
    loss: Tensor
    """ℓ at the equilibrium of x; NaN where that was not found."""
    initial_loss: Tensor
    """ℓ at the equilibrium of x0; NaN where that was not found."""
    status: Tensor
    state_residual: Tensor
    """‖T(z; x) − z‖/‖T(z; x)‖, or that of the solve for z if it is smaller."""
    adjoint_residual: Tensor
    """‖Jᵀμ + ∂ℓ/∂z − μ‖/‖Jᵀμ + ∂ℓ/∂z‖, or that of the solve for μ if it is smaller."""
    input_residual: Tensor
    """‖x − Π(x − α d)‖, a step of x, relative to the size of the constraint (or of x0)."""
    iterations: Tensor
    evaluations: int
    """Calls of T in the search, each for the whole batch."""
    vjps: int
    """Pull-backs through T in the search and for μ."""
    check_evaluations: int
    """Calls of T for the true losses before and after."""
    engine: str
    tolerance: float
    problem: InputProblem = field(repr=False)
    visited: tuple[Tensor, State] | None = None
    """One of the pairs (x, z) along the way, each as likely, where `visit` asked for it."""
    remedy: str = ""
    """What to do where an equilibrium was not found, so that there is no loss."""

    @property
    def converged(self) -> Tensor:
        return self.status == int(Status.CONVERGED)

    @property
    def residual(self) -> Tensor:
        """The largest of the three residuals of each problem."""
        kinds = (self.state_residual, self.adjoint_residual, self.input_residual)
        return torch.stack(kinds).amax(dim=0)

    def report_visited(self, model: nn.Module | None = None) -> None:
        """Tell `solving` blocks of the pair (x, z) that was visited: the Jacobian is penalized
        there (Eq. 27).

        model: whose parameters it is to reach; the one that was searched if not given.
        """
        if self.visited is not None:
            x, state = self.visited
            problem = self.problem if model is None else self.problem.on(model)
            problem.layer.report_visited(lambda: problem.cell_inputs(x), state)

    @torch.no_grad()
    def outputs(self) -> Tensor:
        """What the model says at the equilibria of the result; nothing is solved anew."""
        problem = self.problem
        context = problem.inject(self.x)
        outputs: Tensor = problem.head(problem.layer.cell.output(self.state, context))
        return outputs

    def message(self, problem: int) -> str:
        """A sentence on how one problem ended, with the remedy."""
        status, count = Status(int(self.status[problem])), int(self.iterations[problem])
        unsolved = not float(self.state_residual[problem]) <= SMALL_RESIDUAL
        if self.remedy and unsolved and bool(self.loss[problem].isnan()):
            return (
                "its equilibrium was not found: the solve at x ended at a relative residual of "
                f"{float(self.state_residual[problem]):.1e}, so its loss is NaN; {self.remedy}"
            )
        if status is Status.DIVERGED:
            return (
                f"diverged after {count} iterations: x0 or the loss there is NaN or Inf, or a step "
                "left the region where the model is defined; check x0 and what the loss is made "
                "of, lower step_size or add a constraint"
            )
        return describe(
            status,
            residual=float(self.residual[problem]),
            iterations=count,
            tolerance=self.tolerance,
            epsilon=torch.finfo(self.x.dtype).eps,
            remedy="raise iterations or the tolerance, or lower step_size",
        )

    def summary(self) -> str:
        """One line on all problems, with the remedy for the worst of them."""
        total, done = self.status.numel(), int(self.converged.sum())
        worst = int(torch.argmax(self.status))
        tail = "" if done == total else f"; problem {worst}: {self.message(worst)}"
        return (
            f"{done} of {total} inputs converged ({self.engine}); mean loss "
            f"{float(self.initial_loss.nanmean()):.4g} → {float(self.loss.nanmean()):.4g} in "
            f"{self.evaluations} evaluations of the map and {self.vjps} pull-backs{tail}"
        )


@run_eagerly
@torch.no_grad()
def optimize_input(
    model: nn.Module,
    loss: Loss,
    x0: Tensor,
    *,
    constraint: Constraint | None = None,
    penalty: Penalty | None = None,
    engine: str | Engine = "auto",
    engine_options: Mapping[str, Any] | None = None,
    groups: Tensor | None = None,
    sweeps: int | None = None,
    iterations: int = 40,
    step_size: float | None = None,
    normalize: bool = False,
    tolerance: float = 1e-4,
    polish: bool = True,
    verify: bool = True,
    check_tolerance: float | None = None,
    visit: bool | None = None,
) -> InputResult:
    """Minimize loss(model(x)) over x, together with the inference z = T(z; x) and its adjoint μ.

    The iteration is Eq. 11 of the paper: z ← T(z; x), μ ← Jᵀμ + ∂ℓ/∂z, x ← Π(x − α g) with
    g = ∂/∂x (ℓ + μᵀT), all from one evaluation of T with one pull-back. A maximization, such as an
    attack, minimizes the negative loss:

        found = optimize_input(
            model, lambda logits: -F.cross_entropy(logits, labels, reduction="none"), images,
            constraint=L2Ball(images, 1.0) & Box(0, 1), normalize=True,
        )

    model: a module with a `stem`, a `layer` (an `EquilibriumLayer`) and a `head`; samples must be
        independent of each other (no BatchNorm in training mode).
    loss: from the outputs to one number a sample, shape (B,).
    penalty: from x to one number a row of x0, added to the loss (a ridge on latents, say).
    engine: "auto" is "momentum" for normalized steps, which suit a constraint, and "secant" for
        others. "official" is the paper's algorithm with its settings (those of attacks and few-shot
        learning by `engine_options={"task": "mnist"}`, "cifar10" or "few-shot"), "anderson" one
        with safeguards. The baselines "gradient", "gradient-warm", "adam" and "adam-warm" solve for
        z and μ at every step. `engine_options` go to the engine.
    groups: the row of x0 that each sample uses; the samples of a group share their x.
    sweeps: updates of (z, μ) for each step of x; by default 1 with `normalize` and 3 without.
    step_size: α. With `normalize` the length of the first step, by default 8 times the ball's
        radius, which falls to a twentieth; otherwise a factor of the gradient. By default (without
        a step size) "secant" takes quasi-Newton steps where nothing constrains x, and all other
        cases take one over the curvature seen so far, which makes the result independent of the
        loss's unit. Adam's learning rate.
    normalize: divide the gradient by its 2-norm. Right for attacks, where the optimum is on the
        ball; wrong for an optimum inside, which it can only circle.
    tolerance: of the relative residuals of z, μ and x at which a problem has converged.
    polish: solve for μ at the result, which Eq. 19 needs; otherwise μ is that of the search.
    verify: solve tightly at the start and at the end, report true losses, and never return what is
        worse than the start. False leaves that out, where only x matters and time does: the result
        is then the last x ("official": the one of the least loss), and its losses are those at
        the z of the search.
    check_tolerance: of the solves for the true losses; by default 1e-6, or 1e-10 in float64.
    visit: keep one of the iterates (x, z), drawn by torch's own generator, as `visited`; None: if a
        `solving` block around records equilibria of the model.

    Among what the search saw, the result is the point of lowest true loss, unless a problem has
    converged: then it is that point. x0 and the model are left as they are.

    Where the sweeps of a sample diverge, as those of an energy with a curvature above 1 do, every
    engine solves for its z by the layer's own solver and for its μ by a linear solver. Where the
    final solve does not reach a relative residual of 1e-2, the loss is NaN, the status is DIVERGED,
    and a `ConvergenceWarning` names the remedy. Where an energy is not convex an input may have
    several equilibria: the loss is that of the one that the search followed.

    Examples:
        >>> image, box = eq.data.load_digits().test.images[:1], eq.Box(0, 1)
        >>> model = eq.load("digits-opteq")
        >>> found = eq.optimize_input(model, lambda y: y[:, 3], image, constraint=box, iterations=5)
        >>> bool(found.loss < found.initial_loss)  # less of a three
        True
    """
    _check(x0)
    check_at_least_one(sweeps=sweeps, iterations=iterations)
    check_positive(step_size=step_size)
    check_tolerances(tolerance=tolerance, check_tolerance=check_tolerance)
    if engine == "auto":
        engine = "momentum" if normalize else "secant"
    chosen = get_engine(engine, **dict(engine_options or {}))
    with torch.inference_mode(False):
        x0 = x0.detach().clone()
        region = Region.everything(x0) if constraint is None else constraint.region(x0)
        problem = InputProblem(model, loss, x0, region, Groups.of(x0, groups), penalty)
        start = region.project(x0.flatten(1))
        tight = check_tolerance or (1e-10 if problem.dtype == torch.float64 else 1e-6)
        solve = max(min(SOLVED_SHARE * tolerance, LOOSEST_SOLVE), tight)
        steps = Steps(
            region=region,
            step_size=chosen.alpha_x if step_size is None else step_size,
            normalize=normalize,
            rule=chosen.rule,
            decay=chosen.decay,
            late_factor=chosen.late_factor,
            share=chosen.share,
            iterations=iterations,
        )
        # A step on a ball is short and may lag; one that measures curvature must be exact.
        usual = NORMALIZED_SWEEPS if normalize else MEASURED_SWEEPS
        search = Search(problem, chosen, steps, chosen.sweeps or sweeps or usual, tolerance, solve)
        search.visit = problem.on(model).layer.is_heard if visit is None else visit
        if verify:
            first = problem.check(start, None, tolerance=tight)
            found = search.run(start, first.z, iterations)
            final = _best(problem, found, first, tight, cheapest=chosen.cheapest)
            initial, checked = first.loss, torch.ones_like(found.converged)
        else:
            found = search.run(start, None, iterations)
            final, checked = _last(problem, found, tight, cheapest=chosen.cheapest)
            initial = found.first_loss
        x, z = final.x, final.z
        evaluations = problem.evaluations
        here, mu = Linearization(FixedInput(problem, x, found.scale), z), found.last.mu
        adjoint_residual = torch.full_like(final.residual, torch.inf)
        if polish:
            # Where the search has left something that is no number, μ starts at zero.
            usable = torch.isfinite(mu).all(dim=1, keepdim=True)
            polished = here.solve_adjoint(torch.where(usable, mu, 0.0), tolerance=tight)
            mu, adjoint_residual = polished.value, problem.groups.largest(polished.residual)
        evaluation = here.evaluation(mu)
        input_residual = steps.residual(x, evaluation.gradient, found.scale)
        # Where T expands, the solves know better than one more evaluation in these numbers.
        solves = (final.residual, adjoint_residual)
        measured = (evaluation.state_residual, evaluation.adjoint_residual)
        residuals = (
            *(
                torch.where(found.steep, torch.minimum(solve, own), own)
                for solve, own in zip(solves, measured, strict=True)
            ),
            input_residual.nan_to_num(nan=torch.inf),
        )
        unsolved = checked & ~(final.residual <= SMALL_RESIDUAL)
        loss_there = torch.where(unsolved, torch.nan, evaluation.loss)
        # z and μ are fresher than those the search stopped at: its verdict gets some leeway.
        limit = torch.where(found.converged, 10 * tolerance, tolerance)
        settled = torch.stack(residuals).amax(dim=0) <= limit
        sound = (found.status != int(Status.DIVERGED)) & torch.isfinite(loss_there)
        scale = problem.groups.to_samples(found.scale)[:, None]
        seen = found.visited
        result = InputResult(
            x=x.reshape(problem.input_shape),
            state=problem.packing.unpack(z),
            adjoint=problem.packing.unpack(mu / scale),
            loss=loss_there,
            initial_loss=initial,
            status=final_status(settled, sound),
            state_residual=residuals[0],
            adjoint_residual=residuals[1],
            input_residual=residuals[2],
            iterations=found.iterations,
            evaluations=evaluations,
            vjps=problem.vjps,
            check_evaluations=problem.check_evaluations,
            engine=engine if isinstance(engine, str) else chosen.name,
            tolerance=tolerance,
            problem=problem.on(model),
            visited=None
            if seen is None
            else (seen.x.reshape(problem.input_shape), problem.packing.unpack(seen.z)),
        )
        # Where x itself is not finite, the status and its message say enough.
        lost = unsolved & torch.isfinite(x).all(dim=1)
        if bool(lost.any()):
            result = replace(result, remedy=_remedy(problem, result, lost))
            warn_caller(result.summary(), ConvergenceWarning)
    return result


def _best(
    problem: InputProblem,
    found: SearchResult,
    first: Check,
    tight: float,
    *,
    cheapest: bool,
) -> Check:
    """Return the x of lowest true loss among start, best iterate and last one.

    cheapest: the best iterate is all that the engine offers.
    """
    chosen, loss = first, first.loss.nan_to_num(nan=torch.inf)
    done = found.converged
    best = torch.where(done[:, None], found.last.x, found.best_x)
    candidates = [best]
    if not cheapest and not bool((found.last.x == best).all()):
        candidates.append(torch.where(done[:, None], best, found.last.x))
    for candidate in candidates:
        # The layer's own equilibrium, where there may be several and sweeps followed none.
        other = problem.check(candidate, found.last.z, tolerance=tight, afresh=found.steep)
        sound = other.residual <= max(tight, 1e-3)
        better = sound & torch.isfinite(other.loss) & ((other.loss < loss) | done)
        chosen = other.where(better, chosen, problem.groups)
        loss = torch.where(better, other.loss, loss)
    return chosen


def _last(
    problem: InputProblem, found: SearchResult, tight: float, *, cheapest: bool
) -> tuple[Check, Tensor]:
    """Return the x that the search ended at, with the z of the search, and which were solved anew.

    These are the problems whose sweeps diverge: their z was solved for before the last step of x.
    """
    x, z = (found.best_x, found.best_z) if cheapest else (found.last.x, found.last.z)
    final = Check(x, z, found.first_loss, torch.full_like(found.first_loss, torch.inf))
    if bool(found.steep.any()):
        solved = problem.check(x, z, tolerance=tight, afresh=found.steep)
        final = solved.where(found.steep, final, problem.groups)
    return final, found.steep


def _remedy(problem: InputProblem, result: InputResult, lost: Tensor) -> str:
    """Return what the cell advises where the equilibria of these problems were not found."""
    rows = problem.groups.to_samples(lost).nonzero().squeeze(1)
    state = map_state(lambda tensor: tensor[rows], result.state)
    context = problem.inject(result.x).keep(rows)
    advice = capabilities.diagnosis(problem.layer.cell, state, context)
    return advice or (
        "choose another solver of the layer, raise its max_iterations, or bound the norm of W "
        "(norm='bound')"
    )


def _check(x0: object) -> None:
    if not isinstance(x0, Tensor) or not x0.is_floating_point():
        raise TypeError("x0 must be a tensor of floating-point numbers")
    if x0.dim() < 2 or len(x0) == 0:
        raise ValueError(
            f"x0 must have one row a problem and at least one row, not shape {tuple(x0.shape)}"
        )
