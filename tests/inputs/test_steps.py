"""The engine of free inputs: prediction of z and μ, quasi-Newton steps, and leaving checks out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equilibria.inputs import L2Ball, SearchSettings, optimize_input
from equilibria.inputs.engines.secant import Secants
from equilibria.inputs.steps import QuasiNewton
from tests.inputs.small_problem import inputs, ridge, smooth_model, squared_distance


def test_a_linear_dependence_is_predicted_exactly() -> None:
    """In the span of the steps seen, and not at all across it."""
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


def test_a_step_that_did_not_move_predicts_nothing() -> None:
    secants = Secants(memory=2)
    x, value = torch.ones(1, 3), torch.ones(1, 4)
    for _ in range(3):
        secants.observe(x, (value,))
    assert torch.equal(secants.predict(x + 1)[0], value)


def test_quasi_newton_steps_solve_a_quadratic() -> None:
    """Each row its own, in about as many steps as dimensions, whatever the conditioning."""
    scales = torch.tensor([[1.0, 10.0, 100.0], [100.0, 1.0, 3.0]]).double()
    x = torch.ones(2, 3).double()
    newton = QuasiNewton(memory=8)
    running = torch.ones(2, dtype=torch.bool)
    for _ in range(30):
        gradient = scales * x
        newton.observe(x, gradient, running)
        x = x - newton.direction(gradient, torch.full((2,), 1e-2).double())
    assert float(x.abs().max()) < 1e-8


def test_negative_curvature_is_left_out() -> None:
    newton = QuasiNewton(memory=4)
    running = torch.ones(1, dtype=torch.bool)
    for x in (torch.tensor([[1.0]]), torch.tensor([[2.0]])):
        newton.observe(x, -x, running)
    direction = newton.direction(torch.tensor([[1.0]]), torch.tensor([0.5]))
    assert torch.equal(direction, torch.tensor([[0.5]]))


def test_prediction_follows_x_more_closely() -> None:
    """The same iterations with and without: what z and μ lag behind falls."""
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    lags = []
    for memory in (0, 2):
        found = optimize_input(
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
        lags.append(float(torch.maximum(found.state_residual, found.adjoint_residual).mean()))
    assert lags[1] < 0.7 * lags[0]


def test_without_checks_the_search_alone_is_paid_for() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    options: dict[str, Any] = {"penalty": ridge, "iterations": 40}
    settings = SearchSettings(tolerance=1e-6)
    checked = optimize_input(model, loss, x0, settings=settings, **options)
    bare = replace(settings, verify=False, polish=False)
    found = optimize_input(model, loss, x0, settings=bare, **options)
    assert checked.check_evaluations > 0
    assert found.check_evaluations == 0
    torch.testing.assert_close(found.loss, checked.loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.x, checked.x, rtol=1e-2, atol=1e-2)


def test_parameters_are_constants_of_the_search_and_left_alone() -> None:
    """No graph leads to them, and they themselves want gradients all the while."""
    model = smooth_model()
    model.head.bias.requires_grad_(False)
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    attached = []

    def loss(outputs: Tensor) -> Tensor:
        assert {name: p.requires_grad for name, p in model.named_parameters()} == wanted
        if outputs.requires_grad:
            reached = torch.autograd.grad(
                outputs.sum(), trained, retain_graph=True, allow_unused=True
            )
            attached.append(any(gradient is not None for gradient in reached))
        return outputs.square().sum(dim=1)

    optimize_input(model, loss, inputs(), iterations=3)
    assert attached
    assert not any(attached)


def test_a_row_that_rests_keeps_its_curvature() -> None:
    """What others go on to learn must not push it out of the memory."""
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


def test_a_poor_conditioning_takes_fewer_steps_than_plain_ones() -> None:
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


def test_free_inputs_have_this_engine_by_default() -> None:
    found = optimize_input(smooth_model(), squared_distance(), inputs(), iterations=2)
    assert found.engine == "secant"
