"""The engine "official" is the algorithm of the JIIO paper (Eq. 11, Appendix C.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.context.state import state_tensors
from equilibria.inputs import L2Ball, SearchSettings, get_engine, optimize_input
from tests.inputs.small_problem import HIDDEN, inputs, smooth_model, squared_distance

ALPHA_Z, ALPHA_MU = 0.8, 0.6
NEVER_CONVERGED = SearchSettings(tolerance=1e-300, verify=False)
SETTINGS = {  # Appendix C.3: α_x, α_x after 65 iterations, memory
    "latents": (0.01, 0.003, 40),
    "mnist": (0.6, 0.2, 20),
    "cifar10": (0.1, 0.1, 20),
    "few-shot": (0.04, 0.01, 10),
}


def joint_map(
    model: eq.models.EquilibriumClassifier, loss: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return a function that computes T(z; x), Jᵀμ + ∂ℓ/∂z, (∂T/∂x)ᵀμ and ℓ for one sample."""

    def evaluate(z: Tensor, mu: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z, x = z.clone().requires_grad_(), x.clone().requires_grad_()
        cell = model.layer.cell
        context = cell.inject(model.stem(x[None]))
        (image,) = state_tensors(cell.step(z[None], context))
        cost = loss(model.head(cell.output(z[None], context)))[0]
        (slope,) = torch.autograd.grad(cost, z, retain_graph=True)
        pulled, gradient = torch.autograd.grad(image[0], (z, x), mu)
        return image[0].detach(), (pulled + slope).detach(), gradient.detach(), cost.detach()

    return evaluate


def reference(
    model: eq.models.EquilibriumClassifier,
    loss: Callable[[Tensor], Tensor],
    x0: Tensor,
    iterations: int,
    task: str,
    radius: float | None = None,
    mixed: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the x of lowest cost and the last x of Eq. 11 with type-I Anderson, for one sample."""
    alpha, late, memory = SETTINGS[task]
    evaluate = joint_map(model, loss)

    def project(x: Tensor) -> Tensor:
        if radius is None:
            return x
        return x0 + (x - x0) * min(1.0, radius / max(float((x - x0).norm()), 1e-300))

    z, mu, x = torch.zeros(HIDDEN).double(), torch.zeros(HIDDEN).double(), x0
    points: list[Tensor] = []
    changes: list[Tensor] = []
    best, lowest = x0, torch.inf
    for iteration in range(iterations):
        image, adjoint, gradient, cost = evaluate(z, mu, x)
        if float(cost) < lowest:
            best, lowest = x, float(cost)
        if radius is not None:
            gradient = gradient / max(float(gradient.norm()), 1e-300)
        point = torch.cat([z, mu, x])
        moved = torch.cat(
            [
                (1 - ALPHA_Z) * z + ALPHA_Z * image,
                (1 - ALPHA_MU) * mu + ALPHA_MU * adjoint,
                project(x - (alpha if iteration < 65 else late) * gradient),
            ]
        )
        last = moved[2 * HIDDEN :]
        points, changes = [*points, point], [*changes, moved - point]
        if mixed and iteration:
            start = max(0, len(points) - 1 - memory)
            steps = torch.stack(points[start:]).diff(dim=0)
            turns = torch.stack(changes[start:]).diff(dim=0)
            weights = torch.linalg.solve(steps @ turns.T, steps @ changes[-1])
            moved = moved - weights @ (steps + turns)
        z, mu, x = moved[:HIDDEN], moved[HIDDEN : 2 * HIDDEN], project(moved[2 * HIDDEN :])
    return best, last


@pytest.mark.parametrize("task", SETTINGS)
def test_iteration_is_that_of_the_paper_with_every_step_mixed(task: str) -> None:
    """Mixing must not depend on a small residual, which plain sweeps may never reach."""
    model, loss, x0 = smooth_model(), squared_distance(1), inputs(1)[0]
    radius = 0.5 if task in ("mnist", "cifar10") else None
    normalize = radius is not None
    options: dict[str, Any] = {"settings": replace(NEVER_CONVERGED, normalize=normalize)}
    if radius is not None:
        options["constraint"] = L2Ball(x0[None], radius)
    official = get_engine("official", task=task)
    for iterations in (2, 4, 9):
        options["iterations"] = iterations
        cheapest = optimize_input(model, loss, x0[None], engine=official, **options).x[0]
        last = optimize_input(
            model, loss, x0[None], engine=replace(official, cheapest=False), **options
        ).x[0]
        expected = reference(model, loss, x0, iterations, task, radius)
        torch.testing.assert_close((cheapest, last), expected, rtol=1e-6, atol=1e-8)
    _, plain = reference(model, loss, x0, 9, task, radius, mixed=False)
    assert float((last - plain).norm()) > 1e-3


@pytest.mark.parametrize("task", SETTINGS)
def test_settings_are_those_of_the_appendix(task: str) -> None:
    alpha, late, memory = SETTINGS[task]
    engine = get_engine("official", task=task)
    assert engine.alpha_x == alpha
    assert engine.alpha_x * engine.late_factor == pytest.approx(late)
    assert engine.mixing is not None
    assert engine.mixing.memory == memory
    assert engine.cheapest
    assert not get_engine("official", task=task, selection="residual").cheapest
    assert (engine.alpha_z, engine.alpha_mu, engine.sweeps) == (ALPHA_Z, ALPHA_MU, 1)


def test_step_size_drops_after_65_iterations() -> None:
    """Checked without mixing, whose rounding errors dominate after so many iterations."""
    model, loss, x0 = smooth_model(), squared_distance(1), inputs(1)[0]
    engine = eq.inputs.Engine(
        sweeps=1,
        alpha_z=ALPHA_Z,
        alpha_mu=ALPHA_MU,
        alpha_x=0.01,
        late_factor=0.3,
        decay="late",
        from_zero=True,
        unit_loss=False,
    )
    options: dict[str, Any] = {"engine": engine, "settings": NEVER_CONVERGED}
    for iterations in (65, 80):
        x = optimize_input(model, loss, x0[None], iterations=iterations, **options).x[0]
        _, expected = reference(model, loss, x0, iterations, "latents", mixed=False)
        torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-12)


def test_unknown_task_is_rejected() -> None:
    with pytest.raises(ValueError, match="task must be one of latents, mnist, cifar10, few-shot"):
        get_engine("official", task="celeba")


def test_accelerations_of_the_ablation_differ() -> None:
    """Appendix A.2 compares type I, type II and Broyden's method with plain steps."""
    model, loss, x0 = smooth_model(), squared_distance(1), inputs(1)
    options: dict[str, Any] = {"settings": NEVER_CONVERGED, "iterations": 6}
    ends = {}
    for acceleration in ("type-1", "type-2", "broyden", "none"):
        engine = replace(get_engine("official", acceleration=acceleration), cheapest=False)
        ends[acceleration] = optimize_input(model, loss, x0, engine=engine, **options).x[0]
    _, plain = reference(model, loss, x0[0], 6, "latents", mixed=False)
    torch.testing.assert_close(ends["none"], plain, rtol=1e-9, atol=1e-12)
    for name in ("type-1", "type-2", "broyden"):
        assert float((ends[name] - plain).norm()) > 1e-4, name
