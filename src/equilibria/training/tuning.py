"""Search for the solver, tolerance and gradient rule that train a model fastest."""

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
MIN_COSINE = 0.999
"""Smallest cosine between the gradient of a recommended setting and the exact gradient."""

Loss = Callable[[Tensor], Tensor]
OnProgress = Callable[[int, int], None]
"""Callback with the number of training steps done and of all."""


@dataclass(frozen=True)
class Measurement:
    """Cost and accuracy of a training step with one setting on one batch.

    Attributes:
        setting: Solver and gradient rule.
        found_by: Solver that computed the equilibrium; for "auto", the solver it chose.
        seconds: Median time over the repeats: CPU time, or wall-clock time on a GPU.
        evaluations: Number of evaluations of the map in the forward solve.
        backward_evaluations: Number of products with the Jacobian in the backward pass; None if
            the rule does not count them.
        share_converged: Share of samples whose forward solve converged.
        backward_converged: Whether the backward solve converged; True if the rule has none.
        cosine: Cosine between the gradient of all parameters and the exact one; NaN if one of them
            is zero or not finite.
        relative_error: ‖gradient − exact‖/‖exact‖, with the exact gradient of all parameters.
    """

    setting: Solving
    found_by: str
    seconds: float
    evaluations: int
    backward_evaluations: int | None
    share_converged: float
    backward_converged: bool
    cosine: float
    relative_error: float

    @property
    def qualifies(self) -> bool:
        """Whether all solves converged and the gradient has the direction of the exact one."""
        accurate = self.cosine >= MIN_COSINE
        return self.share_converged == 1 and self.backward_converged and accurate


@dataclass(frozen=True)
class TuningReport:
    """Result of `tune`.

    Attributes:
        measurements: All measurements, the fastest first.
        present: Measurement of the present settings of the model.
        recommended: Fastest measurement that qualifies, or None.
        auto: Solver that "auto" chooses for this model.
    """

    measurements: tuple[Measurement, ...]
    present: Measurement
    recommended: Measurement | None
    auto: str

    @property
    def speedup(self) -> float | None:
        """Time with the present setting ÷ time with the recommended one."""
        if self.recommended is None:
            return None
        return self.present.seconds / self.recommended.seconds


def recommend(measurements: Sequence[Measurement]) -> Measurement | None:
    """Return the fastest measurement that qualifies, or None."""
    return min((m for m in measurements if m.qualifies), key=lambda m: m.seconds, default=None)


