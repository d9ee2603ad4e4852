"""Solves do not depend on the scale of the numbers, even with several scales in one batch.

Squares of numbers below 1e-19 or above 1e19 do not fit into float32. If norms of such states were
zero or infinite, solves would end at once as converged.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria.context import Context, State
from equilibria.operators import Identity
from equilibria.solvers import bicgstab, conjugate_gradients, gmres
from equilibria.solvers.convergence import row_units
from equilibria.solvers.linear.base import LinearSolution
from tests.problems import CoupledMean, layer

SOLVERS = [name for name in eq.solvers.list_solvers() if name not in ("sam", "descent")]
LINEAR = [conjugate_gradients, gmres, bicgstab]
TOLERANCE = 1e-4
CONTRACTION = 0.81
"""Contraction factor q of the map: a residual r implies an error of at most q/(1 − q) r."""


def cell(seed: int, dtype: torch.dtype = torch.float32) -> eq.EnergyCell:
    """y = relu(WWᵀy + x), which is homogeneous: 2x has the equilibrium 2y."""
    W = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    W *= CONTRACTION**0.5 / torch.linalg.matrix_norm(W, 2)
    return eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(W.to(dtype)), "relu")


def drawn(seed: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed + 1))


def solve(run: eq.EquilibriumLayer, x: Tensor) -> eq.Solution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        return run.solve(x)


def error(result: Tensor, truth: Tensor) -> Tensor:
    """Return ‖result − truth‖/‖truth‖ of each row, without overflow or underflow of squares."""
    unit = truth.abs().amax(dim=1, keepdim=True).clamp_min(1e-300)
    difference = torch.linalg.vector_norm((result.double() - truth) / unit, dim=1)
    return difference / torch.linalg.vector_norm(truth / unit, dim=1).clamp_min(1e-300)


@pytest.mark.parametrize("solver", SOLVERS)
@given(seed=st.integers(0, 2**16), exponent=st.floats(-38, 37))
def test_converged_states_are_accurate_at_every_scale(
    solver: str, seed: int, exponent: float
) -> None:
    x = (drawn(seed).double() * 10**exponent).float()
    solution = solve(layer(cell(seed), solver, tolerance=TOLERANCE, max_iterations=500), x)
    exact = layer(cell(seed).double(), "anderson", tolerance=1e-12, max_iterations=500)
    truth = solve(exact, x.double()).state
    allowed = CONTRACTION / (1 - CONTRACTION) * solution.residual.double() + 1e-5
    assert (error(solution.state, truth)[solution.converged] <= allowed[solution.converged]).all()
    if exponent > -36:
        assert solution.converged.all(), solution.summary()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("dtype", "power"), [(torch.float32, 100), (torch.float64, 900)], ids=["float32", "float64"]
)
def test_scaling_by_a_power_of_two_scales_the_solution(
    solver: str, dtype: torch.dtype, power: int
) -> None:
    x = drawn(0).to(dtype)
    run = layer(cell(0, dtype), solver, tolerance=TOLERANCE, max_iterations=500)
    ordinary = run.solve(x)
    for scale in (2.0**power, 2.0**-power):
        scaled = run.solve(x * scale)
        assert torch.equal(scaled.iterations, ordinary.iterations)
        torch.testing.assert_close(scaled.state / scale, ordinary.state)
        torch.testing.assert_close(scaled.residual, ordinary.residual)
        absolute = scaled.absolute_residual / scale
        torch.testing.assert_close(absolute, ordinary.absolute_residual, rtol=1e-5, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("drop_share", [0.2, 1.0])
def test_samples_of_different_scales_do_not_affect_each_other(
    solver: str, drop_share: float
) -> None:
    x = drawn(2, rows=6)
    run = layer(cell(2), solver, tolerance=TOLERANCE, max_iterations=500, drop_share=drop_share)
    alone = run.solve(x)
    scales = torch.tensor([1.0, 2.0**-90, 2.0**90, 0.0, 2.0**-60, 2.0**60])[:, None]
    together = run.solve(x * scales)
    assert together.converged.all()
    others = [0, 1, 2, 4, 5]
    result = together.state[others] / scales[others]
    torch.testing.assert_close(result, alone.state[others])
    assert not together.state[3].any()
    assert together.residual[3] == 0
    trace = run.solve(x * scales, trace="states").trace
    assert trace is not None
    assert trace.states is not None
    torch.testing.assert_close(trace.states[-1], together.state)


def test_a_state_of_subnormal_numbers_does_not_converge() -> None:
    """Near 1e-44 a number has one or two digits, so the iteration stops far from the solution."""
    run = layer(cell(3), "picard", tolerance=TOLERANCE)
    solution = solve(run, drawn(3) * 1e-44)
    assert not solution.converged.any()
    assert (solution.residual > TOLERANCE).all()
    assert "too small for their type" in solution.message(0)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_sam_at_another_scale(scale: float) -> None:
    run = layer(cell(8), eq.solvers.SAM(max_iterations=30))
    ordinary, scaled = solve(run, drawn(8)), solve(run, drawn(8) * scale)
    torch.testing.assert_close(scaled.state / scale, ordinary.state)
    torch.testing.assert_close(scaled.residual, ordinary.residual)


def test_samples_of_zeros_do_not_change_the_units() -> None:
    """A black image in a batch must not change the units of the others."""
    x = drawn(9)
    assert row_units(x, x) is None
    x[1] = 0
    assert row_units(x, x) is None
    x[2] = torch.nan
    assert row_units(x, x) is None
    x[0] *= 1e-30
    units = row_units(x, x)
    assert units is not None
    assert units.flatten()[1:].tolist() == [1, 1]
    assert 0.5 <= float(x[0].abs().max() / units[0]) <= 2


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_a_coupled_batch_has_one_scale(scale: float) -> None:
    x = drawn(4)
    run = layer(CoupledMean(), tolerance=1e-5)
    torch.testing.assert_close(run.solve(x * scale).state / scale, run.solve(x).state)


class Pair(eq.Cell):
    """A state of two tensors: a = ½b + x, b = ½a."""

    def inject(self, x: Tensor) -> Context:
        return Context(sample={"x": x})

    def initial_state(self, x: Tensor, context: Context) -> State:
        return torch.zeros_like(x), torch.zeros_like(x)

    def step(self, state: State, context: Context) -> State:
        a, b = state
        return 0.5 * b + context["x"], 0.5 * a

    def output(self, state: State, context: Context) -> Tensor:
        return state[0]


@pytest.mark.parametrize("gradient", ["implicit", "one_step", {"name": "unrolled", "steps": 30}])
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_every_gradient_rule_reports_a_scaled_solve(gradient: object, scale: float) -> None:
    run = eq.EquilibriumLayer(Pair(), gradient=gradient, solver=eq.Anderson(tolerance=1e-5))  # type: ignore[arg-type]
    x = drawn(5)
    torch.testing.assert_close(run(x * scale) / scale, 4 / 3 * x, rtol=1e-4, atol=1e-4)
    assert run.last_solution is not None
    assert run.last_solution.converged.all()
    assert (run.last_solution.residual <= 1e-5).all()


# Linear systems as in backward passes


def system(seed: int, q: float = 0.9, size: int = 6) -> tuple[Tensor, Tensor]:
    """Symmetric positive definite matrices I − H with ‖H‖ = q, and right-hand sides."""
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(3, size, size, generator=generator, dtype=torch.float64))
    values = torch.rand(3, 1, size, generator=generator, dtype=torch.float64)
    values[:, :, 0] = 1
    A = torch.eye(size, dtype=torch.float64) - (Q * (q * values)) @ Q.mT
    return A, torch.randn(3, size, generator=generator, dtype=torch.float64)


def solved(
    solver: object, A: Tensor, g: Tensor, tolerance: float = 1e-5
) -> tuple[LinearSolution, Tensor]:
    """Return the solution of the float32 system and its relative residual in float64."""
    A, g = A.float(), g.float()
    result: LinearSolution = solver(  # type: ignore[operator]
        lambda v: torch.einsum("bij,bj->bi", A, v), g, tolerance=tolerance, max_iterations=400
    )
    image = torch.einsum("bij,bj->bi", A.double(), result.value.double())
    return result, error(image, g.double())


@pytest.mark.parametrize("solver", LINEAR, ids=lambda solver: solver.__name__)
@given(seed=st.integers(0, 2**16), exponent=st.floats(-38, 37))
def test_linear_solvers_at_every_scale(solver: object, seed: int, exponent: float) -> None:
    A, g = system(seed)
    g = (g * 10**exponent).float().double()
    result, true = solved(solver, A, g)
    expected = torch.linalg.solve(A, g)
    assert (error(result.value, expected)[result.converged] <= 1e-3).all()
    assert (true[result.converged] <= 2e-4).all()
    torch.testing.assert_close(result.residual.double(), true, rtol=0.1, atol=1e-5)
    if exponent > -36:
        assert result.converged.all(), result.summary()


@pytest.mark.parametrize("solver", LINEAR, ids=lambda solver: solver.__name__)
@pytest.mark.parametrize("q", [0.9, 0.999, 0.99999])
def test_the_residual_of_a_linear_solve_is_evaluated(solver: object, q: float) -> None:
    """Recursively updated residuals of conjugate gradients and GMRES can be 1,000 times too small.

    This happens in ill-conditioned systems.
    """
    for seed in range(3):
        A, g = system(seed, q, size=64)
        result, true = solved(solver, A, g)
        assert (true <= 3 * result.residual + 1e-5).all()
        assert (true[result.converged] <= 2e-4).all()
        assert (result.residual[~result.converged] > 1e-5).all()


@pytest.mark.parametrize("method", ["auto", "gmres", "bicgstab"])
@given(seed=st.integers(0, 2**16), exponent=st.floats(-36, 36))
def test_gradients_at_every_scale_of_the_cotangent(method: str, seed: int, exponent: float) -> None:
    """Gradients of cross-entropies of confident predictions can be as small as 1e-22."""
    rule, solver = eq.Implicit(method=method), eq.Anderson(tolerance=1e-6)  # type: ignore[arg-type]
    run = eq.EquilibriumLayer(cell(seed), solver=solver, gradient=rule)
    x = drawn(seed).requires_grad_()
    y = run(x)
    cotangent = drawn(seed + 7)
    (ordinary,) = torch.autograd.grad(y, x, cotangent, retain_graph=True)
    scale = 10**exponent
    (scaled,) = torch.autograd.grad(y, x, (cotangent.double() * scale).float())
    assert (error(scaled, ordinary.double() * scale) <= 1e-3).all()
    assert run.last_backward is not None
    assert run.last_backward.converged.all()


def test_a_backward_solve_does_not_depend_on_the_scales_of_other_samples() -> None:
    run = layer(cell(6), "anderson", tolerance=1e-6)
    x = drawn(6, rows=5).requires_grad_()
    cotangent = drawn(7, rows=5)
    scales = torch.tensor([1.0, 2.0**-90, 2.0**90, 0.0, 2.0**-60])[:, None]
    y = run(x)
    (ordinary,) = torch.autograd.grad(y, x, cotangent, retain_graph=True)
    (scaled,) = torch.autograd.grad(y, x, cotangent * scales)
    torch.testing.assert_close(scaled, ordinary * scales, rtol=1e-5, atol=0)
