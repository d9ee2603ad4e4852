"""Tuning: measurements, recommendation, and no effect on the model."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.training.tuning import (
    Measurement,
    TuningReport,
    explain_none,
    overrides,
    recommend,
    tune,
)


def small_model(**options: object) -> nn.Module:
    torch.manual_seed(0)
    settings = {"in_channels": 1, "channels": 6, "width": 6, "init_scale": 2.0, **options}
    return eq.create_model("opteq-small", **settings)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def report(images: Tensor) -> TuningReport:
    return tune(
        small_model(),
        images,
        solvers=["picard", "anderson"],
        tolerances=[1e-2, 1e-4],
        repeats=1,
    )


def only(report: TuningReport, rule: type[eq.gradients.GradientRule]) -> list[Measurement]:
    return [m for m in report.measurements if isinstance(m.setting.gradient, rule)]


def test_all_solvers_are_measured_with_all_tolerances(report: TuningReport) -> None:
    measured = {
        (type(m.setting.solver), m.setting.tolerance)
        for m in report.measurements
        if m.setting.gradient == eq.Implicit()
    }
    expected = {(solver, t) for solver in (eq.Picard, eq.Anderson) for t in (1e-2, 1e-4)}
    assert measured == expected | {(eq.Auto, 1e-4)}


def test_the_best_solver_is_measured_with_all_gradient_rules(report: TuningReport) -> None:
    (one_step,), (phantom,), (unrolled,), (loose,) = (
        only(report, eq.OneStep),
        only(report, eq.Phantom),
        only(report, eq.Unrolled),
        [m for m in only(report, eq.Implicit) if m.setting.gradient != eq.Implicit()],
    )
    best = loose.setting.solver
    assert best == one_step.setting.solver == phantom.setting.solver == unrolled.setting.solver
    assert loose.setting.gradient == eq.Implicit(tolerance=best.tolerance)


def test_the_report_is_sorted_and_has_the_present_setting(report: TuningReport) -> None:
    seconds = [m.seconds for m in report.measurements]
    assert seconds == sorted(seconds)
    assert report.present in report.measurements
    assert report.present.setting == eq.Solving(eq.Auto(), eq.Implicit())
    assert report.present.found_by == report.auto == "Anderson"
    assert report.recommended == recommend(report.measurements)


def test_implicit_gradients_are_accurate_and_one_step_is_not(report: TuningReport) -> None:
    exact = [
        m
        for m in only(report, eq.Implicit)
        if m.setting.tolerance <= 1e-4
        and m.setting.gradient.tolerance_with(m.setting.solver) <= 1e-5
    ]
    assert exact
    # Both residuals are relative, and (I − J)⁻¹ is below 1/(1 − ζ²) < 6.
    assert all(m.cosine > 0.999 and m.relative_error < 1e-2 for m in exact)
    (one_step,) = only(report, eq.OneStep)
    assert one_step.cosine < min(m.cosine for m in exact)
    assert one_step.relative_error > max(m.relative_error for m in exact)


def test_tighter_tolerances_have_smaller_errors(report: TuningReport) -> None:
    errors = {
        (type(m.setting.solver), m.setting.tolerance): m.relative_error
        for m in report.measurements
        if m.setting.gradient == eq.Implicit()
    }
    for solver in (eq.Picard, eq.Anderson):
        assert errors[solver, 1e-4] < 0.1 * errors[solver, 1e-2]


def test_counts_match_those_of_the_model(report: TuningReport, images: Tensor) -> None:
    for measurement in report.measurements:
        setting = measurement.setting
        model = small_model(solver=setting.solver, gradient=setting.gradient)
        model(images).sum().backward()
        assert measurement.evaluations == model.last_solution.evaluations
        assert measurement.share_converged == model.last_solution.share_converged
        assert measurement.found_by == model.last_solution.solver
        if isinstance(setting.gradient, eq.Implicit):
            assert measurement.backward_converged
            assert measurement.backward_evaluations > 0
        elif isinstance(setting.gradient, eq.OneStep):
            assert measurement.backward_evaluations == 1
        else:
            assert measurement.backward_evaluations == setting.gradient.steps


def test_the_backward_count_matches_the_backward_solve(images: Tensor) -> None:
    weights = torch.rand(4, 10, generator=torch.Generator().manual_seed(2))

    def loss(output: Tensor) -> Tensor:
        return (output * weights.to(output)).sum()

    result = tune(
        small_model(),
        images,
        loss=loss,
        solvers=["picard"],
        tolerances=[1e-4],
        gradients=["implicit"],
        repeats=1,
    )
    model = small_model()
    loss(model(images)).backward()
    assert result.present.backward_evaluations == model.last_backward.evaluations


def test_unrolled_uses_as_many_steps_as_the_solver(report: TuningReport) -> None:
    (unrolled,) = only(report, eq.Unrolled)
    (solved,) = (
        m
        for m in report.measurements
        if m.setting == eq.Solving(unrolled.setting.solver, eq.Implicit())
    )
    assert unrolled.setting.gradient.steps == solved.evaluations


@pytest.mark.parametrize("training", [True, False])
def test_tuning_does_not_change_the_model(images: Tensor, training: bool) -> None:
    model = small_model(strict=True, norm="estimate").train(training)
    model(images).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    solution, backward = model.last_solution, model.last_backward
    random_state = torch.get_rng_state()
    tune(model, images, solvers=["picard"], tolerances=[1e-2], repeats=2)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (model.layer.solver, model.layer.gradient) == (eq.Auto(), eq.Implicit())
    assert model.layer.strict
    assert [m.training for m in model.modules()] == [training] * len(list(model.modules()))
    assert model.last_solution is solution
    assert model.last_backward is backward
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_failed_solves_are_measured_without_raising(images: Tensor) -> None:
    model = small_model(strict=True, max_iterations=2, gradient=eq.Implicit(max_iterations=1))
    result = tune(model, images, solvers=["picard"], tolerances=[1e-6], repeats=1)
    assert result.present.share_converged == 0
    assert not result.present.backward_converged
    assert result.recommended is None
    assert result.speedup is None


def test_warm_starts_are_disabled(images: Tensor) -> None:
    def evaluations(warm_start: bool) -> int | None:
        model = small_model(gradient=eq.Implicit(warm_start=warm_start))
        options = {"solvers": ["picard"], "tolerances": [1e-4], "gradients": ["implicit"]}
        return tune(model, images, repeats=1, **options).present.backward_evaluations

    assert evaluations(True) == evaluations(False)


@pytest.mark.parametrize("adjoint", ["one_step", "unrolled"])
def test_a_single_approximate_rule_can_be_tuned(images: Tensor, adjoint: str) -> None:
    result = tune(
        small_model(),
        images,
        solvers=["picard", "anderson"],
        tolerances=[1e-2, 1e-4],
        gradients=[adjoint],
        repeats=1,
    )
    rule = type(eq.gradients.get_gradient(adjoint))
    others = [m for m in result.measurements if m is not result.present]
    assert len(others) == 4
    assert all(isinstance(m.setting.gradient, rule) for m in others)


def test_the_present_setting_is_measured_once(images: Tensor) -> None:
    model = small_model(solver="picard", tolerance=1e-2)
    options = {"solvers": ["picard"], "tolerances": [1e-2], "gradients": ["implicit"]}
    result = tune(model, images, repeats=1, **options)
    assert sorted(overrides(m.setting) for m in result.measurements) == [
        "solver=eq.Picard(tolerance=0.01), gradient=eq.Implicit()",
        "solver=eq.Picard(tolerance=0.01), gradient=eq.Implicit(tolerance=0.01)",
    ]


def test_progress_ends_at_its_total(images: Tensor) -> None:
    calls: list[tuple[int, int]] = []
    result = tune(
        small_model(),
        images,
        solvers=["picard"],
        tolerances=[1e-2],
        repeats=2,
        on_progress=lambda done, total: calls.append((done, total)),
    )
    assert [done for done, _ in calls] == list(range(1, len(calls) + 1))
    assert calls[-1] == (2 * len(result.measurements), 2 * len(result.measurements))


def test_a_layer_can_be_tuned() -> None:
    layer = eq.EquilibriumLayer(
        eq.Input(eq.Dense(3, 5)) + eq.Quadratic(eq.Dense(4, 5, norm="bound", zeta=0.5))
    )
    result = tune(layer, torch.randn(6, 3), solvers=["picard"], tolerances=[1e-3], repeats=1)
    assert result.recommended is not None


def test_overrides_evaluate_to_the_setting() -> None:
    setting = eq.Solving(
        eq.Anderson(tolerance=1e-4, max_iterations=50), eq.Unrolled(steps=7, checkpoint=2)
    )
    assert eval(f"dict({overrides(setting)})", {"eq": eq, "dict": dict}) == {
        "solver": setting.solver,
        "gradient": setting.gradient,
    }


GOOD = Measurement(
    setting=eq.Solving(eq.Picard(), eq.Implicit()),
    found_by="Picard",
    seconds=1.0,
    evaluations=10,
    backward_evaluations=8,
    share_converged=1.0,
    backward_converged=True,
    cosine=0.9999,
    relative_error=0.01,
)
FLAWED = [
    replace(GOOD, seconds=0.1, share_converged=0.75),
    replace(GOOD, seconds=0.2, backward_converged=False),
    replace(GOOD, seconds=0.3, cosine=0.9989),
    replace(GOOD, seconds=0.4, cosine=math.nan),
]


def test_the_fastest_qualifying_measurement_is_recommended() -> None:
    faster = replace(GOOD, seconds=0.5, cosine=0.999)
    assert recommend([GOOD, *FLAWED, faster]) is faster
    assert recommend([*FLAWED, GOOD]) is GOOD


@pytest.mark.parametrize("flawed", FLAWED)
def test_flawed_measurements_do_not_qualify(flawed: Measurement) -> None:
    assert not flawed.qualifies
    assert recommend([flawed]) is None


def test_the_reason_for_no_recommendation_is_explained() -> None:
    assert recommend(FLAWED) is None
    reason = explain_none(FLAWED)
    assert "none of 4 settings qualifies" in reason
    assert "with 1, some samples did not converge (raise max_iterations" in reason
    assert "with 1, the backward solve did not converge" in reason
    assert (
        "with 2, the cosine between the gradient and the exact one is below 0.999, at most 0.9989"
        in reason
    )
    assert "did not converge" not in explain_none(FLAWED[2:])


def test_the_speedup_is_relative_to_the_present_setting() -> None:
    slow = replace(GOOD, seconds=3.0)
    assert TuningReport((GOOD, slow), present=slow, recommended=GOOD, auto="Picard").speedup == 3


def test_models_that_cannot_be_tuned_raise(images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"Flatten has no equilibrium layer.*opteq-small"):
        tune(nn.Flatten(), images)
    with pytest.raises(ValueError, match=r"requires_grad_\(\)"):
        tune(small_model().requires_grad_(False), images)
    first, second = small_model().layer, small_model(tolerance=1e-2).layer
    with pytest.raises(ValueError, match="the same solver and gradient rule first"):
        tune(nn.Sequential(first, second), images)


def test_a_map_without_an_exact_gradient_raises() -> None:
    cell = eq.EquilibriumLayer(eq.Input(eq.Dense(3, 5)) + eq.Quadratic(eq.Dense(4, 5)))
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.fill_(3.0)
    with pytest.raises(eq.ConvergenceError, match=r"exact gradient.*norm='bound'"):
        tune(cell, torch.rand(2, 3), solvers=["picard"], repeats=1)


def test_invalid_options_raise_with_a_remedy(images: Tensor) -> None:
    with pytest.raises(ValueError, match="did you mean 'picard'"):
        tune(small_model(), images, solvers=["pickard"])
    with pytest.raises(ValueError, match="did you mean 'phantom'"):
        tune(small_model(), images, gradients=["fantom"])
    with pytest.raises(ValueError, match="tolerance must be in"):
        tune(small_model(), images, tolerances=[0.0])
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        tune(small_model(), images, repeats=0)
    with pytest.raises(ValueError, match="at least one solver"):
        tune(small_model(), images, solvers=[])


def test_an_output_that_is_not_a_tensor_needs_a_loss(images: Tensor) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x), x

    options = {"solvers": ["picard"], "tolerances": [1e-2], "repeats": 1}
    with pytest.raises(TypeError, match="pass a `loss`"):
        tune(Pair(), images, **options)
    assert tune(Pair(), images, loss=lambda pair: pair[0].square().sum(), **options).recommended
