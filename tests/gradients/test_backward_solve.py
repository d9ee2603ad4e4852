"""Backward solves: linear solvers, reports and failures."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria.solvers import bicgstab, conjugate_gradients, gmres
from tests.problems import LinearCell, linear_nonsymmetric, relu_active_set


def batched(matrix: Tensor) -> object:
    return lambda v: torch.einsum("bij,bj->bi", matrix, v)


@given(seed=st.integers(0, 2**16), size=st.integers(1, 8), zeros=st.integers(0, 8))
def test_conjugate_gradients_in_a_weighted_product(seed: int, size: int, zeros: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    H = torch.randn(3, size, size, generator=generator, dtype=torch.float64)
    H = H + H.mT
    H = 0.9 * H / torch.linalg.matrix_norm(H, 2)[:, None, None]
    S = torch.rand(3, size, generator=generator, dtype=torch.float64)
    S[:, :zeros] = 0
    A = torch.eye(size, dtype=torch.float64) - H * S[:, None, :]
    g = torch.randn(3, size, generator=generator, dtype=torch.float64)
    result = conjugate_gradients(batched(A), g, S, tolerance=1e-12, max_iterations=100)  # type: ignore[arg-type]
    torch.testing.assert_close(result.value, torch.linalg.solve(A, g), rtol=1e-9, atol=1e-9)
    assert result.converged.all()
    assert (result.iterations <= size + 2).all()


@given(seed=st.integers(0, 2**16), size=st.integers(1, 12), restart=st.integers(1, 12))
def test_gmres(seed: int, size: int, restart: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(3, size, size, generator=generator, dtype=torch.float64)
    A = torch.eye(size) - 0.7 * J / torch.linalg.matrix_norm(J, 2)[:, None, None]
    g = torch.randn(3, size, generator=generator, dtype=torch.float64)
    g[1] = 0
    result = gmres(batched(A), g, tolerance=1e-10, max_iterations=500, restart=restart)  # type: ignore[arg-type]
    assert result.converged.all(), result.summary()
    torch.testing.assert_close(result.value, torch.linalg.solve(A, g), rtol=1e-8, atol=1e-8)
    true = torch.linalg.vector_norm(g - batched(A)(result.value), dim=1)  # type: ignore[operator]
    assert (true <= 1e-10 * torch.linalg.vector_norm(g, dim=1) + 1e-14).all()


@given(seed=st.integers(0, 2**16), size=st.integers(1, 12))
def test_bicgstab(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(3, size, size, generator=generator, dtype=torch.float64)
    A = torch.eye(size) - 0.7 * J / torch.linalg.matrix_norm(J, 2)[:, None, None]
    g = torch.randn(3, size, generator=generator, dtype=torch.float64)
    g[1] = 0
    result = bicgstab(batched(A), g, tolerance=1e-10, max_iterations=500)  # type: ignore[arg-type]
    assert result.converged.all(), result.summary()
    torch.testing.assert_close(result.value, torch.linalg.solve(A, g), rtol=1e-7, atol=1e-7)


def test_gmres_solves_rows_independently() -> None:
    generator = torch.Generator().manual_seed(0)
    J = torch.randn(4, 9, 9, generator=generator, dtype=torch.float64)
    norms = torch.tensor([0.1, 0.95, 0.5, 0.9], dtype=torch.float64)
    A = torch.eye(9) - (norms / torch.linalg.matrix_norm(J, 2))[:, None, None] * J
    g = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    together = gmres(batched(A), g, tolerance=1e-8, max_iterations=100)  # type: ignore[arg-type]
    for i in range(4):
        alone = gmres(batched(A[i : i + 1]), g[i : i + 1], tolerance=1e-8, max_iterations=100)  # type: ignore[arg-type]
        assert alone.iterations[0] == together.iterations[i]
        torch.testing.assert_close(alone.value[0], together.value[i], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("solve", [conjugate_gradients, gmres, bicgstab])
def test_nan_in_a_row_affects_only_that_row(solve: object) -> None:
    A = 0.5 * torch.eye(4).expand(3, 4, 4).clone().double()
    g = torch.randn(3, 4, dtype=torch.float64)
    g[1, 0] = torch.nan
    result = solve(batched(A), g, tolerance=1e-10, max_iterations=50)  # type: ignore[operator]
    assert result.converged.tolist() == [True, False, True]
    torch.testing.assert_close(result.value[[0, 2]], 2 * g[[0, 2]])
    assert "1 of 3" in result.summary()


def test_conjugate_gradients_report_an_indefinite_operator() -> None:
    A = torch.diag(torch.tensor([1.0, -1.0, 2.0])).expand(1, 3, 3)
    result = conjugate_gradients(batched(A), torch.ones(1, 3), tolerance=1e-6, max_iterations=50)  # type: ignore[arg-type]
    assert result.status.tolist() == [eq.Status.DIVERGED]


def test_indefinite_systems_fall_back_to_gmres() -> None:
    """For ‖W‖ > 1 with an equilibrium, I − JᵀS is indefinite and conjugate gradients break down."""
    W = torch.diag(torch.tensor([1.3, 0.5], dtype=torch.float64))
    cell = eq.EnergyCell(eq.Input(eq.operators.Identity()) + eq.Quadratic(W), "identity")
    exact = torch.tensor([[1 / (1 - 1.69), 1 / 0.75]], dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    layer = eq.EquilibriumLayer(
        cell=cell,
        solver=eq.Anderson(tolerance=1e-10, check_minimum=False),  # it is a saddle
        gradient=eq.Implicit(tolerance=1e-10),
    )
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x, start=(x * exact).detach()).sum(), x)
    torch.testing.assert_close(gradient, exact)
    assert layer.last_backward is not None
    assert layer.last_backward.method == "conjugate gradients, then GMRES"
    assert layer.last_backward.converged.all()


def hard_layer(**options: object) -> tuple[eq.EquilibriumLayer, Tensor]:
    torch.manual_seed(0)
    A = torch.randn(30, 30, dtype=torch.float64)
    A = 0.99 * A / torch.linalg.matrix_norm(A, 2)
    layer = eq.EquilibriumLayer(
        cell=LinearCell(A),
        solver=eq.Anderson(tolerance=1e-8, max_iterations=5000),
        **options,  # type: ignore[arg-type]
    )
    return layer, torch.randn(4, 30, dtype=torch.float64, requires_grad=True)


def test_a_failed_backward_solve_warns_once_and_is_reported() -> None:
    layer, x = hard_layer(gradient=eq.Implicit(tolerance=1e-10, max_iterations=2))
    output = layer(x).sum()
    with pytest.warns(eq.ConvergenceWarning, match=r"4 of 4 samples .* gradients are inexact"):
        output.backward()
    assert layer.last_backward is not None
    assert (layer.last_backward.status == eq.Status.OUT_OF_ITERATIONS).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x).sum().backward()


def test_strict_raises_in_the_backward_pass() -> None:
    layer, x = hard_layer(gradient=eq.Implicit(tolerance=1e-10, max_iterations=2), strict=True)
    output = layer(x).sum()
    with pytest.raises(eq.ConvergenceError, match="max_iterations"):
        output.backward()


def test_warm_start_of_the_backward_solve() -> None:
    layer, x = hard_layer(gradient=eq.Implicit(tolerance=1e-8, warm_start=True))
    layer(x).sum().backward()
    cold = layer.last_backward
    x.grad = None
    layer(x).sum().backward()
    warm = layer.last_backward
    assert cold is not None
    assert warm is not None
    assert int(cold.iterations.min()) > 5
    assert int(warm.iterations.max()) == 0
    layer(x[:2]).sum().backward()
    assert layer.last_backward is not None
    assert int(layer.last_backward.iterations.min()) > 5


def test_the_tolerance_is_at_least_the_machine_epsilon() -> None:
    problem = relu_active_set().to(torch.float32, torch.device("cpu"))
    layer = eq.EquilibriumLayer(
        cell=problem.cell, solver=eq.Anderson(tolerance=1e-5), gradient=eq.Implicit(tolerance=1e-30)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(problem.x.requires_grad_()).sum().backward()
    assert layer.last_backward is not None
    assert layer.last_backward.tolerance == torch.finfo(torch.float32).eps


def test_conjugate_gradients_need_a_symmetry() -> None:
    problem = linear_nonsymmetric()
    layer = eq.EquilibriumLayer(cell=problem.cell, gradient=eq.Implicit(method="cg"))
    with pytest.raises(ValueError, match="declares none"):
        layer(problem.x.requires_grad_())


def test_options_change_behavior() -> None:
    counts = {}
    for restart in (3, 30):
        layer, x = hard_layer(
            gradient=eq.Implicit(tolerance=1e-6, restart=restart, max_iterations=5000)
        )
        layer(x).sum().backward()
        assert layer.last_backward is not None
        counts[restart] = int(layer.last_backward.iterations.max())
    assert counts[3] > counts[30]
    iterations = {}
    for tolerance in (1e-2, 1e-10):
        layer, x = hard_layer(gradient=eq.Implicit(tolerance=tolerance))
        layer(x).sum().backward()
        assert layer.last_backward is not None
        iterations[tolerance] = int(layer.last_backward.iterations.max())
    assert iterations[1e-2] < iterations[1e-10]


def test_the_linear_solver_follows_symmetry_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from equilibria.gradients import implicit

    methods = []
    for problem in (relu_active_set(), linear_nonsymmetric()):
        layer = eq.EquilibriumLayer(cell=problem.cell, gradient="auto")
        layer(problem.x.requires_grad_()).sum().backward()
        assert layer.last_backward is not None
        methods.append(layer.last_backward.method)
    monkeypatch.setattr(implicit, "LARGEST_BASIS", 100)
    layer(problem.x).sum().backward()
    methods.append(layer.last_backward.method)
    assert methods == ["conjugate gradients", "GMRES", "BiCGSTAB"]


@pytest.mark.parametrize(("given", "expected"), [(None, 1e-4), (1e-6, 1e-6)])
def test_the_default_tolerance_is_a_tenth_of_the_forward_tolerance(
    given: float | None, expected: float
) -> None:
    layer = eq.EquilibriumLayer(
        eq.Input(eq.Dense(4, 6)) + eq.Quadratic(eq.Dense(6, 6, norm="bound")),
        tolerance=1e-3,
        gradient=eq.Implicit(tolerance=given),
    )
    layer(torch.rand(3, 4)).sum().backward()
    assert layer.last_backward is not None
    assert layer.last_backward.tolerance == pytest.approx(expected)
    assert bool(layer.last_backward.converged.all())


class IdentityHessian(eq.Energy):
    """−¼‖y‖² or −¼(Σy)²/n: Hessian products return the vector itself, or an expanded tensor."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.mean = mean

    def value(self, y: Tensor, context: eq.Context) -> Tensor:
        total = y.sum(dim=1).square() / y.shape[1] if self.mean else y.square().sum(dim=1)
        return -0.25 * total

    def descent(self, y: Tensor, context: eq.Context) -> Tensor:  # type: ignore[override]
        return (
            (0.5 * y.mean(dim=1, keepdim=True)).expand_as(y) if self.mean else y.sub(y, alpha=0.5)
        )


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("activation", ["relu", "softplus", "identity"])
@pytest.mark.parametrize("warm_start", [False, True])
def test_products_that_share_memory_with_the_vector_are_not_overwritten(
    mean: bool, activation: str, warm_start: bool
) -> None:
    torch.manual_seed(0)
    layer = eq.EquilibriumLayer(
        eq.Input(eq.operators.Identity()) + IdentityHessian(mean),
        activation=activation,
        solver=eq.Anderson(tolerance=1e-12),
        gradient=eq.Implicit(tolerance=1e-12, warm_start=warm_start),
    )
    for _ in range(2):
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(layer, (x,), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "softplus", "identity"])
def test_terms_without_curvature_are_differentiated(activation: str) -> None:
    """Autograd's slope of |y| is a tensor of zeros without memory."""
    absolute = eq.energy_term(lambda y, x: 0.1 * y.abs().sum(dim=1))
    layer = eq.EquilibriumLayer(
        eq.Input(eq.operators.Identity()) + absolute,
        activation=activation,
        solver=eq.Anderson(tolerance=1e-12),
        gradient=eq.Implicit(tolerance=1e-12),
    )
    x = torch.tensor([[1.0, -0.5], [-2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize(("tolerance", "evaluated"), [(1e-2, False), (1e-5, True)])
def test_the_residual_is_evaluated_if_rounding_is_not_negligible(
    tolerance: float, evaluated: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    H = torch.randn(60, 60, generator=generator)
    A = torch.eye(60) - 0.9 * (H + H.T) / torch.linalg.matrix_norm(H + H.T, 2)
    g = torch.randn(2, 60, generator=generator)
    for solve in (conjugate_gradients, gmres):
        result = solve(lambda v: v @ A, g, tolerance=tolerance, max_iterations=200)
        true = torch.linalg.vector_norm(g - result.value @ A, dim=1) / g.norm(dim=1)
        assert bool(result.converged.all())
        assert (result.evaluations > int(result.iterations.max())) == evaluated
        assert bool((true <= 1.01 * tolerance + 1e-7).all())
        assert bool((true <= 1.01 * result.residual + 1e-7).all())
