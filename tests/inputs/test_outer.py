"""Gradients of an optimum in the parameters agree with differences of re-optimized ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.inputs import (
    Box,
    InputResult,
    L2Ball,
    SearchSettings,
    optimal_input,
    optimal_value,
    optimize_input,
)
from tests.inputs.small_problem import inputs, ridge, smooth_model, squared_distance

X0 = inputs().clamp(-1, 1)
CASES: dict[str, dict[str, Any]] = {
    "ridge": {"penalty": ridge},
    "ball": {"constraint": L2Ball(X0, 0.5)},
    "ball and box": {"constraint": L2Ball(X0, 0.5) & Box(-1.0, 1.0)},
}


def optimum(model: eq.models.EquilibriumClassifier, case: str, start: Tensor = X0) -> InputResult:
    result = optimize_input(
        model,
        squared_distance(),
        start,
        **CASES[case],
        iterations=400,
        settings=SearchSettings(tolerance=1e-9),
    )
    assert bool(result.converged.all()), result.summary()
    return result


def difference_quotients(
    model: eq.models.EquilibriumClassifier, value: Callable[[], Tensor], step: float
) -> list[list[float]]:
    """Return dv/dθ along a random direction of each parameter, for every v of the values."""
    quotients = []
    for direction, parameter in zip(directions(model), model.parameters(), strict=True):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step * direction
                values.append(value())
                parameter -= sign * step * direction
        quotients.append(((values[0] - values[1]) / (2 * step)).tolist())
    return quotients


def directions(model: eq.models.EquilibriumClassifier) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(p.shape, generator=generator).double() for p in model.parameters()]


def along(model: eq.models.EquilibriumClassifier, gradients: Any) -> list[float]:
    pairs = zip(directions(model), gradients, strict=True)
    return [float((d * g).sum()) for d, g in pairs]


@pytest.mark.parametrize(
    "case", ["ridge", "ball", pytest.param("ball and box", marks=pytest.mark.slow)]
)
def test_gradients_of_optimal_value_and_optimal_input(case: str) -> None:
    """Both use the same optima of nearby models, which take most of the time."""
    model = smooth_model()
    parameters = list(model.parameters())

    def outer(x: Tensor) -> Tensor:
        return (model(x).sin() * torch.arange(1, 4)).sum() + x.cos().sum()

    def nearby() -> Tensor:
        reoptimized = optimum(model, case, result.x)
        return torch.stack([reoptimized.loss.sum(), outer(reoptimized.x)])

    result = optimum(model, case)
    of_value, of_outer = zip(*difference_quotients(model, nearby, 1e-4), strict=True)

    value = optimal_value(result)
    torch.testing.assert_close(value.detach(), result.loss)
    gradients = torch.autograd.grad(value.sum(), parameters)
    assert along(model, gradients) == pytest.approx(of_value, rel=1e-5, abs=1e-5)

    x = optimal_input(result, tolerance=1e-10)
    assert torch.equal(x, result.x)
    gradients = torch.autograd.grad(outer(x), parameters)
    assert along(model, gradients) == pytest.approx(of_outer, rel=1e-4, abs=1e-5)
    detached = torch.autograd.grad(outer(optimal_input(result, "detached")), parameters)
    assert along(model, detached) != pytest.approx(of_outer, rel=1e-2, abs=1e-3)


def test_optimal_input_of_groups_is_differentiable() -> None:
    model, groups = smooth_model(), torch.tensor([0, 1, 0])

    def solve(start: Tensor) -> InputResult:
        return optimize_input(
            model,
            squared_distance(),
            start,
            groups=groups,
            penalty=ridge,
            iterations=400,
            settings=SearchSettings(tolerance=1e-9),
        )

    result = solve(X0[:2])
    gradients = torch.autograd.grad(
        optimal_input(result, tolerance=1e-10).cos().sum(),
        list(model.parameters()),
        materialize_grads=True,
        allow_unused=True,
    )
    expected = difference_quotients(model, lambda: solve(result.x).x.cos().sum()[None], 1e-4)
    assert along(model, gradients) == pytest.approx([v for (v,) in expected], rel=1e-4, abs=1e-5)


def test_implicit_gradient_agrees_with_unrolling() -> None:
    """The reference is gradient descent on x, differentiated step by step."""
    model, loss = smooth_model(), squared_distance()
    parameters = list(model.parameters())
    x = X0.clone().requires_grad_()
    for _ in range(100):
        value = loss(model(x)).sum() + ridge(x).sum()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        x = x - 0.9 * gradient
    unrolled = torch.autograd.grad(x.sin().sum(), parameters)
    result = optimum(model, "ridge")
    implicit = torch.autograd.grad(optimal_input(result, tolerance=1e-10).sin().sum(), parameters)
    for gradient, expected in zip(implicit, unrolled, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_optimal_value_needs_a_polished_adjoint() -> None:
    model = smooth_model()
    options: dict[str, Any] = {"penalty": ridge, "iterations": 3}
    parameters = list(model.parameters())

    def gradient(**more: Any) -> Tensor:
        settings = SearchSettings(**more)
        result = optimize_input(model, squared_distance(), X0, settings=settings, **options)
        pieces = torch.autograd.grad(optimal_value(result).sum(), parameters)
        return torch.cat([piece.flatten() for piece in pieces])

    result = optimize_input(model, squared_distance(), X0, **options)
    exact = torch.autograd.grad(squared_distance()(model(result.x)).sum(), parameters)
    reference = torch.cat([piece.flatten() for piece in exact])
    similarity = torch.nn.functional.cosine_similarity
    assert float(similarity(gradient(), reference, dim=0)) > 1 - 1e-8
    assert float(similarity(gradient(polish=False), reference, dim=0)) < 1 - 1e-6


def test_unconverged_optimum_is_rejected() -> None:
    result = optimize_input(smooth_model(), squared_distance(), X0, iterations=2)
    with pytest.raises(eq.ConvergenceError, match="needs a converged search"):
        optimal_input(result)
    assert optimal_input(result, strict=False).requires_grad
    assert not optimal_input(result, "detached").requires_grad
    with pytest.raises(ValueError, match="'implicit' or 'detached'"):
        optimal_input(result, "unrolled")  # type: ignore[arg-type]
