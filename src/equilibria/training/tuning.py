"""Measuring which solver, tolerance and gradient rule train a model fastest."""

from __future__ import annotations

import copy
import gc
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.equilibrium import EquilibriumLayer, Solving, solving
from equilibria.equilibrium.solving import Record
from equilibria.gradients import (
    GradientRule,
    Implicit,
    OneStep,
    Phantom,
    Unrolled,
    get_gradient,
    list_gradients,
)
from equilibria.registry import check_at_least_one
from equilibria.solvers import (
    Anderson,
    ConvergenceError,
    ConvergenceWarning,
    Solution,
    get_solver,
    list_solvers,
)
from equilibria.solvers.linear.base import LinearSolution
from equilibria.solvers.method import Method
from equilibria.training.processes import now

TOLERANCES = (1e-2, 1e-3, 1e-4)
EXACT_TOLERANCE = 1e-12
EXACT_ITERATIONS = 2000
SMALLEST_COSINE = 0.999
"""What the gradient of a recommended setting must have with the exact one."""

Loss = Callable[[Tensor], Tensor]
OnProgress = Callable[[int, int], None]
"""Called with the number of training steps done, and that of all."""


@dataclass(frozen=True)
class Measurement:
    """One setting on one batch: what a training step costs, and how good its gradient is."""

    setting: Solving
    found_by: str
    """What found the equilibrium: the solver, or what "auto" chose."""
    seconds: float
    """The median over the repeats: of the CPU time, or of the clock where a GPU computes."""
    evaluations: int
    """Calls of the map in the forward solve."""
    backward_evaluations: int | None
    """Products with the Jacobian in the backward pass; None where the rule does not say."""
    share_converged: float
    backward_converged: bool
    """Whether the backward solve converged; True where there is none to fail."""
    cosine: float
    """Of the gradient over all parameters with the exact one; NaN where either is not finite."""
    relative_error: float
    """‖gradient − exact‖/‖exact‖."""

    @property
    def qualifies(self) -> bool:
        """Every sample converged, forward and backward, and the gradient points the right way."""
        accurate = self.cosine >= SMALLEST_COSINE
        return self.share_converged == 1 and self.backward_converged and accurate


