"""The Jacobian penalty and the spectral radius against dense Jacobians."""

from __future__ import annotations

import pytest
import torch

import equilibria as eq
from equilibria.equilibrium import jacobian_penalty, spectral_radius
from tests.problems import PROBLEMS, CoupledMean


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_the_penalty_is_the_frobenius_norm(name: str) -> None:
    problem = PROBLEMS[name]()
    context = problem.cell.inject(problem.x)
    state = problem.fixed_point
    generator = torch.Generator().manual_seed(0)
    estimate = jacobian_penalty(problem.cell, state, context, vectors=4000, generator=generator)
    for i in range(len(problem.x)):
        one = context.keep(torch.tensor([i]))
        jacobian = dense_jacobian(problem.cell, state, one, i)
        expected = jacobian.square().sum() / jacobian.shape[0]
        torch.testing.assert_close(estimate[i].detach(), expected, rtol=0.1, atol=1e-12)


def dense_jacobian(
    cell: eq.Cell, state: eq.State, context: eq.Context, sample: int
) -> torch.Tensor:
    from equilibria.context import Packing, state_tensors

    tensors = [t[sample : sample + 1] for t in state_tensors(state)]
    single = tensors[0] if isinstance(state, torch.Tensor) else tuple(tensors)
    packing = Packing.of(single)
    with torch.no_grad():
        flat = packing.pack(single)
    jacobian = torch.autograd.functional.jacobian(
        lambda v: packing.pack(cell.step(packing.unpack(v), context)), flat
    )
    return jacobian[0, :, 0]


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_the_spectral_radius(name: str) -> None:
    problem = PROBLEMS[name]()
    context = problem.cell.inject(problem.x)
    found = spectral_radius(problem.cell, problem.fixed_point, context, iterations=600)
    for i in range(len(problem.x)):
        one = context.keep(torch.tensor([i]))
        eigenvalues = torch.linalg.eigvals(
            dense_jacobian(problem.cell, problem.fixed_point, one, i)
        )
        torch.testing.assert_close(found[i], eigenvalues.abs().max(), rtol=2e-2, atol=1e-6)


def test_the_penalty_trains() -> None:
    """Its gradient agrees with finite differences, and descending it makes the map contract."""
    torch.manual_seed(0)
    W = torch.nn.Parameter(0.4 * torch.randn(5, 4, dtype=torch.float64))
    cell = eq.EnergyCell(eq.Input(eq.Identity()) + eq.Quadratic(W), "tanh")
    x = torch.randn(3, 5, dtype=torch.float64)
    state = eq.EquilibriumLayer(cell=cell, solver=eq.Anderson(tolerance=1e-8)).solve(x).state

    def penalty() -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return jacobian_penalty(cell, state, cell.inject(x), vectors=3, generator=generator).sum()

    (exact,) = torch.autograd.grad(penalty(), W)
    direction = torch.randn_like(W)
    with torch.no_grad():
        W += 1e-6 * direction
        up = penalty().detach()
        W -= 2e-6 * direction
        down = penalty().detach()
        W += 1e-6 * direction
    torch.testing.assert_close((exact * direction).sum(), (up - down) / 2e-6, rtol=1e-6, atol=1e-8)
    before = spectral_radius(cell, state, cell.inject(x)).max()
    with torch.no_grad():
        W -= 0.1 * exact / exact.norm()
    assert spectral_radius(cell, state, cell.inject(x)).max() < before


def test_a_coupled_batch_has_one_jacobian() -> None:
    x = torch.randn(4, 2, dtype=torch.float64)
    cell = CoupledMean()
    assert jacobian_penalty(cell, x, cell.inject(x)).shape == (1,)
    radius = spectral_radius(cell, x, cell.inject(x))
    torch.testing.assert_close(radius, torch.tensor([0.5], dtype=torch.float64))


def test_options_are_checked() -> None:
    x = torch.randn(4, 2)
    cell = CoupledMean()
    with pytest.raises(ValueError, match="vectors"):
        jacobian_penalty(cell, x, cell.inject(x), vectors=0)
    with pytest.raises(ValueError, match="iterations"):
        spectral_radius(cell, x, cell.inject(x), iterations=1)
