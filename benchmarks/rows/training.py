"""A whole training step, forward and backward, at equal error of the gradient.

Each contestant gets the same ladders of tolerances: the backward tolerance is 1, 10 or 100 times
the forward tolerance. On each ladder, the loosest tolerance counts whose gradient in the input and
in every parameter is close enough to a float64 reference. The fastest of these settings are timed.
The peer tries every pair of its Anderson and fixed-point iteration, and both of its implicit
gradients. Its Broyden is left out because it is never the fastest in the other rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks import checks, ours, peer
from benchmarks.contest import Candidate, Ladder, Settings, choose, compare, quiet_solves
from benchmarks.problems import Problem
from benchmarks.results import Duel
from benchmarks.rows import forward
from benchmarks.rows.row import Row

ERRORS = (3e-3, 1e-3)
"""Relative errors of the gradient. One wrong ReLU in a million is an error of 1e-3 in the gradient
of the input, so a single unit decides the second row, and about ten the first."""
TOLERANCES = tuple(10 ** (-2 - step / 4) for step in range(17))
"""1e-2 to 1e-6 in quarters of a decade. With coarser steps, the ladder would decide the row."""
BACKWARD_FACTORS = (1, 10, 100)
TRIAL_TOLERANCE = 1e-3
SOLVERS = ("anderson", "fixed_point_iter")


def measure(make: Callable[[Settings], Problem], settings: Settings) -> Iterator[Duel]:
    problem = make(settings)
    loss = square_loss(problem)
    reference = checks.reference_gradients(problem.cell, problem.x, loss)
    task = Task(problem, loss, reference)
    gradients = ("ift",) if settings.quick else ("ift", "hook_ift")
    sides = {
        "ours": [[task.our_candidate(*rung) for rung in rungs] for rungs in _ladders()],
        "tuned": task.tuned_ladders(gradients),
        "rewritten": task.tuned_ladders(gradients, rewritten=True),
        "default": task.default_ladders(),
    }
    for error in ERRORS:
        results = compare({name: side for name, side in sides.items() if side}, error, settings)
        yield Duel(
            row=f"{problem.name}, training step, gradient to {error:.0e}",
            topic="training",
            wanted=error,
            aim_tuned=0.45,
            details={"one_step_gradient_error_of_peer": task.one_step_error()},
            **results,
        )


def square_loss(problem: Problem) -> checks.Loss:
    """Return the loss ½‖y − t‖², averaged over the batch, with a random target t."""
    target = torch.randn(problem.solution.shape, generator=torch.Generator().manual_seed(2))

    def loss(state: Tensor) -> Tensor:
        return 0.5 * (state - target.to(state.dtype)).square().sum() / len(target)

    return loss


class Task:
    """A problem with a loss and a reference gradient."""

    def __init__(self, problem: Problem, loss: checks.Loss, reference: Sequence[Tensor]) -> None:
        self.problem = problem
        self.loss = loss
        self.error = partial(checks.gradient_error, reference=reference)
        solution = problem.solution.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(solution), solution)
        self.gradient_scale = float(gradient.flatten(1).norm(dim=1).min())

    def step(self, equilibrium: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = self.problem.x.clone().requires_grad_()
        value = self.loss(equilibrium(x))
        return list(torch.autograd.grad(value, [x, *self.problem.cell.parameters()]))

    def our_candidate(self, tolerance: float, backward_tolerance: float) -> Candidate:
        layer = ours.layer(
            self.problem.cell, tolerance=tolerance, backward_tolerance=backward_tolerance
        ).train()

        def evaluations() -> int:
            assert layer.last_solution is not None
            assert layer.last_backward is not None
            return layer.last_solution.evaluations + layer.last_backward.evaluations

        return Candidate(
            label=lambda: f"{ours.solver_label(layer)} + {ours.gradient_label(layer)}",
            run=lambda: self.step(layer),
            error=self.error,
            evaluations=evaluations,
            details={"tolerance": tolerance, "backward_tolerance": backward_tolerance},
        )

    def peer_candidate(self, setting: peer.Setting) -> Candidate:
        contestant = peer.Peer(self.problem, setting)
        names = f"{setting.solver} + {setting.backward_solver}{setting.layout_label}"

        def run() -> list[Tensor]:
            contestant.meter.reset_counts()
            return self.step(contestant.equilibrium)

        return Candidate(
            label=lambda: names,
            run=run,
            error=self.error,
            evaluations=lambda: contestant.meter.forward + contestant.meter.backward,
            meter=contestant.meter,
            details={
                "tolerance": setting.tolerance,
                "backward_tolerance": setting.backward_tolerance,
                "stop": setting.stop,
                "gradient": setting.gradient,
            },
        )

    def tuned_ladders(self, gradients: Sequence[str], *, rewritten: bool = False) -> list[Ladder]:
        """Return ladders for every pair of solvers, in the fastest layout of the forward solver."""
        layouts = self._fastest_layouts(rewritten)
        ladders = []
        for solver, backward_solver, gradient in itertools.product(layouts, layouts, gradients):
            base = peer.Setting(
                solver=solver,
                stop="rel",
                backward_solver=backward_solver,
                backward_stop="rel",
                tuned=True,
                layout=layouts[solver],
                gradient=gradient,
            )
            ladders += [self._peer_ladder(base, rungs) for rungs in _ladders()]
        return ladders

    def default_ladders(self) -> list[Ladder]:
        """Return ladders of plain iteration with absolute stopping and the gradient `ift`."""
        base = peer.default_settings(self.problem, 1.0)[-1]
        scales = (base.tolerance, self.gradient_scale)
        return [self._peer_ladder(base, rungs, scales) for rungs in _ladders()]

    def one_step_error(self) -> float:
        """Return the error of the peer's default gradient, a phantom gradient of one step."""
        setting = replace(peer.default_settings(self.problem, 1e-5)[-1], gradient="one_step")
        return self.error(self.step(peer.Peer(self.problem, setting).equilibrium))

    def _peer_ladder(
        self,
        base: peer.Setting,
        rungs: Sequence[tuple[float, float]],
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> Ladder:
        return [
            self.peer_candidate(
                replace(base, tolerance=scales[0] * first, backward_tolerance=scales[1] * second)
            )
            for first, second in rungs
        ]

    def _fastest_layouts(self, rewritten: bool) -> dict[str, str]:
        fastest: dict[str, str] = {}
        settings = peer.tuned_settings(self.problem, TRIAL_TOLERANCE, rewritten=rewritten)
        for solver in SOLVERS if settings else ():
            ladders = {
                setting.layout: [forward.peer_candidate(self.problem, setting)]
                for setting in settings
                if setting.solver == solver
            }
            with quiet_solves():
                best = choose(list(ladders.values()), TRIAL_TOLERANCE)[0].candidate
            fastest[solver] = next(name for name, ladder in ladders.items() if best in ladder)
        return fastest


def _ladders() -> list[list[tuple[float, float]]]:
    """Pairs (forward tolerance, backward tolerance) from loose to tight, for each factor."""
    pairs = [[(t, factor * t) for t in TOLERANCES] for factor in BACKWARD_FACTORS]
    return [[(t, backward) for t, backward in ladder if backward < 1] for ladder in pairs]


def _row(make: Callable[[Settings], Problem]) -> Row:
    name = make.__name__.replace("_", "-")
    about = f"forward and backward to an error of the gradient: {name}"
    return Row(f"training-{name}", about, partial(measure, make))


ROWS = (_row(forward.conv), _row(forward.hard_conv), _row(forward.deep))
