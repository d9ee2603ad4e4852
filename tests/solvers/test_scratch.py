"""Solves reuse scratch memory without effects on their results."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.solvers import Solver

SOLVERS: dict[str, Solver[Any]] = {
    "anderson": eq.Anderson(tolerance=1e-12),
    "anderson1": eq.solvers.AndersonTypeOne(tolerance=1e-12),
    "broyden": eq.Broyden(tolerance=1e-12),
}


def cosine(z: Tensor, x: Tensor) -> Tensor:
    return torch.cos(z) / 2 + x


def inputs(seed: int, rows: int = 3) -> Tensor:
    return torch.randn(
        rows, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).requires_grad_()


def solved(x: Tensor, solver: Solver[Any]) -> tuple[Tensor, Tensor]:
    """Return the fixed point and the gradient of its sum."""
    z = eq.fixed_point(cosine, x, solver=solver, gradient=eq.Implicit(tolerance=1e-12))
    (slope,) = torch.autograd.grad(z.sum(), x)
    return z.detach(), slope


def exact_slope(z: Tensor) -> Tensor:
    return 1 / (1 + torch.sin(z) / 2)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_a_result_is_not_changed_by_later_solves(solver: Solver[Any]) -> None:
    x = inputs(0)
    z, slope = solved(x, solver)
    copy, slope_copy = z.clone(), slope.clone()
    for seed in range(1, 4):
        solved(inputs(seed, rows=2 + seed), solver)
    assert torch.equal(z, copy)
    assert torch.equal(slope, slope_copy)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_nested_solves_have_separate_memory(solver: Solver[Any]) -> None:
    """z = w/2 with w = cos(w)/2 + z + x: every evaluation solves for the inner w."""
    x = inputs(0).detach()

    def outer(z: Tensor, x: Tensor) -> Tensor:
        return eq.fixed_point(cosine, z + x, solver=solver) / 2

    z = eq.fixed_point(outer, x, solver=solver)
    w = 2 * z
    torch.testing.assert_close(w, torch.cos(w) / 2 + z + x, rtol=0, atol=1e-10)


def test_threads_have_separate_memory() -> None:
    results: dict[int, tuple[Tensor, Tensor]] = {}

    def work(seed: int) -> None:
        for _ in range(20):
            results[seed] = solved(inputs(seed), SOLVERS["anderson"])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, (z, slope) in results.items():
        x = inputs(seed).detach()
        torch.testing.assert_close(z, cosine(z, x), rtol=0, atol=1e-10)
        torch.testing.assert_close(slope, exact_slope(z), rtol=0, atol=1e-9)


def test_a_failed_solve_does_not_affect_the_next_one() -> None:
    def broken(z: Tensor, x: Tensor) -> Tensor:
        if bool(z.abs().max() > 0.1):
            raise RuntimeError("the map failed")
        return cosine(z, x)

    x = inputs(0)
    with pytest.raises(RuntimeError, match="the map failed"):
        eq.fixed_point(broken, x, solver=SOLVERS["anderson"])
    z, slope = solved(x, SOLVERS["anderson"])
    torch.testing.assert_close(slope, exact_slope(z), rtol=0, atol=1e-9)
