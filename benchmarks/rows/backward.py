"""Backward passes to a relative residual of 1e-6 of the adjoint system (I − Jᵀ)u = g.

Both sides get the equilibrium, solved to 1e-6 before the timing. The gradient in the input and the
parameters for a random g is timed. The check computes the residual of u, which a probe reads
(`ProbedCell`); the timed gradient must be the pull-back of u.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import checks, ours, peer
from benchmarks.cells import ProbedCell
from benchmarks.contest import Candidate, Settings, compare
from benchmarks.problems import Problem
from benchmarks.results import Duel
from benchmarks.rows import forward
from benchmarks.rows.row import Row

TOLERANCE = 1e-6
FORWARD_TOLERANCE = 1e-5
AGREEMENT = 1e-4
"""Largest relative distance of the timed gradient from that of the checked adjoint."""


def measure(
    make: Callable[[Settings], Problem], aim: float | None, settings: Settings
) -> Iterator[Duel]:
    problem = make(settings)
    gradient = equal_gradients(problem)
    # The peer's relative residual is relative to ‖u‖ instead of ‖g‖, so use its absolute one.
    default = replace(
        peer.default_settings(problem, FORWARD_TOLERANCE)[-1],
        backward_tolerance=TOLERANCE * float(gradient[0].norm()),
    )

    def tuned(rewritten: bool) -> list[list[Candidate]]:
        options = peer.tuned_settings(problem, FORWARD_TOLERANCE, rewritten=rewritten)
        settings = [
            replace(default, backward_solver=option.solver, layout=option.layout, tuned=True)
            for option in options
        ]
        return [[peer_candidate(problem, setting, gradient)] for setting in settings]

    sides = {
        "ours": [[our_candidate(problem, gradient)]],
        "tuned": tuned(rewritten=False),
        "rewritten": tuned(rewritten=True),
        "default": [[peer_candidate(problem, default, gradient)]],
    }
    results = compare({name: side for name, side in sides.items() if side}, TOLERANCE, settings)
    yield Duel(
        row=f"{problem.name}, backward to {TOLERANCE:.0e}",
        topic="backward",
        wanted=TOLERANCE,
        aim_tuned=aim,
        **results,
    )


def equal_gradients(problem: Problem) -> Tensor:
    """Return a random g with entries of size 1 and the same norm for every sample.

    The size favors the peer: the ridge of its Anderson is absolute and would dominate the residuals
    of a small g.
    """
    gradient = torch.randn(problem.solution.shape, generator=torch.Generator().manual_seed(1))
    norms = gradient.flatten(1).norm(dim=1)
    size = gradient[0].numel() ** 0.5
    return size * gradient / norms.view(-1, *[1] * (gradient.dim() - 1))


def our_candidate(problem: Problem, gradient: Tensor) -> Candidate:
    def layer(cell: Any) -> Any:
        return ours.layer(cell, tolerance=FORWARD_TOLERANCE, backward_tolerance=TOLERANCE).train()

    timed = layer(problem.cell)
    x = problem.x.clone().requires_grad_()
    output = timed(x, start=problem.solution)

    def adjoint() -> tuple[Tensor, Tensor, Tensor]:
        probe = torch.zeros_like(problem.solution).requires_grad_()
        state = layer(ProbedCell(problem.cell, probe))(problem.x, start=problem.solution)
        (u,) = torch.autograd.grad(state, probe, gradient)
        fast = problem.x.contiguous(memory_format=_format_of(state))
        return fast, state, u

    return Candidate(
        label=lambda: ours.gradient_label(timed),
        run=_pull(output, x, problem, gradient),
        error=partial(_error, problem, gradient, adjoint),
        evaluations=lambda: timed.last_backward.evaluations,
    )


def peer_candidate(problem: Problem, setting: peer.Setting, gradient: Tensor) -> Candidate:
    contestant = peer.Peer(problem, setting)
    x = problem.x.clone().requires_grad_()
    output = contestant.equilibrium(x, start=problem.solution)

    def adjoint() -> tuple[Tensor, Tensor, Tensor]:
        probe = torch.zeros_like(problem.solution).requires_grad_()
        fresh = peer.Peer(problem, setting)
        state = fresh.equilibrium(problem.x, start=problem.solution, probe=probe)
        (u,) = torch.autograd.grad(state, probe, gradient)
        return contestant.formatted(problem.x), state, u

    pull = _pull(output, x, problem, gradient)

    def run() -> list[Tensor]:
        contestant.meter.reset_counts()
        return pull()

    return Candidate(
        label=lambda: setting.backward_solver + setting.layout_label,
        run=run,
        error=partial(_error, problem, gradient, adjoint),
        evaluations=lambda: contestant.meter.backward,
        meter=contestant.meter,
        details={"tolerance": setting.backward_tolerance, "stop": setting.backward_stop},
    )


def _pull(
    output: Tensor, x: Tensor, problem: Problem, gradient: Tensor
) -> Callable[[], list[Tensor]]:
    leaves = [x, *problem.cell.parameters()]
    return lambda: list(torch.autograd.grad(output, leaves, gradient, retain_graph=True))


def _error(
    problem: Problem,
    gradient: Tensor,
    adjoint: Callable[[], tuple[Tensor, Tensor, Tensor]],
    timed: list[Tensor],
) -> float:
    """Return the residual of the adjoint, or infinity if the timed gradient is another one."""
    x, state, u = adjoint()
    expected = checks.pulled_back(problem.cell, x, state, u)
    if checks.gradient_error(timed, expected) > AGREEMENT:
        return float("inf")
    return checks.adjoint_residual(problem.cell, x, state, u, gradient)


def _format_of(state: Tensor) -> torch.memory_format:
    image = state.dim() == 4 and state.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if image else torch.contiguous_format


def _row(make: Callable[[Settings], Problem], aim: float | None = None) -> Row:
    name = make.__name__.replace("_", "-")
    about = f"gradient at a given equilibrium, adjoint to {TOLERANCE:.0e}: {name}"
    return Row(f"backward-{name}", about, partial(measure, make, aim))


ROWS = (_row(forward.conv, 0.40), _row(forward.hard_conv, 0.34), _row(forward.deep))