def explain_none(measurements: Sequence[Measurement]) -> str:
    """Explain why no measurement qualifies, with a remedy for each cause."""
    unsolved = sum(m.share_converged < 1 for m in measurements)
    failed = sum(not m.backward_converged for m in measurements)
    inaccurate = [m.cosine for m in measurements if not m.cosine >= MIN_COSINE]
    causes = []
    if unsolved:
        causes.append(
            f"with {unsolved}, some samples did not converge (raise max_iterations, or bound the "
            "norm of W with norm='bound')"
        )
    if failed:
        causes.append(
            f"with {failed}, the backward solve did not converge (raise the max_iterations of the "
            "gradient rule)"
        )
    if inaccurate:
        finite = [cosine for cosine in inaccurate if math.isfinite(cosine)]
        best = f", at most {max(finite):.4f}" if finite else ""
        causes.append(
            f"with {len(inaccurate)}, the cosine between the gradient and the exact one is below "
            f"{MIN_COSINE}{best} (lower the tolerances)"
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
    """Compare solvers, tolerances and gradient rules on training steps of one batch.

    Each solver is measured with each tolerance and one gradient rule, the implicit one if it is
    among `gradients`. The best combination is then measured with the other rules, and with a
    backward solve to the tolerance of the forward solve. Gradients are compared with that of a
    float64 copy solved to 1e-12. The model does not change.

    Args:
        model: Model with equilibrium layers that share their settings.
        images: Batch of inputs.
        loss: Function from the output of the model to a scalar; by default a fixed random linear
            combination.
        solvers: Names of solvers; by default all except "auto" and "sam".
        tolerances: Tolerances of the forward solve.
        gradients: Names of gradient rules; by default all.
        repeats: Number of timed steps per setting. Settings alternate, so that other load on the
            machine affects all of them.
        on_progress: Callback with the number of steps done and of all.

    Returns:
        All measurements and the recommended setting.

    Raises:
        ValueError: If the model has no equilibrium layer, or layers with different settings.
        ConvergenceError: If the exact gradient cannot be computed.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().train.images[:8]
        >>> options = {"solvers": ["picard"], "tolerances": [1e-2], "repeats": 1}
        >>> report = eq.training.tune(model, images, **options)
        >>> report.recommended.setting.tolerance
        0.01
    """
    check_at_least_one(repeats=repeats)
    ordinary = [name for name in list_solvers() if name not in ("auto", "sam")]
    names = ordinary if solvers is None else solvers
    rule_names = list_gradients() if gradients is None else gradients
    if not (names and tolerances and rule_names):
        raise ValueError(
            "there is nothing to measure: give at least one solver, tolerance and gradient rule"
        )
    forked = [images.device] if images.device.type == "cuda" else []
    # The random generators are restored, and solves that fail are part of the results.
    with torch.random.fork_rng(devices=forked), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        bench = _Bench(model, images, loss or _random_combination)
        present = bench.present
        limit = present.max_iterations
        candidates = [
            get_solver(name, tolerance=tolerance, max_iterations=limit)
            for name in names
            for tolerance in tolerances
        ]
        # The model's rule is measured with its options, the others with their defaults.
        current = present.gradient
        rules = [
            current if type(rule) is type(current) else rule
            for rule in map(get_gradient, rule_names)
        ]
        lead = next((rule for rule in rules if rule.exact), rules[0])
        others = [rule for rule in rules if rule is not lead]
        exact = _exact_gradient(bench)
        auto = bench.solve(get_solver("auto", max_iterations=limit)).solver
        bench.run(present)  # Warm up caches, so that the first measurement is not slower.
        results: list[Measurement] = []
        times: list[list[float]] = []

        def report(settings: int) -> None:
            if on_progress is not None:
                on_progress(sum(map(len, times)), repeats * settings)

        def measure(settings: Sequence[Solving], expected: int) -> None:
            for setting in settings:
                if setting not in [m.setting for m in results]:
                    results.append(bench.measure(setting, exact))
                    times.append([results[-1].seconds])
                    report(max(len(results), expected))

        first = [Solving(solver, bench.fit(lead, solver)) for solver in candidates]
        expected = 1 + len(first) + len(others) + isinstance(lead, Implicit)
        measure([present, *first], expected)
        measured = [m for m in results if m.setting.solver in candidates]
        # If none qualifies, continue with the solver that converged for most samples.
        fallback = min(measured, key=lambda m: (-m.share_converged, m.seconds))
        best = (recommend(measured) or fallback).setting.solver
        if isinstance(lead, Implicit) and lead.tolerance_with(best) < best.tolerance:
            others.append(replace(lead, tolerance=best.tolerance))
        measure([Solving(best, bench.fit(rule, best)) for rule in others], expected)
        # Settings alternate, so that other load on the machine affects all of them.
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
    """Copy of a model that runs training steps on one batch with different settings."""

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
                "tune: pass a model that has one, such as eq.create_model('opteq-small')"
            )
        self.present, *others = (layer.solving.changed(strict=False) for layer in self.layers)
        if any(other != self.present for other in others):
            raise ValueError(
                "tuning needs the same settings in all equilibrium layers: give all layers of the "
                "model the same solver and gradient rule first"
            )
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError(
                "the model has no trainable parameters, so there is no gradient to compare: call "
                "model.requires_grad_() first"
            )

    def run(self, setting: Solving) -> None:
        """Run a training step without the update of the weights."""
        self.model.zero_grad(set_to_none=True)
        with self._solving(setting) as self.record:
            loss = self.loss(self.model(self.images))
            loss.backward()  # type: ignore[no-untyped-call]

    def solve(self, solver: Method) -> Solution:
        """Run a forward solve without gradients."""
        with torch.no_grad(), self._solving(Solving(solver, Implicit())) as self.record:
            self.model(self.images)
        return self.solutions()[0]

    def _solving(self, setting: Solving) -> AbstractContextManager[Record]:
        torch.manual_seed(0)  # All settings have the same random draws.
        rule = setting.gradient
        if isinstance(rule, Implicit):
            # The batch is the same in every step here, but not in training, so that warm starts
            # would look too good.
            rule = replace(rule, warm_start=False)
        return solving(self.model, solver=setting.solver, gradient=rule, strict=False, record=True)

    def fit(self, rule: GradientRule, solver: Method) -> GradientRule:
        """Return the rule for a solver: `Unrolled` gets as many steps as the solver takes."""
        if isinstance(rule, Unrolled):
            return replace(rule, steps=self.solve(solver).evaluations)
        return rule

    def time(self, setting: Solving) -> float:
        gc.collect(1)  # Objects of the last step; a full collection would take longer than a step.
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
        solutions = self.record.solutions
        if not solutions:
            raise ValueError(
                "the model did not run its equilibrium layer on these images: pass a model whose "
                "forward pass does"
            )
        return solutions

    def gradient(self) -> Tensor:
        """Return the gradient of all parameters in one vector; zero for unused parameters."""
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.parameters
        ]
        return torch.cat([gradient.detach().double().flatten() for gradient in gradients])


