"""Joint inference and input optimization (JIIO).

Gurumurthy et al., "Joint inference and input optimization in equilibrium networks", NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context import run_eagerly
from equilibria.inputs.joint.checks import check_start, frozen
from equilibria.inputs.joint.constraints import Constraint
from equilibria.inputs.joint.engines import Engine, get_engine
from equilibria.inputs.joint.members import Members
from equilibria.inputs.joint.problem import InputProblem, Loss, Penalty
from equilibria.inputs.joint.region import Region
from equilibria.inputs.joint.result import InputResult
from equilibria.inputs.joint.search import Found, Search, relative_residual
from equilibria.inputs.joint.steps import StepOptions, Steps
from equilibria.solvers import Status

NORMALISED_SWEEPS, MEASURED_SWEEPS = 1, 3
"""How often z and μ are swept for each step of x, with normalized steps and with others."""


@run_eagerly
@torch.no_grad()
def optimize_input(
    model: nn.Module,
    loss: Loss,
    x0: Tensor,
    *,
    constraint: Constraint | None = None,
    penalty: Penalty | None = None,
    engine: str | Engine = "secant",
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
    engine: "secant" (the default), "anderson" (type I with safeguards), "anderson2", "broyden",
        "damped", "official", and the baselines "gradient", "gradient-warm", "adam", "adam-warm",
        which solve for z and μ at every step; `engine_options` go to it.
    groups: the row of x0 that each sample uses; the samples of a group share their x.
    sweeps: updates of (z, μ) for each step of x; by default 1 with `normalize` and 3 without.
    step_size: α. With `normalize` the length of the first step, by default 8 times the ball's
        radius, which falls to a twentieth; otherwise a factor of the gradient. By default
        (without a step size) "secant" takes quasi-Newton steps where nothing constrains x, and all
        other cases take one over the curvature seen so far, which makes the result independent of
        the loss's unit. Adam's learning rate.
    normalize: divide the gradient by its 2-norm. Right for attacks, where the optimum is on the
        ball; wrong for an optimum inside, which it can only circle.
    tolerance: of the relative residuals of z, μ and x at which a problem has converged.
    polish: solve for μ at the result, which Eq. 19 needs; otherwise μ is that of the search.
    verify: solve tightly at the start and at the end, report true losses, and never return what is
        worse than the start. False leaves that out, where only x matters and time does: the result
        is then the last x, and its losses are those at the z of the search.
    check_tolerance: of the solves for the true losses; by default 1e-6, or 1e-10 in float64.

    Among what the search saw, the result is the point of lowest true loss, unless a problem has
    converged: then it is that point. x0 and the model are left as they are.
    """
    _check_options(sweeps, iterations, step_size, tolerance, check_tolerance)
    x0 = check_start(x0).detach()
    chosen = get_engine(engine, **dict(engine_options or {}))
    name = engine if isinstance(engine, str) else "own"
    with torch.inference_mode(False), frozen(model):
        x0 = x0.clone()
        region = Region.everything(x0) if constraint is None else constraint.region(x0)
        problem = InputProblem(model, loss, x0, region, Members.of(x0, groups), penalty)
        tight = check_tolerance or _tight(problem.dtype)
        steps = Steps(
            StepOptions(step_size, normalize, chosen.rule, chosen.decay, iterations), region
        )
        start = region.project(x0.flatten(1))
        # A step on a ball is short and may lag; one that measures curvature must be exact.
        swept = sweeps or (NORMALISED_SWEEPS if normalize else MEASURED_SWEEPS)
        search = Search(problem, chosen, steps, sweeps=swept, tolerance=tolerance)
        if not verify:
            found = search.run(start, None, iterations)
            initial, x, z = found.first_loss, found.last.x, found.last.z
        else:
            z0, _ = problem.solve(start, None, tolerance=tight)
            initial = problem.loss_at(start, z0)
            found = search.run(start, z0, iterations)
            x, z = _select(problem, found, start, z0, initial, tight)
        return _result(problem, found, x, z, initial, polish, tight, tolerance, name)


