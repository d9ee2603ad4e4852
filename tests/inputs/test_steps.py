"""The engine for unconstrained inputs: prediction of z and μ, and quasi-Newton steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equilibria.inputs import L2Ball, SearchSettings, optimize_input
from equilibria.inputs.engines.secant import Secants
from equilibria.inputs.steps import QuasiNewton
from tests.inputs.small_problem import inputs, ridge, smooth_model, squared_distance


def test_linear_dependence_is_predicted_exactly() -> None:
    """This holds in the span of the recorded steps; there is no prediction orthogonal to it."""
    torch.manual_seed(0)
    slope = torch.randn(5, 7).double()
    x = torch.randn(2, 5).double()
    secants = Secants(memory=2)
    steps = torch.randn(2, 2, 5).double()
    for step in (torch.zeros(2, 5), *steps):
        x = x + step
        secants.observe(x, (x @ slope, -x))
    ahead = x + 0.3 * steps[0] - 0.8 * steps[1]
    z, mu = secants.predict(ahead)
    torch.testing.assert_close(z, ahead @ slope, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mu, -ahead, rtol=1e-4, atol=1e-4)
    across = torch.linalg.svd(steps.transpose(0, 1)).Vh[:, 2]
    torch.testing.assert_close(secants.predict(x + across)[0], x @ slope)


def test_zero_step_predicts_no_change() -> None:
    secants = Secants(memory=2)
    x, value = torch.ones(1, 3), torch.ones(1, 4)
    for _ in range(3):
        secants.observe(x, (value,))
    assert torch.equal(secants.predict(x + 1)[0], value)


def test_quasi_newton_steps_minimize_a_quadratic() -> None:
    """Rows converge independently, for any conditioning."""
    scales = torch.tensor([[1.0, 10.0, 100.0], [100.0, 1.0, 3.0]]).double()
    x = torch.ones(2, 3).double()
    newton = QuasiNewton(memory=8)
    running = torch.ones(2, dtype=torch.bool)
    for _ in range(30):
        gradient = scales * x
        newton.observe(x, gradient, running)
        x = x - newton.direction(gradient, torch.full((2,), 1e-2).double())
    assert float(x.abs().max()) < 1e-8


def test_negative_curvature_is_ignored() -> None:
    newton = QuasiNewton(memory=4)
    running = torch.ones(1, dtype=torch.bool)
    for x in (torch.tensor([[1.0]]), torch.tensor([[2.0]])):
        newton.observe(x, -x, running)
    direction = newton.direction(torch.tensor([[1.0]]), torch.tensor([0.5]))
    assert torch.equal(direction, torch.tensor([[0.5]]))


def test_prediction_reduces_the_residuals_of_z_and_mu() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    lags = []
    for memory in (0, 2):
        result = optimize_input(
            model,
            lambda outputs: -loss(outputs),
            x0,
            constraint=L2Ball(x0, 2.0),
            settings=SearchSettings(
                normalize=True, step_size=0.2, verify=False, polish=False, tolerance=1e-12
            ),
            iterations=8,
            engine={"name": "secant", "memory": memory, "decay": "none"},
        )
        lags.append(float(torch.maximum(result.state_residual, result.adjoint_residual).mean()))
    assert lags[1] < 0.7 * lags[0]


def test_search_without_verify_has_no_check_evaluations() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    options: dict[str, Any] = {"penalty": ridge, "iterations": 40}
    settings = SearchSettings(tolerance=1e-6)
    checked = optimize_input(model, loss, x0, settings=settings, **options)
    bare = replace(settings, verify=False, polish=False)
    result = optimize_input(model, loss, x0, settings=bare, **options)
    assert checked.check_evaluations > 0
    assert result.check_evaluations == 0
    torch.testing.assert_close(result.loss, checked.loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.x, checked.x, rtol=1e-2, atol=1e-2)


def test_parameters_are_constant_and_keep_requires_grad() -> None:
    """No graph contains them, and they require gradients throughout the search."""
    model = smooth_model()
    model.head.bias.requires_grad_(False)
    original = {name: p.requires_grad for name, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    attached = []

    def loss(outputs: Tensor) -> Tensor:
        assert {name: p.requires_grad for name, p in model.named_parameters()} == original
        if outputs.requires_grad:
            reached = torch.autograd.grad(
                outputs.sum(), trained, retain_graph=True, allow_unused=True
            )
            attached.append(any(gradient is not None for gradient in reached))
        return outputs.square().sum(dim=1)

    optimize_input(model, loss, inputs(), iterations=3)
    assert attached
    assert not any(attached)


def test_inactive_row_keeps_its_curvature() -> None:
    """New pairs of other rows must not replace it in the memory."""
    torch.manual_seed(0)
    newton = QuasiNewton(memory=3)
    curvature = torch.tensor([2.0, 5.0]).double()[:, None]
    for _ in range(4):
        x = torch.randn(2, 4).double()
        newton.observe(x, curvature * x, torch.ones(2, dtype=torch.bool))
    gradient, first = torch.randn(2, 4).double(), torch.ones(2).double()
    known = newton.direction(gradient, first)
    for _ in range(5):
        x = torch.randn(2, 4).double()
        newton.observe(x, curvature * x, torch.tensor([True, False]))
    assert torch.equal(newton.direction(gradient, first)[1], known[1])
    torch.testing.assert_close(known, gradient / curvature)


def test_quasi_newton_steps_help_ill_conditioned_problems() -> None:
    model = smooth_model(activation="identity")
    weights = torch.tensor([1.0, 30.0, 0.1, 5.0]).double()

    def penalty(x: Tensor) -> Tensor:
        return (weights * x.square()).sum(dim=1)

    options: dict[str, Any] = {
        "penalty": penalty,
        "iterations": 60,
        "settings": SearchSettings(tolerance=1e-6),
    }
    loss, x0 = squared_distance(), inputs()
    newton = optimize_input(model, loss, x0, **options)
    plain = optimize_input(
        model, loss, x0, **options, engine={"name": "secant", "rule": "gradient"}
    )
    assert bool(newton.converged.all())
    assert int(newton.iterations.max()) < 0.7 * int(plain.iterations.max())


def test_secant_is_the_default_for_unconstrained_inputs() -> None:
    result = optimize_input(smooth_model(), squared_distance(), inputs(), iterations=2)
    assert result.engine == "secant"
