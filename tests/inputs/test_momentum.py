"""The engine of constrained inputs: what a step of it is, and where it ends."""

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
BARE = SearchSettings(normalize=True, verify=False, polish=False, tolerance=1e-300)
NORMALIZED = SearchSettings(normalize=True)


def farther(outputs: Tensor) -> Tensor:
    return -squared_distance(len(outputs))(outputs)


def test_it_is_the_default_of_normalized_steps() -> None:
    model, x0 = smooth_model(), inputs()
    options: dict[str, Any] = {"constraint": L2Ball(x0, RADIUS), "iterations": 2}
    assert optimize_input(model, farther, x0, settings=NORMALIZED, **options).engine == "momentum"
    assert optimize_input(model, farther, x0, **options).engine == "secant"


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_it_is_the_iteration_that_its_docstring_states(momentum: float) -> None:
    """Written out for one sample, with a lag limit that never asks for more sweeps."""
    model, x0 = smooth_model(), inputs(1)
    iterations, share, region = 6, 8.0, L2Ball(x0, RADIUS) & Box(-1.5, 1.5)
    found = optimize_input(
        model,
        farther,
        x0,
        constraint=region,
        iterations=iterations,
        engine={"name": "momentum", "momentum": momentum, "lag_limit": 1e9},
        settings=BARE,
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
        fresh = image.detach().requires_grad_()
        (now,) = torch.autograd.grad(farther(model.head(cell.output(fresh, context))).sum(), fresh)
        if mu is None:
            mu = now
            for _ in range(3):
                mu = torch.autograd.grad(image, z, mu, retain_graph=True)[0] + now
        else:
            mu = mu + now - slope
        pulled, gradient = torch.autograd.grad(image, (z, x), mu)
        z, mu, slope = image.detach(), pulled + now, now
        fall = (1 + math.cos(math.pi * k / (iterations - 1))) / 2
        length = share * RADIUS * (0.05 + 0.95 * fall)
        moved = region.project((x - length * gradient / gradient.norm()).detach())
        ahead, last = (moved + momentum * (moved - last)).clamp(-1.5, 1.5), moved
    torch.testing.assert_close(found.x, last, rtol=1e-8, atol=1e-9)
    assert found.evaluations >= iterations
    # One more is for the residuals that the result reports.
    assert found.vjps == iterations + 3 + 1


def test_it_ends_where_no_direction_in_the_region_is_better() -> None:
    """At a maximum on the sphere the gradient is normal to it."""
    model, x0 = smooth_model(), inputs()
    found = optimize_input(
        model, farther, x0, constraint=L2Ball(x0, RADIUS), settings=NORMALIZED, iterations=60
    )
    leaf = found.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(farther(model(leaf)).sum(), leaf)
    outward = (found.x - x0) / RADIUS
    cosine = (-gradient * outward).sum(dim=1) / gradient.norm(dim=1)
    assert float((1 - cosine).max()) <= 1e-4


def test_a_lag_asks_for_more_sweeps_where_it_is_and_nowhere_else() -> None:
    model, x0 = smooth_model(), inputs()
    options: dict[str, Any] = {"constraint": L2Ball(x0, 2.0), "iterations": 8, "settings": BARE}

    def run(limit: float, rows: slice = slice(None)) -> Any:
        chosen = {**options, "constraint": L2Ball(x0[rows], 2.0)}
        return optimize_input(
            model,
            lambda outputs: -outputs.square().sum(dim=1),
            x0[rows],
            engine={"name": "auto", "lag_limit": limit},
            **chosen,
        )

    never, often = run(1e9), run(1e-4)
    assert often.evaluations > never.evaluations
    assert often.vjps > never.vjps
    assert float(often.state_residual.max()) < float(never.state_residual.max())
    for row in range(3):
        alone = run(1e-4, slice(row, row + 1))
        torch.testing.assert_close(alone.x[0], often.x[row], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"momentum": -0.1}, r"momentum must be in \[0, 1\)"),
        ({"lag_limit": 0.0}, "lag_limit must be positive"),
        ({"share": -1.0}, "share must be positive"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get_engine("momentum", **options)