def _select(
    problem: InputProblem, found: Found, start: Tensor, z0: Tensor, initial: Tensor, tight: float
) -> tuple[Tensor, Tensor]:
    """The x of lowest true loss among start, best iterate and last one, and its equilibrium."""
    x, z, loss = start, z0, initial.nan_to_num(nan=torch.inf)
    done = found.status == int(Status.CONVERGED)
    best = torch.where(done[:, None], found.last.x, found.best_x)
    candidates = [best]
    if not bool((found.last.x == best).all()):
        candidates.append(torch.where(done[:, None], best, found.last.x))
    for candidate in candidates:
        guess = found.last.z
        solved, residual = problem.solve(candidate, guess, tolerance=tight)
        true = problem.loss_at(candidate, solved)
        sound = problem.members.worst(residual) <= max(tight, 1e-3)
        better = sound & torch.isfinite(true) & ((true < loss) | done)
        x = torch.where(better[:, None], candidate, x)
        z = torch.where(problem.members.spread(better)[:, None], solved, z)
        loss = torch.where(better, true, loss)
    return x, z


def _result(
    problem: InputProblem,
    found: Found,
    x: Tensor,
    z: Tensor,
    initial: Tensor,
    polish: bool,
    tight: float,
    tolerance: float,
    engine: str,
) -> InputResult:
    evaluations = problem.effort.evaluations
    mu = found.last.mu
    here = problem.at(x, found.scale).linearize(z)
    if polish:
        mu = here.solve_adjoint(_finite(mu), tolerance=tight).value
    reading = here.reading(mu)
    residuals = (
        relative_residual(problem, z, reading.image),
        relative_residual(problem, mu, reading.adjoint),
        found.steps.residual(x, reading.gradient, found.scale).nan_to_num(nan=torch.inf),
    )
    # z and μ are fresher than those the search stopped at: its verdict gets some leeway.
    limit = torch.where(found.status == int(Status.CONVERGED), 10 * tolerance, tolerance)
    settled = torch.stack(residuals).amax(dim=0) <= limit
    status = torch.where(settled, int(Status.CONVERGED), int(Status.OUT_OF_ITERATIONS))
    broken = (found.status == int(Status.DIVERGED)) | ~torch.isfinite(reading.loss)
    status = torch.where(broken, int(Status.DIVERGED), status).to(torch.int8)
    scale = problem.members.spread(found.scale)[:, None]
    return InputResult(
        x=x.reshape(problem.input_shape),
        state=problem.packing.unpack(z),
        adjoint=problem.packing.unpack(mu / scale),
        loss=reading.loss,
        initial_loss=initial,
        status=status,
        state_residual=residuals[0],
        adjoint_residual=residuals[1],
        input_residual=residuals[2],
        iterations=found.iterations,
        evaluations=evaluations,
        vjps=problem.effort.vjps,
        check_evaluations=problem.effort.check_evaluations,
        engine=engine,
        tolerance=tolerance,
        problem=problem,
    )


def _finite(rows: Tensor) -> Tensor:
    """Rows to start from: zero where a search has left something that is no number."""
    return torch.where(torch.isfinite(rows).all(dim=1, keepdim=True), rows, 0.0)


def _tight(dtype: torch.dtype) -> float:
    return 1e-10 if dtype == torch.float64 else 1e-6


def _check_options(
    sweeps: int | None,
    iterations: int,
    step_size: float | None,
    tolerance: float,
    check_tolerance: float | None,
) -> None:
    for name, count in (("sweeps", sweeps), ("iterations", iterations)):
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")
    positive = {
        "step_size": step_size,
        "tolerance": tolerance,
        "check_tolerance": check_tolerance,
    }
    for name, value in positive.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, not {value}")
