"""Feature regularisers: Table 2's operators against autograd and minimisation, Theorem 4."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.energies import L1, L2, Decorrelation, FeatureRegulariser, Incay, Regulariser

REGULARISERS: list[Regulariser] = [L2(), L1(), Incay(), Incay(epsilon=0.2), Decorrelation()]
SOLVER = eq.Anderson(tolerance=1e-13, max_iterations=5000)


@pytest.mark.parametrize("regulariser", REGULARISERS, ids=str)
@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3, 2)])
def test_the_gradient_is_that_of_the_value(
    regulariser: Regulariser, shape: tuple[int, ...]
) -> None:
    z = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    value = regulariser.value(z)
    assert value.shape == (() if regulariser.couples_batch else (5,))
    (expected,) = torch.autograd.grad(value.sum(), z)
    torch.testing.assert_close(regulariser.gradient(z), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("regulariser", [L2(), L1()], ids=str)
def test_the_proximal_operator_minimises(regulariser: Regulariser) -> None:
    z = torch.randn(1, 6, dtype=torch.float64)
    gamma = 0.4
    best = regulariser.proximal(z, gamma)
    assert best is not None

    def objective(u: Tensor) -> Tensor:
        return gamma * regulariser.value(u) + 0.5 * (u - z).square().sum(dim=1)

    for radius in (1e-4, 1e-2, 1.0):
        others = best + radius * torch.randn(200, 6, dtype=torch.float64)
        assert (objective(others) >= objective(best) - 1e-12).all()


def test_the_operators_of_table_2_corrected() -> None:
    z = torch.randn(3, 4, dtype=torch.float64)
    gamma, epsilon = 0.3, 1.0
    torch.testing.assert_close(L2().step(z, gamma), z / 1.3)
    torch.testing.assert_close(L1().step(z, gamma), z - z.clamp(-gamma, gamma))
    size = z.square().sum(dim=1, keepdim=True) + 2 * epsilon
    # Printed with a minus, which would shrink what it is meant to expand.
    torch.testing.assert_close(Incay().step(z, gamma), (1 + 4 * gamma / size.square()) * z)
    assert (Incay().step(z, gamma).norm(dim=1) > z.norm(dim=1)).all()
    # Decorrelation, row by row (rows are features): z_i − 2γ (I − P_i) Σ_{j≠i} P_j z_i/‖z_i‖².
    rows = z.T
    projections = [torch.outer(r, r) / r.square().sum() for r in rows]
    identity = torch.eye(3, dtype=torch.float64)
    for i, row in enumerate(rows):
        others = sum(p for j, p in enumerate(projections) if j != i)
        expected = row - 2 * gamma * (identity - projections[i]) @ others @ row / row.square().sum()
        torch.testing.assert_close(Decorrelation().step(z, gamma)[:, i], expected)


def test_decorrelation_guards_dead_channels() -> None:
    z = torch.randn(4, 3, dtype=torch.float64)
    z[:, 1] = 0
    assert Decorrelation().value(z).isfinite()
    gradient = Decorrelation().gradient(z)
    assert gradient.isfinite().all()
    assert (gradient[:, 1] == 0).all()


def layer(regulariser: Regulariser, gamma: float, step: str = "auto") -> eq.EquilibriumLayer:
    torch.manual_seed(0)
    W = eq.Dense(4, 6, norm="bound", zeta=0.8).double()
    with torch.no_grad():
        W.kernel.mul_(4)
    energy = eq.Input(eq.Dense(3, 6).double()) + eq.Quadratic(W)
    if gamma:
        energy = energy + FeatureRegulariser(W, regulariser, gamma, step)  # type: ignore[arg-type]
    return eq.EquilibriumLayer(energy, solver=SOLVER, strict=True)


def feature(run: eq.EquilibriumLayer, x: Tensor) -> Tensor:
    with torch.no_grad():
        quadratic = run.cell.energy.summands()[1]  # type: ignore[union-attr, operator]
        return quadratic.W.adjoint(run(x))


@pytest.mark.parametrize("regulariser", REGULARISERS, ids=str)
@pytest.mark.parametrize("step", ["auto", "gradient"])
def test_theorem_4_the_equilibrium_is_stationary_for_the_sum(
    regulariser: Regulariser, step: str
) -> None:
    """z* = f(z* − γ∇R(z*)), or f∘prox: the paper's map has the equilibrium as its fixed point."""
    if isinstance(regulariser, L1) and step == "gradient":
        step = "proximal"  # its gradient jumps at zero
    gamma = 0.1
    run = layer(regulariser, gamma, step)
    x = torch.randn(5, 3, dtype=torch.float64)
    state = run.solve(x).state
    assert (run.objective(x).residual(state) < 1e-9).all()
    energy = run.cell.energy  # type: ignore[union-attr]
    inject, quadratic, term = energy.summands()  # type: ignore[operator]
    W = quadratic.W
    with torch.no_grad():
        z = W.adjoint(state)
        if step == "gradient":
            moved = z - gamma * regulariser.gradient(z)
        else:
            moved = regulariser.step(z, gamma)
        mapped = W.adjoint((W(moved) + inject.inject(x)["c"]).relu())
    torch.testing.assert_close(mapped, z, rtol=1e-9, atol=1e-9)
    assert term.couples_batch == regulariser.couples_batch


