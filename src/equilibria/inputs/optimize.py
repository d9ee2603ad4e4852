"""Joint inference and input optimization (JIIO).

Gurumurthy et al., "Joint inference and input optimization in equilibrium networks", NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context.caller import warn_caller
from equilibria.context.context import run_eagerly
from equilibria.context.state import map_state
from equilibria.equilibrium.diagnosis import diagnose
from equilibria.inputs.constraints import Constraint, Region
from equilibria.inputs.engines import get_engine
from equilibria.inputs.engines.base import Engine
from equilibria.inputs.groups import Groups
from equilibria.inputs.input_result import InputResult
from equilibria.inputs.problem import (
    SMALL_RESIDUAL,
    Check,
    FixedInput,
    InputProblem,
    JointLinearization,
    Loss,
    Penalty,
)
from equilibria.inputs.search import Search, SearchResult
from equilibria.inputs.search_settings import SearchSettings
from equilibria.inputs.steps import Steps
from equilibria.registry import check_at_least_one
from equilibria.solvers import ConvergenceWarning, Status
from equilibria.solvers.convergence import final_status

NORMALIZED_SWEEPS, MEASURED_SWEEPS = 1, 3
"""How often z and μ are swept for each step of x, with normalized steps and with others."""

DEFAULTS = SearchSettings()


@run_eagerly
@torch.no_grad()
def optimize_input(
    model: nn.Module,
    loss: Loss,
    x0: Tensor,
    *,
    constraint: Constraint | None = None,
    penalty: Penalty | None = None,
    groups: Tensor | None = None,
    engine: str | Mapping[str, Any] | Engine = "auto",
    iterations: int = 40,
    settings: SearchSettings = DEFAULTS,
) -> InputResult:
    """Minimize loss(model(x)) over x, together with the inference z = T(z; x) and its adjoint μ.

    The iteration is Eq. 11 of the paper: z ← T(z; x), μ ← Jᵀμ + ∂ℓ/∂z, x ← Π(x − α g) with
    g = ∂/∂x (ℓ + μᵀT), all from one evaluation of T with one pull-back. To maximize, as an attack
    does, minimize the negative loss:

        found = optimize_input(
            model, lambda logits: -F.cross_entropy(logits, labels, reduction="none"), images,
            constraint=L2Ball(images, 1.0) & Box(0, 1), settings=SearchSettings(normalize=True),
        )

    The result is the point of lowest true loss that the search saw, unless a problem has converged:
    then it is the point of convergence. The model and x0 are not changed.

    Where the sweeps of a sample diverge, as those of an energy with a curvature above 1 do, every
    engine solves for z by the layer's own solver and for μ by a linear solver. Where the final
    solve does not reach a relative residual of 1e-2, the loss is NaN, the status is DIVERGED, and a
    `ConvergenceWarning` names the remedy. Where an energy is not convex an input may have several
    equilibria: the loss is that of the one that the search followed.

    Args:
        model: A module with a `stem`, a `layer` (an `EquilibriumLayer`) and a `head`. Its samples
            must be independent of each other (no BatchNorm in training mode).
        loss: Function from the outputs to one number per sample, shape (B,).
        x0: Inputs to start from, one row per problem.
        constraint: Set that x must stay in; None leaves x free.
        penalty: Function from x to one number per row of x0, added to the loss (a ridge on latents,
            for example).
        groups: For each sample the row of x0 that it uses; the samples of a group share their x.
            None: sample i uses row i.
        engine: Name of an engine, an engine object, or a mapping with a name and options such as
            `{"name": "official", "task": "mnist"}`. "auto" is "momentum" with normalized steps and
            "secant" with others. "official" is the paper's algorithm (its `task` is "latents",
            "mnist", "cifar10" or "few-shot"), "anderson" the same with safeguards. The baselines
            "gradient", "gradient-warm", "adam" and "adam-warm" solve for z and μ at every step.
        iterations: Largest number of steps of x.
        settings: Step size, tolerances, and what is verified and reported.

    Returns:
        The optimized inputs with their equilibria, adjoints and true losses.

    Raises:
        TypeError: If x0 is no tensor of floating-point numbers, or the model lacks a part.
        ValueError: If the samples of the model depend on each other, or an option is out of range.

    Examples:
        >>> image, box = eq.data.load_digits().test.images[:1], eq.Box(0, 1)
        >>> model = eq.load("digits-opteq")
        >>> found = eq.optimize_input(model, lambda y: y[:, 3], image, constraint=box, iterations=5)
        >>> bool(found.loss < found.initial_loss)  # less of a three
        True
    """
    _check(x0)
    check_at_least_one(iterations=iterations)
    name, chosen = _named_engine(engine, settings)
    with torch.inference_mode(False):
        x0 = x0.detach().clone()
        region = Region.everything(x0) if constraint is None else constraint.region(x0)
        problem = InputProblem(model, loss, x0, region, Groups.of(x0, groups), penalty)
        start = region.project(x0.flatten(1))
        search = _search(problem, chosen, settings, iterations)
        if settings.visit is None:
            search.visit = problem.on(model).layer.is_heard
        tight = settings.tight(problem.dtype)
        if settings.verify:
            first = problem.check(start, None, tolerance=tight)
            found = search.run(start, first.z, iterations)
            final, checked = _best(problem, found, first, tight), torch.ones_like(found.converged)
            initial = first.loss
        else:
            found = search.run(start, None, iterations)
            final, checked = _unchecked(problem, found, tight)
            initial = found.first_loss
        end = _measure(search, found, final, tight, polish=settings.polish)
        return _reported(model, search, found, end, initial=initial, checked=checked, engine=name)


def _named_engine(
    choice: str | Mapping[str, Any] | Engine, settings: SearchSettings
) -> tuple[str, Engine]:
    """Return an engine, and the name that results give it."""
    if isinstance(choice, Engine):
        return choice.name, choice
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    if options.get("name") == "auto":
        options["name"] = "momentum" if settings.normalize else "secant"
    engine = get_engine(options)
    return str(options["name"]), engine


def _search(
    problem: InputProblem, engine: Engine, settings: SearchSettings, iterations: int
) -> Search:
    steps = Steps(
        region=problem.region,
        step_size=engine.alpha_x if settings.step_size is None else settings.step_size,
        normalize=settings.normalize,
        rule=engine.rule,
        decay=engine.decay,
        late_factor=engine.late_factor,
        share=engine.share,
        iterations=iterations,
    )
    # A step on a ball is short and may lag; one that measures curvature must be exact.
    usual = NORMALIZED_SWEEPS if settings.normalize else MEASURED_SWEEPS
    return Search(
        problem,
        engine,
        steps,
        sweeps=engine.sweeps or settings.sweeps or usual,
        tolerance=settings.tolerance,
        solve_tolerance=settings.solve_tolerance(problem.dtype),
        visit=bool(settings.visit),
    )


@dataclass(frozen=True)
class _Measured:
    """The point that a search returns, with its adjoint and residuals; one entry per problem."""

    x: Tensor
    z: Tensor
    mu: Tensor
    loss: Tensor
    residuals: tuple[Tensor, Tensor, Tensor]
    """Of z, μ and x."""
    solve_residual: Tensor
    """Residual of the solve for z; infinite where nothing was solved."""
    evaluations: int
    """Calls of T in the search, without those that measure the result."""


def _measure(
    search: Search, found: SearchResult, final: Check, tight: float, *, polish: bool
) -> _Measured:
    """Evaluate the loss, the adjoint and the residuals at the point that is returned."""
    problem, groups = search.problem, search.problem.groups
    evaluations = problem.evaluations
    linear = JointLinearization(FixedInput(problem, final.x, found.scale), final.z)
    mu, adjoint_residual = found.last.mu, torch.full_like(final.residual, torch.inf)
    if polish:
        # Where the search has left something that is no number, μ starts at zero.
        usable = torch.isfinite(mu).all(dim=1, keepdim=True)
        polished = linear.solve_adjoint(torch.where(usable, mu, 0.0), tolerance=tight)
        mu, adjoint_residual = polished.value, groups.largest(polished.residual)
    evaluation = linear.evaluation(mu)
    input_residual = search.steps.residual(final.x, evaluation.gradient, found.scale)

    def known(solve: Tensor, measured: Tensor) -> Tensor:
        # Where T expands, the solves know better than one more evaluation in these numbers.
        return torch.where(found.steep, torch.minimum(solve, measured), measured)

    return _Measured(
        x=final.x,
        z=final.z,
        mu=mu,
        loss=evaluation.loss,
        residuals=(
            known(final.residual, evaluation.state_residual),
            known(adjoint_residual, evaluation.adjoint_residual),
            input_residual.nan_to_num(nan=torch.inf),
        ),
        solve_residual=final.residual,
        evaluations=evaluations,
    )


def _reported(
    model: nn.Module,
    search: Search,
    found: SearchResult,
    end: _Measured,
    *,
    initial: Tensor,
    checked: Tensor,
    engine: str,
) -> InputResult:
    """Return the result in the shapes of the inputs; warn where an equilibrium was not found.

    Args:
        model: The model that was searched.
        search: The search.
        found: Where it ended.
        end: The point that is returned.
        initial: Losses at the start.
        checked: Problems whose z was solved for at `end`, as a mask.
        engine: Name of the engine.
    """
    problem, packing = search.problem, search.problem.packing
    unsolved = checked & ~(end.solve_residual <= SMALL_RESIDUAL)
    loss = torch.where(unsolved, torch.nan, end.loss)
    # z and μ are fresher than those the search stopped at: its verdict gets some leeway.
    limit = torch.where(found.converged, 10 * search.tolerance, search.tolerance)
    settled = torch.stack(end.residuals).amax(dim=0) <= limit
    sound = (found.status != int(Status.DIVERGED)) & torch.isfinite(loss)
    scale = problem.groups.to_samples(found.scale)[:, None]
    seen = found.visited
    result = InputResult(
        x=end.x.reshape(problem.input_shape),
        state=packing.unpack(end.z),
        adjoint=packing.unpack(end.mu / scale),
        loss=loss,
        initial_loss=initial,
        status=final_status(settled, sound),
        state_residual=end.residuals[0],
        adjoint_residual=end.residuals[1],
        input_residual=end.residuals[2],
        iterations=found.iterations,
        evaluations=end.evaluations,
        vjps=problem.vjps,
        check_evaluations=problem.check_evaluations,
        engine=engine,
        tolerance=search.tolerance,
        problem=problem.on(model),
        visited=None
        if seen is None
        else (seen.x.reshape(problem.input_shape), packing.unpack(seen.z)),
    )
    # Where x itself is not finite, the status and its message say enough.
    lost = unsolved & torch.isfinite(end.x).all(dim=1)
    if bool(lost.any()):
        result = replace(result, remedy=_remedy(problem, result, lost))
        warn_caller(result.summary(), ConvergenceWarning)
    return result


def _best(problem: InputProblem, found: SearchResult, first: Check, tight: float) -> Check:
    """Return the x of lowest true loss among the start and the candidates of the engine."""
    chosen, loss = first, first.loss.nan_to_num(nan=torch.inf)
    for candidate in found.candidates:
        # The layer's own equilibrium, where there may be several and sweeps followed none.
        other = problem.check(candidate, found.last.z, tolerance=tight, afresh=found.steep)
        sound = other.residual <= max(tight, 1e-3)
        better = sound & torch.isfinite(other.loss) & ((other.loss < loss) | found.converged)
        chosen = other.where(better, chosen, problem.groups)
        loss = torch.where(better, other.loss, loss)
    return chosen


def _unchecked(problem: InputProblem, found: SearchResult, tight: float) -> tuple[Check, Tensor]:
    """Return the point that the engine ends with, and a mask of the problems solved anew there.

    These are the problems whose sweeps diverge: their z was solved for before the last step of x.
    """
    x, z = found.unchecked
    final = Check(x, z, found.first_loss, torch.full_like(found.first_loss, torch.inf))
    if bool(found.steep.any()):
        solved = problem.check(x, z, tolerance=tight, afresh=found.steep)
        final = solved.where(found.steep, final, problem.groups)
    return final, found.steep


def _remedy(problem: InputProblem, result: InputResult, lost: Tensor) -> str:
    """Return what to do about the problems `lost`, whose equilibria were not found."""
    rows = problem.groups.to_samples(lost).nonzero().squeeze(1)
    state = map_state(lambda tensor: tensor[rows], result.state)
    advice = diagnose(problem.layer.cell, state, problem.inject(result.x).keep(rows))
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
