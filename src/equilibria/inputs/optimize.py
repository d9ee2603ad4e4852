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
"""Default number of sweeps of z and μ per step of x, with normalized steps and with others."""

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
    """Minimize loss(model(x)) over x, together with the equilibrium z = T(z; x) and its adjoint μ.

    The iteration is Eq. 11 of JIIO: z ← T(z; x), μ ← Jᵀμ + ∂ℓ/∂z, x ← Π(x − α g) with the loss ℓ, J
    = ∂T/∂z, the projection Π to the constraint, step size α and g = ∂/∂x (ℓ + μᵀT), all from one
    evaluation of T with one pull-back. To maximize a loss, as an attack does, minimize its
    negative:

        result = optimize_input(
            model, lambda logits: -F.cross_entropy(logits, labels, reduction="none"), images,
            constraint=L2Ball(images, 1.0) & Box(0, 1), settings=SearchSettings(normalize=True),
        )

    If a problem converges, the result is its last iterate, otherwise the iterate with the lowest
    true loss. The model and x0 are not changed.

    If the sweeps of a problem diverge, for example for an energy with curvature above 1, every
    engine uses the layer's solver for z and a linear solver for μ. If the final solve does not
    reach a relative residual of 1e-2, the loss is NaN, the status is DIVERGED, and a
    `ConvergenceWarning` states the remedy. For an energy that is not convex, an input may have
    several equilibria; the loss is that of the equilibrium that the search followed.

    Args:
        model: A module with a `stem`, a `layer` (an `EquilibriumLayer`) and a `head`. Its samples
            must be independent of each other (no BatchNorm in training mode).
        loss: Function from the outputs to one number per sample, shape (B,).
        x0: Inputs to start from, one row per problem.
        constraint: Set that x must stay in; None for no constraint.
        penalty: Function from x to one number per row of x0, added to the loss, such as a ridge on
            latents.
        groups: Index of the row of x0 that each sample uses, shape (B,). Samples with the same
            index share their x. By default sample i uses row i.
        engine: Name of an engine, an engine object, or a mapping with a name and options such as
            `{"name": "official", "task": "mnist"}`. "auto" is "momentum" with normalized steps and
            "secant" otherwise. "official" is the paper's algorithm, whose `task` is "latents",
            "mnist", "cifar10" or "few-shot"; "anderson" adds safeguards to it. The baselines
            "gradient", "gradient-warm", "adam" and "adam-warm" solve for z and μ at every step.
        iterations: Largest number of steps of x.
        settings: Step size, tolerances, and what is verified and reported.

    Returns:
        The optimized inputs with their equilibria, adjoints and true losses.

    Raises:
        TypeError: If x0 is not a floating-point tensor, or the model lacks a stem, layer or head.
        ValueError: If the samples of the model depend on each other, or an option is out of range.

    Examples:
        >>> image, box = eq.data.load_digits().test.images[:1], eq.Box(0, 1)
        >>> model = eq.load("digits-opteq")
        >>> result = eq.optimize_input(model, lambda y: y[:, 3], image, constraint=box)
        >>> bool(result.loss < result.initial_loss)  # a lower logit of class 3
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
            result = search.run(start, first.z, iterations)
            final, checked = _best(problem, result, first, tight), torch.ones_like(result.converged)
            initial = first.loss
        else:
            result = search.run(start, None, iterations)
            final, checked = _unchecked(problem, result, tight)
            initial = result.first_loss
        end = _measure(search, result, final, tight, polish=settings.polish)
        return _reported(model, search, result, end, initial=initial, checked=checked, engine=name)


def _named_engine(
    choice: str | Mapping[str, Any] | Engine, settings: SearchSettings
) -> tuple[str, Engine]:
    """Return the name and the engine."""
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
    # Normalized steps tolerate that z lags behind; steps that measure the curvature do not.
    default = NORMALIZED_SWEEPS if settings.normalize else MEASURED_SWEEPS
    return Search(
        problem,
        engine,
        steps,
        sweeps=engine.sweeps or settings.sweeps or default,
        tolerance=settings.tolerance,
        solve_tolerance=settings.solve_tolerance(problem.dtype),
        visit=bool(settings.visit),
    )


@dataclass(frozen=True)
class _Measured:
    """The point that a search returns, with its adjoint and residuals; one entry per problem.

    Attributes:
        residuals: Residuals of z, μ and x.
        solve_residual: Residual of the solve for z; infinite if there was none.
        evaluations: Calls of T in the search, without those that measure the result.
    """

    x: Tensor
    z: Tensor
    mu: Tensor
    loss: Tensor
    residuals: tuple[Tensor, Tensor, Tensor]
    solve_residual: Tensor
    evaluations: int


def _measure(
    search: Search, result: SearchResult, final: Check, tight: float, *, polish: bool
) -> _Measured:
    """Evaluate the loss, the adjoint and the residuals at the point that is returned."""
    problem, groups = search.problem, search.problem.groups
    evaluations = problem.evaluations
    linear = JointLinearization(FixedInput(problem, final.x, result.scale), final.z)
    mu, adjoint_residual = result.last.mu, torch.full_like(final.residual, torch.inf)
    if polish:
        # The μ of a diverged search may be NaN; start at zero there.
        usable = torch.isfinite(mu).all(dim=1, keepdim=True)
        polished = linear.solve_adjoint(torch.where(usable, mu, 0.0), tolerance=tight)
        mu, adjoint_residual = polished.value, groups.largest(polished.residual)
    evaluation = linear.evaluation(mu)
    input_residual = search.steps.residual(final.x, evaluation.gradient, result.scale)

    def smaller(solve: Tensor, measured: Tensor) -> Tensor:
        # Where T expands, one more evaluation amplifies rounding errors; trust the solves.
        return torch.where(result.diverging, torch.minimum(solve, measured), measured)

    return _Measured(
        x=final.x,
        z=final.z,
        mu=mu,
        loss=evaluation.loss,
        residuals=(
            smaller(final.residual, evaluation.state_residual),
            smaller(adjoint_residual, evaluation.adjoint_residual),
            input_residual.nan_to_num(nan=torch.inf),
        ),
        solve_residual=final.residual,
        evaluations=evaluations,
    )


def _reported(
    model: nn.Module,
    search: Search,
    ended: SearchResult,
    end: _Measured,
    *,
    initial: Tensor,
    checked: Tensor,
    engine: str,
) -> InputResult:
    """Return the result in the shapes of the inputs; warn if a final solve failed.

    Args:
        model: Model of the search.
        search: The search.
        ended: Result of the search.
        end: The point that is returned.
        initial: Losses at the start.
        checked: Mask of the problems whose z was solved for at `end`.
        engine: Name of the engine.
    """
    problem, packing = search.problem, search.problem.packing
    unsolved = checked & ~(end.solve_residual <= SMALL_RESIDUAL)
    loss = torch.where(unsolved, torch.nan, end.loss)
    # z and μ have changed since the search stopped, so converged problems get a looser limit.
    limit = torch.where(ended.converged, 10 * search.tolerance, search.tolerance)
    settled = torch.stack(end.residuals).amax(dim=0) <= limit
    sound = (ended.status != int(Status.DIVERGED)) & torch.isfinite(loss)
    scale = problem.groups.to_samples(ended.scale)[:, None]
    visited = ended.visited
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
        iterations=ended.iterations,
        evaluations=end.evaluations,
        vjps=problem.vjps,
        check_evaluations=problem.check_evaluations,
        engine=engine,
        tolerance=search.tolerance,
        problem=problem.on(model),
        visited=None
        if visited is None
        else (visited.x.reshape(problem.input_shape), packing.unpack(visited.z)),
    )
    # If x itself is not finite, the message of the status suffices.
    lost = unsolved & torch.isfinite(end.x).all(dim=1)
    if bool(lost.any()):
        result = replace(result, remedy=_remedy(problem, result, lost))
        warn_caller(result.summary(), ConvergenceWarning)
    return result


def _best(problem: InputProblem, result: SearchResult, first: Check, tight: float) -> Check:
    """Return the x of lowest true loss among the start and the candidates of the engine."""
    best, loss = first, first.loss.nan_to_num(nan=torch.inf)
    for candidate in result.candidates:
        # Where sweeps diverged, they followed no equilibrium: start at the layer's initial state.
        other = problem.check(candidate, result.last.z, tolerance=tight, reset=result.diverging)
        sound = other.residual <= max(tight, 1e-3)
        better = sound & torch.isfinite(other.loss) & ((other.loss < loss) | result.converged)
        best = other.where(better, best, problem.groups)
        loss = torch.where(better, other.loss, loss)
    return best


def _unchecked(problem: InputProblem, result: SearchResult, tight: float) -> tuple[Check, Tensor]:
    """Return the last point of the engine, and a mask of the problems that are solved again there.

    These are the problems whose sweeps diverge: their z was solved for before the last step of x.
    """
    x, z = result.unchecked
    final = Check(x, z, result.first_loss, torch.full_like(result.first_loss, torch.inf))
    if bool(result.diverging.any()):
        solved = problem.check(x, z, tolerance=tight, reset=result.diverging)
        final = solved.where(result.diverging, final, problem.groups)
    return final, result.diverging


def _remedy(problem: InputProblem, result: InputResult, lost: Tensor) -> str:
    """Return the remedy for the problems `lost`, whose final solves failed."""
    rows = problem.groups.to_samples(lost).nonzero().squeeze(1)
    state = map_state(lambda tensor: tensor[rows], result.state)
    advice = diagnose(problem.layer.cell, state, problem.inject(result.x).keep(rows))
    return advice or (
        "choose another solver of the layer, raise its max_iterations, or bound the norm of W "
        "(norm='bound')"
    )


def _check(x0: object) -> None:
    if not isinstance(x0, Tensor) or not x0.is_floating_point():
        got = x0.dtype if isinstance(x0, Tensor) else type(x0).__name__
        raise TypeError(f"x0 must be a floating-point tensor, got {got}")
    if x0.dim() < 2 or len(x0) == 0:
        raise ValueError(
            f"x0 must have shape (problems, ...) with at least one problem, got {tuple(x0.shape)}"
        )