def _exact_gradient(bench: _Bench) -> Tensor:
    """Return the gradient of a float64 copy with solves to `EXACT_TOLERANCE`."""
    if bench.images.device.type == "mps":
        raise ValueError(
            "the exact gradient needs float64, which mps does not support: tune on the CPU"
        )
    reference = _Bench(copy.deepcopy(bench.model).double(), bench.images.double(), bench.loss)
    limits: dict[str, Any] = {"tolerance": EXACT_TOLERANCE, "max_iterations": EXACT_ITERATIONS}
    reference.run(Solving(Anderson(**limits), Implicit(**limits)))
    solutions: list[Solution | LinearSolution] = [*reference.solutions()]
    for solution in [*solutions, *reference.record.backward]:
        if not bool(solution.converged.all()):
            raise ConvergenceError(
                "the exact gradient, with which every setting is compared, did not converge: "
                + solution.summary()
            )
    return reference.gradient()


def _compare(gradient: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return cosine and relative error; NaN if a gradient is zero or not finite."""
    norms = torch.linalg.vector_norm(gradient), torch.linalg.vector_norm(exact)
    cosine = torch.dot(gradient, exact) / (norms[0] * norms[1])
    error = torch.linalg.vector_norm(gradient - exact) / norms[1]
    # With rounding errors, the cosine of equal vectors can exceed 1.
    return float(cosine.clamp(-1, 1)), float(error)


def _recorded_steps(rule: GradientRule) -> int | None:
    """Return the number of steps that a rule without a backward solve differentiates."""
    if isinstance(rule, Phantom | Unrolled):
        return rule.steps
    return 1 if isinstance(rule, OneStep) else None


def _random_combination(output: Tensor) -> Tensor:
    """Return a fixed random linear combination, whose gradient depends on all outputs."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the output of the model must be a tensor, got {type(output).__name__}: pass a `loss` "
            "that computes a scalar from it"
        )
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return (output * weights.to(output)).mean()


def overrides(setting: Solving) -> str:
    """Format a setting as keyword arguments of `eq.create_model` and `eq.EquilibriumLayer`."""
    calls = {
        "solver": (setting.solver, _options(setting.solver, always="tolerance")),
        "gradient": (setting.gradient, _options(setting.gradient, always="steps")),
    }
    return ", ".join(
        f"{name}={'eq.' * type(value).__module__.startswith('equilibria.')}"
        f"{type(value).__name__}({options})"
        for name, (value, options) in calls.items()
    )


def labels(setting: Solving) -> tuple[str, str]:
    """Return labels of the solver, without its tolerance, and of the rule."""
    solver = _options(setting.solver, without="tolerance")
    rule = _options(setting.gradient, always="steps")
    return (
        f"{type(setting.solver).__name__} {solver}".rstrip(),
        f"{type(setting.gradient).__name__} {rule}".rstrip(),
    )


def _options(obj: object, *, always: str = "", without: str = "") -> str:
    """Format the options that differ from their defaults as keyword arguments."""
    if not is_dataclass(obj):
        return ""
    options = []
    for field in fields(obj):
        value = getattr(obj, field.name)
        is_default = field.default is not MISSING and value == field.default
        if field.name == always or not (is_default or field.name == without):
            options.append(f"{field.name}={value!r}")
    return ", ".join(options)
