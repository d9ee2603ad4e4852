"""The engine for constrained inputs: its iteration and its result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from equilibria.context.state import state_tensors
from equilibria.inputs import Box, L2Ball, SearchSettings, get_engine, optimize_input
from tests.inputs.small_problem import inputs, smooth_model, squared_distance

RADIUS = 0.5
SEARCH_ONLY = SearchSettings(normalize=True, verify=False, polish=False, tolerance=1e-300)
NORMALIZED = SearchSettings(normalize=True)


def farther(outputs: Tensor) -> Tensor:
    return -squared_distance(len(outputs))(outputs)


def test_momentum_is_the_default_for_normalized_steps() -> None:
    model, x0 = smooth_model(), inputs()
    options: dict[str, Any] = {"constraint": L2Ball(x0, RADIUS), "iterations": 2}
    assert optimize_input(model, farther, x0, settings=NORMALIZED, **options).engine == "momentum"
    assert optimize_input(model, farther, x0, **options).engine == "secant"


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_iteration_is_that_of_the_docstring(momentum: float) -> None:
    """The reference is for one sample, with a lag limit that disables additional sweeps."""
    model, x0 = smooth_model(), inputs(1)
    iterations, share, region = 6, 8.0, L2Ball(x0, RADIUS) & Box(-1.5, 1.5)
    result = optimize_input(
        model,
        farther,
        x0,
        constraint=region,
        iterations=iterations,
        engine={"name": "momentum", "momentum": momentum, "lag_limit": 1e9},
        settings=SEARCH_ONLY,
    )
    cell = model.layer.cell
    last = ahead = region.project(x0)
    z = mu = slope = None
    for k in range(iterations):
        x = ahead.detach().requires_grad_()
        context = cell.inject(model.stem(x))
        if z is None:
            loose = type(model.layer.solver)(tolerance=0.1)
            (z,) = state_tensors(model.layer.solve(model.stem(x).detach(), solver=loose).state)
        z = z.detach().requires_grad_()
        (image,) = state_tensors(cell.step(z, context))
        leaf = image.detach().requires_grad_()
        loss = farther(model.head(cell.output(leaf, context))).sum()
        (new_slope,) = torch.autograd.grad(loss, leaf)
        if mu is None:
            mu = new_slope
            for _ in range(3):
                mu = torch.autograd.grad(image, z, mu, retain_graph=True)[0] + new_slope
        else:
            mu = mu + new_slope - slope
        pulled, gradient = torch.autograd.grad(image, (z, x), mu)
        z, mu, slope = image.detach(), pulled + new_slope, new_slope
        fall = (1 + math.cos(math.pi * k / (iterations - 1))) / 2
        length = share * RADIUS * (0.05 + 0.95 * fall)
        moved = region.project((x - length * gradient / gradient.norm()).detach())
        ahead, last = (moved + momentum * (moved - last)).clamp(-1.5, 1.5), moved
    torch.testing.assert_close(result.x, last, rtol=1e-8, atol=1e-9)
    assert result.evaluations >= iterations
    # One more product is for the residuals of the result.
    assert result.vjps == iterations + 3 + 1


def test_result_satisfies_the_optimality_conditions() -> None:
    """At a maximum on the sphere the gradient is normal to it."""
    model, x0 = smooth_model(), inputs()
    result = optimize_input(
        model, farther, x0, constraint=L2Ball(x0, RADIUS), settings=NORMALIZED, iterations=60
    )
    leaf = result.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(farther(model(leaf)).sum(), leaf)
    outward = (result.x - x0) / RADIUS
    cosine = (-gradient * outward).sum(dim=1) / gradient.norm(dim=1)
    assert float((1 - cosine).max()) <= 1e-4


def test_only_lagging_problems_have_additional_sweeps() -> None:
    model, x0 = smooth_model(), inputs()
    options: dict[str, Any] = {
        "constraint": L2Ball(x0, 2.0),
        "iterations": 8,
        "settings": SEARCH_ONLY,
    }

    def run(limit: float, rows: slice = slice(None)) -> Any:
        changed = {**options, "constraint": L2Ball(x0[rows], 2.0)}
        return optimize_input(
            model,
            lambda outputs: -outputs.square().sum(dim=1),
            x0[rows],
            engine={"name": "auto", "lag_limit": limit},
            **changed,
        )

    never, often = run(1e9), run(1e-4)
    assert often.evaluations > never.evaluations
    assert often.vjps > never.vjps
    assert float(often.state_residual.max()) < float(never.state_residual.max())
    for row in range(3):
        alone = run(1e-4, slice(row, row + 1))
        torch.testing.assert_close(alone.x[0], often.x[row], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"momentum": -0.1}, r"momentum must be in \[0, 1\)"),
        ({"lag_limit": 0.0}, "lag_limit must be positive"),
        ({"share": -1.0}, "share must be positive"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_engine("momentum", **options)
