"""The default solver minimizes every convex energy, even if its map does not contract."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import equilibria as eq
from benchmarks.energy_bank import BANK, INPUTS, SIZE, Entry, inputs
from equilibria.activations import list_activations
from equilibria.energies.function import FunctionEnergy
from equilibria.operators import Identity
from equilibria.solvers import Auto, Iterate, StoppingCriterion
from tests.problems import PROBLEMS, layer

TOLERANCE = 1e-5


def entry_named(name: str) -> Entry:
    return next(entry for entry in BANK if entry.name == name)


def layer_of(entry: Entry, activation: str, dtype: torch.dtype) -> eq.EquilibriumLayer:
    return eq.EquilibriumLayer(
        entry.energy(dtype=dtype), activation=activation, tolerance=TOLERANCE
    ).eval()


def check_default_solver(entry: Entry, activation: str, dtype: torch.dtype) -> None:
    """Check that convex energies converge, and that converged states are stationary."""
    run = layer_of(entry, activation, dtype)
    x = inputs(3, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if not entry.convex else "error", eq.ConvergenceWarning)
        solution = run.solve(x)
    if entry.convex:
        assert solution.converged.all(), solution.summary()
    # In float32, the rounding of the state hides whether it is stationary.
    if dtype is torch.float64:
        assert isinstance(solution.state, Tensor)
        distance = run.objective(x).residual(solution.state)
        size = solution.state.norm(dim=1)
        # The residual of T(y) may exceed that of y by a factor of the curvature.
        assert (distance <= 100 * TOLERANCE * size)[solution.converged].all()


@pytest.mark.parametrize("entry", BANK, ids=lambda entry: entry.name)
def test_every_convex_energy_is_minimized_by_default(entry: Entry) -> None:
    check_default_solver(entry, "relu", torch.float64)


KINDS = [
    *((name, torch.float64) for name in list_activations() if name != "relu"),
    ("relu", torch.float32),
    ("tanh", torch.float32),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "activation", "dtype"),
    [
        pytest.param(entry, *kind, id=f"{entry.name}-{kind[0]}-{str(kind[1])[6:]}")
        for index, entry in enumerate(BANK)
        # Half of the kinds for each energy, alternating.
        for kind in KINDS[index % 2 :: 2]
    ],
)
def test_every_activation_and_precision(entry: Entry, activation: str, dtype: torch.dtype) -> None:
    check_default_solver(entry, activation, dtype)


@pytest.mark.parametrize("activation", ["relu", "identity"])
def test_float32_does_not_hide_the_minimum_of_a_stiff_objective(activation: str) -> None:
    """At a curvature of 1e6 the residual of the plain map in float32 is only rounding error."""
    entry = entry_named("quadratic form, condition 1e+06")
    single = layer_of(entry, activation, torch.float32).solve(inputs(3, dtype=torch.float32))
    double = layer_of(entry, activation, torch.float64).solve(inputs(3))
    torch.testing.assert_close(single.state.double(), double.state, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "identity"])
@pytest.mark.parametrize(
    "entry", [entry for entry in BANK if entry.convex], ids=lambda entry: entry.name
)
def test_the_minimum_is_that_of_lbfgsb(entry: Entry, activation: str) -> None:
    run = layer_of(entry, activation, torch.float64)
    x = inputs(1)
    objective = run.objective(x)
    state = run.solve(x).state

    def value_and_gradient(y: np.ndarray) -> tuple[float, np.ndarray]:
        state = torch.as_tensor(y)[None].requires_grad_()
        value = objective.value(state.clamp_min(0) if activation == "relu" else state)
        (gradient,) = torch.autograd.grad(value.sum(), state)
        return float(value.detach()), gradient[0].numpy()

    bounds = [(0 if activation == "relu" else None, None)] * SIZE
    reference = minimize(
        value_and_gradient,
        np.full(SIZE, 0.1),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": 5000, "maxfun": 5000, "ftol": 0, "gtol": 1e-8},
    )
    assert float(objective.value(state).detach()) <= reference.fun + 1e-7 * max(
        1, abs(reference.fun)
    )


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.name)
        for entry in BANK
        # At a curvature of 1e6 the error of a state, 1e-10, is too large for finite differences.
        if (entry.convex or entry.name == "attention, β = 4") and not entry.name.endswith("1e+06")
    ],
)
def test_gradients_are_finite_differences(entry: Entry) -> None:
    run = eq.EquilibriumLayer(
        entry.energy(),
        activation="softplus",
        tolerance=1e-12,  # the error is divided by h below
        gradient=eq.Implicit(tolerance=1e-11),
    )
    x = inputs(2).requires_grad_()
    direction = inputs(2, seed=1)
    weight = torch.linspace(-1, 1, SIZE, dtype=torch.float64)

    (gradient,) = torch.autograd.grad((run(x) * weight).sum(), x)
    h = 1e-5
    with torch.no_grad():
        ahead, behind = (run(torch.cat([x + h * direction, x - h * direction])) * weight).chunk(2)
    difference = (ahead.sum() - behind.sum()) / (2 * h)
    torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_gradients_at_a_curvature_of_a_million_are_those_of_a_dense_solve() -> None:
    """dy/dx = (I + S∇²E)⁻¹ S ∂d/∂x, d = −∇E."""
    run = eq.EquilibriumLayer(
        entry_named("quadratic form, condition 1e+06").energy(),
        activation="softplus",
        tolerance=1e-11,
        gradient=eq.Implicit(tolerance=1e-11),
    )
    x = inputs(1).requires_grad_()
    weight = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    y = run(x)
    (gradient,) = torch.autograd.grad((y * weight).sum(), x)
    y, x, cell = y.detach(), x.detach(), run.cell
    assert isinstance(cell, eq.EnergyCell)
    energy, context = cell.energy, cell.inject(x)
    hessian = torch.autograd.functional.hessian(lambda v: energy.value(v, context).sum(), y)
    pull = torch.autograd.functional.jacobian(lambda q: energy.descent(y, cell.inject(q)), x)
    slope = cell.activation.derivative(energy.descent(y, context))[0].diag()
    system = torch.eye(SIZE, dtype=torch.float64) + slope @ hessian[0, :, 0]
    expected = weight @ torch.linalg.solve(system, slope @ pull[0, :, 0])
    torch.testing.assert_close(gradient[0], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_results_do_not_depend_on_the_rest_of_the_batch(activation: str) -> None:
    entry = entry_named("quadratic form, condition 1e+02")
    run = layer_of(entry, activation, torch.float64)
    x = torch.cat([inputs(3), 100 * inputs(1, seed=5)])
    together = run.solve(x)
    for row in range(len(x)):
        alone = run.solve(x[row : row + 1])
        torch.testing.assert_close(alone.state[0], together.state[row], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["linear_symmetric", "relu_active_set", "tanh"])
def test_descent_finds_the_fixed_points_of_contractive_maps(name: str) -> None:
    problem = PROBLEMS[name]()
    solution = layer(problem.cell, "descent", tolerance=1e-9).solve(problem.x)
    assert solution.converged.all()
    torch.testing.assert_close(solution.state, problem.fixed_point, rtol=0, atol=1e-7)


def test_a_map_without_an_objective_raises() -> None:
    problem = PROBLEMS["linear_nonsymmetric"]()
    with pytest.raises(ValueError, match="hidden objective"):
        layer(problem.cell, "descent").solve(problem.x)


def test_an_objective_without_a_minimum_diverges() -> None:
    cell = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(3 * torch.eye(3)), "relu")
    with pytest.warns(eq.ConvergenceWarning):
        solution = layer(cell, "descent").eval().solve(torch.ones(2, 3))
    assert (solution.status == eq.Status.DIVERGED).all()
    assert solution.state.isfinite().all()


def test_nan_marks_only_its_own_sample() -> None:
    entry = BANK[5]
    x = inputs(3)
    x[1, 0] = torch.nan
    with pytest.warns(eq.ConvergenceWarning):
        solution = layer_of(entry, "relu", torch.float64).solve(x)
    assert solution.status.tolist() == [0, eq.Status.DIVERGED, 0]
    assert solution.state.isfinite().all()


def kinked(y: Tensor, x: Tensor) -> Tensor:
    """Convex, with its minimum at a kink that is not one of the activation."""
    return 3 * (y[:, 1:] - y[:, :-1]).abs().sum(dim=1)


class Never(StoppingCriterion):
    def reached(self, iterate: Iterate) -> Tensor:
        return torch.zeros_like(iterate.residuals.bounded)


@pytest.mark.parametrize(
    ("entry", "solver", "message"),
    [
        (Entry("kinked", lambda *_: FunctionEnergy(kinked)), Auto(), "has a kink there"),
        (BANK[4], Auto(stop=Never()), "stopping rule of the solver is not met"),
        (BANK[4], Auto(tolerance=1e-15), "rounding hides"),
    ],
)
def test_a_descent_stalls_where_the_objective_stops_falling(
    entry: Entry, solver: Auto, message: str
) -> None:
    """The message gives the reason, and the solve ends before its budget of 10,000 evaluations."""
    run = eq.EquilibriumLayer(entry.energy(), solver=solver).eval()
    with pytest.warns(eq.ConvergenceWarning, match=message):
        solution = run.solve(inputs(3))
    assert (solution.status == eq.Status.STALLED).all()
    assert int(solution.iterations.max()) < 1000


def test_a_small_budget_is_not_exceeded_by_a_descent() -> None:
    """A solve with five iterations does not continue with a descent of hundreds."""
    run = layer_of(BANK[4], "relu", torch.float64)
    with eq.solving(run, max_iterations=5), pytest.warns(eq.ConvergenceWarning):
        solution = run.solve(inputs(3))
    assert (solution.status == eq.Status.OUT_OF_ITERATIONS).all()
    assert int(solution.iterations.max()) <= 5


def test_contractive_maps_are_solved_without_a_descent() -> None:
    entry = BANK[0]
    run = layer_of(entry, "relu", torch.float64)
    plain = run.solve(inputs(3), solver="anderson")
    default = run.solve(inputs(3))
    assert default.solver == plain.solver == "Anderson"
    assert torch.equal(default.state, plain.state)
    assert default.evaluations == plain.evaluations


def test_the_trace_includes_the_descent() -> None:
    run = layer_of(BANK[4], "relu", torch.float64)
    solution = run.solve(inputs(3), trace="states")
    assert solution.solver == "Anderson, then Descent"
    assert solution.trace is not None
    assert solution.trace.states is not None
    assert len(solution.trace.residual) == len(solution.trace.states)
    assert float(solution.trace.residual.nan_to_num(0).amax(dim=1)[-1]) <= TOLERANCE


def test_the_message_names_the_steep_term_and_the_remedy() -> None:
    smoothness = FunctionEnergy(lambda y, x: (y[:, 1:] - y[:, :-1]).square().sum(dim=1))
    energy = eq.Input(eq.Dense(INPUTS, SIZE)) + 2 * smoothness
    run = eq.EquilibriumLayer(energy, solver="anderson").eval()
    x = inputs(3, dtype=torch.float32)
    with pytest.warns(eq.ConvergenceWarning, match="'function' has a curvature of about 1[56]"):
        solution = run.solve(x)
    assert "solver='auto'" in solution.summary()
    assert run.solve(x, solver="auto").converged.all()
