"""SAM selects the fixed point with the smallest regularizer (OptEq Theorem 5)."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.context import Context
from equilibria.models import DeepOptEqCell, UnitLayer
from equilibria.solvers import SAM


class Projection(eq.Cell):
    """T projects onto the plane {z : ⟨a, z⟩ = x}, all points of which are fixed points."""

    symmetry = eq.gradients.Symmetry.PLAIN

    def __init__(self, a: Tensor) -> None:
        super().__init__()
        self.register_buffer("a", a)

    def inject(self, x: Tensor) -> Context:
        return Context(sample={"x": x})

    def initial_state(self, x: Tensor, context: Context) -> Tensor:
        return torch.ones(len(x), len(self.a), dtype=x.dtype)

    def step(self, state: Tensor, context: Context) -> Tensor:
        gap = context["x"] - state @ self.a[:, None]
        return state + gap * self.a / self.a.square().sum()


A = torch.tensor([3.0, 0.5, -1.0], dtype=torch.float64)
X = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
SMALLEST = X * A / A.square().sum()


def distance(solver: eq.solvers.Solver) -> float:
    layer = eq.EquilibriumLayer(cell=Projection(A), solver=solver)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        return float((layer.solve(X).state - SMALLEST).norm())


def test_sam_approaches_the_fixed_point_of_smallest_norm() -> None:
    plain = distance(eq.Picard(tolerance=1e-10))
    distances = [distance(SAM(max_iterations=k)) for k in (20, 200, 2000)]
    assert plain > 1, "plain iteration ends at the projection of the start"
    assert distances == sorted(distances, reverse=True)
    assert distances[0] < plain
    assert distances[-1] < 1e-3 * plain


def test_sam_selects_from_a_cone_of_fixed_points_of_opteq() -> None:
    """W with orthonormal rows and no input: f is the identity on {Wᵀy : y ≥ 0}, a cone."""
    torch.manual_seed(0)
    W, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    cell = DeepOptEqCell([UnitLayer(W, torch.eye(5, dtype=torch.float64), bias=False)])
    x = torch.zeros(1, 5, dtype=torch.float64)
    start = torch.rand(1, 5, dtype=torch.float64) @ W

    class FromPoint(eq.energies.Regularizer):
        """½‖z − p‖² with p outside of the cone; the minimizer is the projection of p onto it."""

        def value(self, z: Tensor) -> Tensor:
            return 0.5 * (z - p).square().sum(dim=1)

        def gradient(self, z: Tensor) -> Tensor:
            return z - p

    y = torch.tensor([[1.0, -2.0, 0.5, -0.3, 2.0]], dtype=torch.float64)
    p = y @ W
    target = y.relu() @ W

    def distance_to_target(solver: eq.solvers.Solver) -> float:
        layer = eq.EquilibriumLayer(cell=cell, solver=solver)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eq.ConvergenceWarning)
            return float((layer.solve(x, start=start).state - target).norm())

    plain = distance_to_target(eq.Picard(tolerance=1e-10))
    selected = [
        distance_to_target(SAM(regularizer=FromPoint(), max_iterations=k)) for k in (20, 200, 2000)
    ]
    assert selected == sorted(selected, reverse=True)
    # The rate is k^−c: at k = 2000, 0.16 of the distance remains.
    assert selected[-1] < 0.2 * plain


def test_the_schedule_is_that_of_theorem_5() -> None:
    solver = SAM(lipschitz=0.5, rho=0.5, c=0.2)
    beta, shrinkage = solver.schedule(16)
    assert beta == pytest.approx(0.25 / 4)
    assert shrinkage == pytest.approx(0.25 / 16**0.2)
    assert solver.gamma == 1.0
    with pytest.raises(ValueError, match=r"rho \+ 2c < 1"):
        SAM(rho=0.8, c=0.2)
    with pytest.raises(ValueError, match="lipschitz"):
        SAM(lipschitz=0.0)


@pytest.mark.filterwarnings("ignore:.*did not converge")
@pytest.mark.parametrize("unrolled", [False, True])
def test_the_state_is_the_last_iterate_of_equation_11(unrolled: bool) -> None:
    """The state is z^K and not T(z^(K−1)), which would omit the last step towards R."""
    solver = SAM(max_iterations=5, lipschitz=2.0)
    z = torch.ones(2, 3, dtype=torch.float64)
    for k in range(1, 6):
        beta, shrinkage = 0.5 / k**solver.rho, 0.5 / k**solver.c
        image = z + (X - z @ A[:, None]) * A / A.square().sum()
        z = beta * ((1 - shrinkage / 4) * z - z / 4) + (1 - beta) * image
    rule = eq.Unrolled(steps=5) if unrolled else "implicit"
    layer = eq.EquilibriumLayer(cell=Projection(A), solver=solver, gradient=rule).train()
    torch.testing.assert_close(layer(X), z)
    torch.testing.assert_close(layer.solve(X).state, z)


@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_the_status_is_that_of_the_residual() -> None:
    layer = eq.EquilibriumLayer(cell=Projection(A), solver=SAM(tolerance=1e-3, max_iterations=7))
    solution = layer.train().solve(X, trace="states")
    assert solution.evaluations == 7
    assert (solution.status == eq.Status.OUT_OF_ITERATIONS).all()
    assert solution.trace is not None
    assert solution.trace.residual.shape == (7, 2)
    torch.testing.assert_close(solution.trace.residual[-1], solution.residual)
    assert solution.solver == "SAM"


def test_unrolled_training_with_sam() -> None:
    """The gradient of the unrolled selection (R†) agrees with finite differences."""
    torch.manual_seed(0)
    W = eq.Dense(4, 6, norm="bound", zeta=0.9).double()
    cell = DeepOptEqCell([UnitLayer(W, eq.Dense(3, 6).double(), activation="tanh", alpha=0.8)])
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    outputs = {}
    for regularizer in (eq.energies.L2(), eq.energies.Incay()):
        solver = SAM(regularizer=regularizer, tolerance=1e-2)
        layer = eq.EquilibriumLayer(cell=cell, solver=solver, gradient=eq.Unrolled(steps=8))
        output = layer(x)
        outputs[type(regularizer).__name__] = output
        (exact,) = torch.autograd.grad(output.square().sum(), x)
        direction = torch.randn_like(x)
        with torch.no_grad():
            up, down = (layer(x + s * 1e-6 * direction).square().sum() for s in (1, -1))
        torch.testing.assert_close(
            (exact * direction).sum(), (up - down) / 2e-6, rtol=1e-6, atol=1e-8
        )
        assert layer.last_solution is not None
        assert layer.last_solution.solver == "unrolled SAM"
    plain = eq.EquilibriumLayer(cell=cell, gradient=eq.Unrolled(steps=8))(x)
    assert (outputs["L2"].norm(dim=1) < plain.norm(dim=1)).all()
    assert (outputs["Incay"].norm(dim=1) > outputs["L2"].norm(dim=1)).all()
