"""Jacobian penalty and spectral radius, compared with dense Jacobians."""

from __future__ import annotations

import pytest
import torch

import equilibria as eq
from equilibria.equilibrium.jacobian import jacobian_penalty, random_iterate, spectral_radius
from tests.problems import PROBLEMS, CoupledMean, tanh, two_tensors


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_penalty_estimates_the_squared_frobenius_norm(name: str) -> None:
    problem = PROBLEMS[name]()
    context = problem.cell.inject(problem.x)
    state = problem.fixed_point
    generator = torch.Generator().manual_seed(0)
    estimate = jacobian_penalty(problem.cell, state, context, vectors=4000, generator=generator)
    for i in range(len(problem.x)):
        single = context.keep(torch.tensor([i]))
        jacobian = dense_jacobian(problem.cell, state, single, i)
        expected = jacobian.square().sum() / jacobian.shape[0]
        torch.testing.assert_close(estimate[i].detach(), expected, rtol=0.1, atol=1e-12)


def dense_jacobian(
    cell: eq.Cell, state: eq.State, context: eq.Context, sample: int
) -> torch.Tensor:
    from equilibria.context.state import Packing, state_tensors

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
def test_spectral_radius_is_the_largest_eigenvalue_magnitude(name: str) -> None:
    problem = PROBLEMS[name]()
    context = problem.cell.inject(problem.x)
    radius = spectral_radius(problem.cell, problem.fixed_point, context, iterations=600)
    for i in range(len(problem.x)):
        single = context.keep(torch.tensor([i]))
        eigenvalues = torch.linalg.eigvals(
            dense_jacobian(problem.cell, problem.fixed_point, single, i)
        )
        torch.testing.assert_close(radius[i], eigenvalues.abs().max(), rtol=2e-2, atol=1e-6)


def test_gradient_of_the_penalty_is_exact_and_descending_it_lowers_the_radius() -> None:
    torch.manual_seed(0)
    W = torch.nn.Parameter(0.4 * torch.randn(5, 4, dtype=torch.float64))
    cell = eq.EnergyCell(eq.Input(eq.operators.Identity()) + eq.Quadratic(W), "tanh")
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


def test_coupled_batches_have_one_jacobian() -> None:
    x = torch.randn(4, 2, dtype=torch.float64)
    cell = CoupledMean()
    assert jacobian_penalty(cell, x, cell.inject(x)).shape == (1,)
    radius = spectral_radius(cell, x, cell.inject(x))
    torch.testing.assert_close(radius, torch.tensor([0.5], dtype=torch.float64))


def test_random_iterates_are_uniform_on_the_trajectory() -> None:
    problem = tanh()
    context = problem.cell.inject(problem.x)
    trajectory = [torch.zeros_like(problem.x)]
    with torch.no_grad():
        for _ in range(4):
            trajectory.append(problem.cell.step(trajectory[-1], context))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    counts = [0] * 5
    for _ in range(400):
        state, _ = random_iterate(problem.cell, problem.x, max_iterations=4, generator=generator)
        assert isinstance(state, torch.Tensor)
        (index,) = [k for k, iterate in enumerate(trajectory) if torch.equal(iterate, state)]
        counts[index] += 1
    assert counts[0] == 0
    assert all(70 < count < 130 for count in counts[1:])
    started, _ = random_iterate(problem.cell, problem.x, max_iterations=1, start=trajectory[2])
    assert torch.equal(started, trajectory[3])  # type: ignore[arg-type]


def test_random_iterates_of_states_with_several_tensors() -> None:
    problem = two_tensors()
    state, _ = random_iterate(problem.cell, problem.x, max_iterations=500)
    iterate, _ = random_iterate(problem.cell, problem.x, max_iterations=1, start=state)
    assert isinstance(iterate, tuple)
    assert [t.shape for t in iterate] == [t.shape for t in problem.fixed_point]


def test_penalty_at_a_random_iterate_has_gradients_in_input_and_parameters() -> None:
    W = torch.nn.Parameter(0.4 * torch.randn(5, 4, dtype=torch.float64))
    U = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    cell = eq.EnergyCell(eq.Input(eq.Dense.from_tensor(U)) + eq.Quadratic(W), "tanh")
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(1)
    state, context = random_iterate(cell, x, max_iterations=6, generator=generator)
    assert isinstance(state, torch.Tensor)
    assert not state.requires_grad
    penalty = jacobian_penalty(cell, state, context, vectors=2, generator=generator)
    assert penalty.shape == (3,)
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(penalty.sum(), (x, W, U)))


def test_random_iterates_refresh_the_context_like_a_solve() -> None:
    class Counting(CoupledMean):
        refresh_until = 3

        def inject(self, x: torch.Tensor) -> eq.Context:
            return eq.Context(sample={"x": x}, shared={"refreshes": torch.zeros(())})

        def refresh(self, state: eq.State, context: eq.Context) -> eq.Context:
            return context.with_shared({"refreshes": context["refreshes"] + 1})

    x = torch.randn(2, 2)
    counts = set()
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        _, context = random_iterate(Counting(), x, max_iterations=5, generator=generator)
        counts.add(int(context["refreshes"]))
    assert counts == {1, 2, 3}


def test_invalid_options_raise() -> None:
    x = torch.randn(4, 2)
    cell = CoupledMean()
    with pytest.raises(ValueError, match="max_iterations"):
        random_iterate(cell, x, max_iterations=0)
    with pytest.raises(ValueError, match="vectors"):
        jacobian_penalty(cell, x, cell.inject(x), vectors=0)
    with pytest.raises(ValueError, match="iterations"):
        spectral_radius(cell, x, cell.inject(x), iterations=1)