def test_regularisers_do_what_they_are_for() -> None:
    x = torch.randn(8, 3, dtype=torch.float64)
    plain = feature(layer(L2(), 0.0), x)
    assert (feature(layer(L2(), 0.5), x).norm(dim=1) < plain.norm(dim=1)).all()
    assert (feature(layer(Incay(epsilon=0.1), 0.01), x).norm(dim=1) >= plain.norm(dim=1)).all()
    decorrelated = feature(layer(Decorrelation(), 0.05), x)
    assert Decorrelation().value(decorrelated) < Decorrelation().value(plain)
    gamma = 0.2
    sparse = feature(layer(L1(), gamma), x)
    # z* is not sparse, its proximal point is (SPEC: 0 against 5 zeros of 5).
    assert (sparse == 0).sum() == 0
    assert (L1().proximal(sparse, gamma) == 0).sum() > 0


def test_a_coupled_regulariser_makes_the_batch_one_problem() -> None:
    run = layer(Decorrelation(), 0.05)
    x = torch.randn(5, 3, dtype=torch.float64)
    solution = run.solve(x)
    assert solution.status.shape == (1,)
    alone = run.solve(x[:1])
    assert not torch.allclose(alone.state[0], solution.state[0], atol=1e-6)  # type: ignore[index]


@pytest.mark.parametrize("regulariser", [L2(), L1(), Incay(), Decorrelation()], ids=str)
def test_gradients_through_a_regularised_equilibrium(regulariser: Regulariser) -> None:
    run = layer(regulariser, 0.1)
    run.adjoint = eq.Implicit(tolerance=1e-12)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad(run(x).square().sum(), x)
    direction = torch.randn_like(x)
    step = 1e-6
    with torch.no_grad():
        up, down = (run(x + s * step * direction).square().sum() for s in (1, -1))
    torch.testing.assert_close(
        (exact * direction).sum(), (up - down) / (2 * step), rtol=1e-6, atol=1e-8
    )


def test_options_are_checked() -> None:
    W = torch.eye(3)
    with pytest.raises(ValueError, match="gamma"):
        FeatureRegulariser(W, L2(), -1.0)
    with pytest.raises(ValueError, match="no proximal operator"):
        FeatureRegulariser(W, Incay(), 0.1, "proximal")
    with pytest.raises(ValueError, match="step must be"):
        FeatureRegulariser(W, L2(), 0.1, "newton")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epsilon"):
        Incay(epsilon=0.0)