@dataclass(frozen=True)
class TuningReport:
    """All measurements, the fastest first."""

    measurements: tuple[Measurement, ...]
    present: Measurement
    recommended: Measurement | None
    auto: str
    """What the solver "auto" chooses for this model."""

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the present setting the recommended one is."""
        if self.recommended is None:
            return None
        return self.present.seconds / self.recommended.seconds


def recommend(measurements: Sequence[Measurement]) -> Measurement | None:
    """The fastest that qualifies, or None."""
    return min((m for m in measurements if m.qualifies), key=lambda m: m.seconds, default=None)


def explain_none(measurements: Sequence[Measurement]) -> str:
    """Why no measurement qualifies, with the remedy for each cause."""
    unsolved = sum(m.share_converged < 1 for m in measurements)
    failed = sum(not m.backward_converged for m in measurements)
    inaccurate = [m.cosine for m in measurements if not m.cosine >= SMALLEST_COSINE]
    causes = []
    if unsolved:
        causes.append(
            f"{unsolved} left samples unconverged (raise max_iterations, or bound the norm of W "
            "with norm='bound')"
        )
    if failed:
        causes.append(
            f"the backward solve of {failed} did not converge (raise the max_iterations of the "
            "gradient rule)"
        )
    if inaccurate:
        finite = [cosine for cosine in inaccurate if math.isfinite(cosine)]
        best = f", {max(finite):.4f} at the most" if finite else ""
        causes.append(
            f"the gradient of {len(inaccurate)} has a cosine below {SMALLEST_COSINE} with the "
            f"exact one{best} (lower the tolerances)"
        )
    return f"none of {len(measurements)} settings qualifies: {'; '.join(causes)}"


def tune(
    model: nn.Module,
    images: Tensor,
    *,
    loss: Loss | None = None,
    solvers: Sequence[str] | None = None,
    tolerances: Sequence[float] = TOLERANCES,
    gradients: Sequence[str] | None = None,
    repeats: int = 3,
    on_progress: OnProgress | None = None,
) -> TuningReport:
    """Time training steps of `model` on one batch with different settings; changes nothing.

    Every solver meets every tolerance with one gradient rule, the implicit one if it is among
    `gradients`. The best of them then meets the other rules, and a backward solve as loose as its
    forward one. The settings take turns, and gradients are compared with that of a float64 copy
    solved to 1e-12.

    loss: makes a number of the model's output; a fixed random combination of it by default.
    solvers, gradients: registered names; all but "auto" and "sam", and all, by default.
    repeats: how many steps of each setting are timed.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().train.images[:8]
        >>> few = {"solvers": ["picard"], "tolerances": [1e-2], "repeats": 1}
        >>> found = eq.training.tune(model, images, **few)
        >>> found.recommended.setting.tolerance
        0.01
    """
    check_at_least_one(repeats=repeats)
    ordinary = [name for name in list_solvers() if name not in ("auto", "sam")]
    names = ordinary if solvers is None else solvers
    rule_names = list_gradients() if gradients is None else gradients
    if not (names and tolerances and rule_names):
        raise ValueError("nothing to measure: name a solver, a tolerance and a gradient rule")
    forked = [images.device] if images.device.type == "cuda" else []
    # Without a trace in the random generators, and without the warnings of failed solves.
    with torch.random.fork_rng(devices=forked), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        bench = _Bench(model, images, loss or _random_combination)
        present = bench.present
        limit = present.max_iterations
        contestants = [
            get_solver(name, tolerance=tolerance, max_iterations=limit)
            for name in names
            for tolerance in tolerances
        ]
        # The rule that the model has keeps its options.
        own = present.gradient
        rules = [own if type(rule) is type(own) else rule for rule in map(get_gradient, rule_names)]
        lead = next((rule for rule in rules if rule.exact), rules[0])
        others = [rule for rule in rules if rule is not lead]
        exact = _exact_gradient(bench)
        auto = bench.solve(get_solver("auto", max_iterations=limit)).solver
        bench.run(present)  # The first step of all warms up what is shared.
        results: list[Measurement] = []
        times: list[list[float]] = []

        def report(settings: int) -> None:
            if on_progress is not None:
                on_progress(sum(map(len, times)), repeats * settings)

        def measure(settings: Sequence[Solving], still_to_come: int) -> None:
            for setting in settings:
                if setting not in [m.setting for m in results]:
                    results.append(bench.measure(setting, exact))
                    times.append([results[-1].seconds])
                    report(max(len(results), still_to_come))

        first = [Solving(solver, bench.fit(lead, solver)) for solver in contestants]
        expected = 1 + len(first) + len(others) + isinstance(lead, Implicit)
        measure([present, *first], expected)
        tried = [m for m in results if m.setting.solver in contestants]
        # Where none qualifies, the other rules meet the solver that solved most.
        front = recommend(tried) or min(tried, key=lambda m: (-m.share_converged, m.seconds))
        best = front.setting.solver
        if isinstance(lead, Implicit) and lead.tolerance_with(best) < best.tolerance:
            others.append(replace(lead, tolerance=best.tolerance))
        measure([Solving(best, bench.fit(rule, best)) for rule in others], expected)
        # The settings take turns: what else the machine does hits all of them alike.
        for _ in range(repeats - 1):
            for measurement, seconds in zip(results, times, strict=True):
                seconds.append(bench.time(measurement.setting))
                report(len(results))
    measurements = [
        replace(measurement, seconds=statistics.median(seconds))
        for measurement, seconds in zip(results, times, strict=True)
    ]
    return TuningReport(
        measurements=tuple(sorted(measurements, key=lambda m: m.seconds)),
        present=measurements[0],
        recommended=recommend(measurements),
        auto=auto,
    )


class _Bench:
    """A copy of the model that runs training steps on one batch, with settings put in."""

    def __init__(self, model: nn.Module, images: Tensor, loss: Loss) -> None:
        self.model = copy.deepcopy(model)
        if not model.training:
            self.model.train()
        self.images = images
        self.loss = loss
        self.record = Record()
        self.layers = [m for m in self.model.modules() if isinstance(m, EquilibriumLayer)]
        if not self.layers:
            raise ValueError(
                f"{type(self.model).__name__} has no equilibrium layer, so there is nothing to "
                "tune: give a model that has one, such as eq.create_model('opteq-small')"
            )
        self.present, *others = (layer.solving.changed(strict=False) for layer in self.layers)
        if any(other != self.present for other in others):
            raise ValueError(
                "the equilibrium layers of the model have different settings, and tuning is for "
                "one that all share: give all of them the same solver and gradient rule first"
            )
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError(
                "no parameter of the model is trainable, so there is no gradient to compare: "
                "call model.requires_grad_() first"
            )

    def run(self, setting: Solving) -> None:
        """One training step, but for the update."""
        self.model.zero_grad(set_to_none=True)
        with self._solving(setting) as self.record:
            number = self.loss(self.model(self.images))
            number.backward()  # type: ignore[no-untyped-call]

    def solve(self, solver: Method) -> Solution:
        """A forward solve alone."""
        with torch.no_grad(), self._solving(Solving(solver, Implicit())) as self.record:
            self.model(self.images)
        return self.solutions()[0]

    def _solving(self, setting: Solving) -> AbstractContextManager[Record]:
        torch.manual_seed(0)  # Every setting meets the same random draws.
        rule = setting.gradient
        if isinstance(rule, Implicit):
            # The same batch again and again: training on ever new ones has no such start.
            rule = replace(rule, warm_start=False)
        return solving(self.model, solver=setting.solver, gradient=rule, strict=False, record=True)

    def fit(self, rule: GradientRule, solver: Method) -> GradientRule:
        """The rule for this solver: as many steps are unrolled as the solver takes."""
        if isinstance(rule, Unrolled):
            return replace(rule, steps=self.solve(solver).evaluations)
        return rule

    def time(self, setting: Solving) -> float:
        gc.collect(1)  # What the last step left; all that is older would take longer than a step.
        begin = now(self.images.device)
        self.run(setting)
        return now(self.images.device) - begin

    def measure(self, setting: Solving, exact: Tensor) -> Measurement:
        seconds = self.time(setting)
        solutions, backward = self.solutions(), self.record.backward
        cosine, error = _compare(self.gradient(), exact)
        return Measurement(
            setting=setting,
            found_by=solutions[0].solver,
            seconds=seconds,
            evaluations=sum(solution.evaluations for solution in solutions),
            backward_evaluations=(
                sum(solution.evaluations for solution in backward)
                if backward
                else _recorded_steps(setting.gradient)
            ),
            share_converged=min(solution.share_converged for solution in solutions),
            backward_converged=all(bool(solution.converged.all()) for solution in backward),
            cosine=cosine,
            relative_error=error,
        )

    def solutions(self) -> list[Solution]:
        found = self.record.solutions
        if not found:
            raise ValueError(
                "the model did not run its equilibrium layer on these images: give a model whose "
                "forward pass does"
            )
        return found

    def gradient(self) -> Tensor:
        """Over all parameters, in one vector; zero where the loss does not depend on one."""
        pieces = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.parameters
        ]
        return torch.cat([piece.detach().double().flatten() for piece in pieces])


def _exact_gradient(bench: _Bench) -> Tensor:
    """The gradient of a float64 copy, to twelve digits."""
    if bench.images.device.type == "mps":
        raise ValueError("the exact gradient needs float64, which mps lacks: tune on the CPU")
    reference = _Bench(copy.deepcopy(bench.model).double(), bench.images.double(), bench.loss)
    limits: dict[str, Any] = {"tolerance": EXACT_TOLERANCE, "max_iterations": EXACT_ITERATIONS}
    reference.run(Solving(Anderson(**limits), Implicit(**limits)))
    solutions: list[Solution | LinearSolution] = [*reference.solutions()]
    for solution in [*solutions, *reference.record.backward]:
        if not bool(solution.converged.all()):
            raise ConvergenceError(
                "the exact gradient, with which every setting is compared, was not found: "
                + solution.summary()
            )
    return reference.gradient()


def _compare(gradient: Tensor, exact: Tensor) -> tuple[float, float]:
    """Cosine and relative error, NaN where a gradient is zero or not finite."""
    sizes = torch.linalg.vector_norm(gradient), torch.linalg.vector_norm(exact)
    cosine = torch.dot(gradient, exact) / (sizes[0] * sizes[1])
    # Rounding may carry the cosine of equal vectors past 1.
    error = torch.linalg.vector_norm(gradient - exact) / sizes[1]
    return float(cosine.clamp(-1, 1)), float(error)


def _recorded_steps(rule: GradientRule) -> int | None:
    """The steps that a rule without a backward solve differentiates."""
    if isinstance(rule, Phantom | Unrolled):
        return rule.steps
    return 1 if isinstance(rule, OneStep) else None


def _random_combination(output: Tensor) -> Tensor:
    """A linear function of the output: its gradient has parts along everything the model says."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model returns {type(output).__name__}, not a tensor: give tune a `loss` that "
            "makes a number of it"
        )
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return (output * weights.to(output)).mean()


def overrides(setting: Solving) -> str:
    """The setting as keywords of `eq.create_model` and `eq.EquilibriumLayer`."""
    calls = {
        "solver": (setting.solver, _options(setting.solver, always="tolerance")),
        "gradient": (setting.gradient, _options(setting.gradient, always="steps")),
    }
    return ", ".join(
        f"{name}={'eq.' * type(thing).__module__.startswith('equilibria.')}"
        f"{type(thing).__name__}({options})"
        for name, (thing, options) in calls.items()
    )


def labels(setting: Solving) -> tuple[str, str]:
    """The solver without its tolerance, and the rule, with the options that are not the usual."""
    solver = _options(setting.solver, without="tolerance")
    rule = _options(setting.gradient, always="steps")
    return (
        f"{type(setting.solver).__name__} {solver}".rstrip(),
        f"{type(setting.gradient).__name__} {rule}".rstrip(),
    )


def _options(thing: object, *, always: str = "", without: str = "") -> str:
    """The options that are not the usual ones, as keywords."""
    if not is_dataclass(thing):
        return ""
    shown = []
    for field in fields(thing):
        value = getattr(thing, field.name)
        usual = field.default is not MISSING and value == field.default
        if field.name == always or not (usual or field.name == without):
            shown.append(f"{field.name}={value!r}")
    return ", ".join(shown)
