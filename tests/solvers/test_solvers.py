"""Every registered solver on the bank of problems, and the guarantees of the shared loop."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria.context import Context, State
from equilibria.context.state import map_state, state_tensors
from equilibria.equilibrium import FunctionCell
from equilibria.operators import Identity
from equilibria.solvers import FixedPointProblem
from equilibria.solvers.base import Memory
from tests.problems import PROBLEMS, WITH_OBJECTIVE, CoupledMean, layer, relu_active_set

# SAM and descent have separate tests: SAM needs a map with many fixed points, and descent needs a
# hidden objective and counts Hessian products as iterations.
SOLVERS = [name for name in eq.solvers.list_solvers() if name not in ("sam", "descent")]
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-11}


# Accelerated gradient descent needs maps with an objective.
PAIRS = [
    (solver, problem)
    for solver in SOLVERS
    for problem in PROBLEMS
    if solver != "accelerated" or problem in WITH_OBJECTIVE
]


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("solver", "name"), PAIRS)
def test_finds_the_known_fixed_point(
    solver: str, name: str, dtype: torch.dtype, device: torch.device
) -> None:
    if device.type == "mps" and dtype == torch.float64:
        pytest.skip("mps has no float64")
    problem = PROBLEMS[name]().to(dtype, device)
    tolerance = TOLERANCES[dtype]
    solution = layer(problem.cell, solver, tolerance=tolerance, max_iterations=3000).solve(
        problem.x
    )
    assert solution.converged.all(), solution.summary()
    for actual, expected in zip(
        state_tensors(solution.state), state_tensors(problem.fixed_point), strict=True
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, atol=300 * tolerance, rtol=300 * tolerance)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_state_is_an_output_of_the_map_whose_residual_is_reported(solver: str) -> None:
    problem = PROBLEMS["tanh"]()
    visited: list[Tensor] = []
    original_step = problem.cell.step

    def recording_step(state: Tensor, context: Context) -> Tensor:
        image = original_step(state, context)
        visited.append(torch.stack([state, image]))
        return image

    problem.cell.step = recording_step  # type: ignore[method-assign]
    solution = layer(problem.cell, solver, tolerance=1e-6, drop_share=1.0).solve(problem.x)
    for i in range(len(problem.x)):
        outputs = torch.stack([image[1, i] for image in visited])
        at = (outputs == solution.state[i]).all(dim=1).nonzero()
        assert len(at), "the state is a mixture, not an output of the map"
        point = visited[int(at[0])][0, i]
        residual = (solution.state[i] - point).norm()
        torch.testing.assert_close(solution.absolute_residual[i], residual)
        torch.testing.assert_close(solution.residual[i], residual / solution.state[i].norm())


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("drop_share", [0.25, 1.0])
def test_results_do_not_depend_on_the_rest_of_the_batch(solver: str, drop_share: float) -> None:
    W = torch.diag(torch.tensor([0.3, 0.2, 0.99, 0.98], dtype=torch.float64))
    cell = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(W), "relu")
    easy = torch.tensor([[1.0, 2.0, -1.0, -1.0]], dtype=torch.float64)
    hard = torch.tensor([[1.0, -2.0, 1.0, 3.0]], dtype=torch.float64)
    run = layer(cell, solver, tolerance=1e-8, max_iterations=3000, drop_share=drop_share)
    alone = run.solve(easy)
    together = run.solve(torch.cat([easy, hard, hard]))
    assert together.iterations[1] > alone.iterations[0]
    assert together.iterations[0] == alone.iterations[0]
    torch.testing.assert_close(together.state[0], alone.state[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(together.residual[0], alone.residual[0])


@pytest.mark.parametrize("solver", SOLVERS)
def test_dropping_finished_samples_does_not_change_results(solver: str) -> None:
    torch.manual_seed(3)
    W = torch.randn(8, 8, dtype=torch.float64)
    W *= 0.99 / torch.linalg.matrix_norm(W, 2)
    cell = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(W), "relu")
    x = torch.randn(16, 8, dtype=torch.float64) + torch.linspace(-2, 2, 16).double()[:, None]
    options = {"tolerance": 1e-9, "max_iterations": 5000, "check_minimum": False}
    kept = layer(cell, solver, drop_share=1.0, **options).solve(x)
    dropped = layer(cell, solver, drop_share=0.1, **options).solve(x)
    torch.testing.assert_close(dropped.state, kept.state, rtol=0, atol=1e-12)
    assert torch.equal(dropped.iterations, kept.iterations)
    assert torch.equal(dropped.status, kept.status)
    assert dropped.evaluations == kept.evaluations == int(kept.iterations.max())
    assert kept.sample_evaluations == kept.evaluations * 16
    assert dropped.sample_evaluations < kept.sample_evaluations
    assert dropped.sample_evaluations >= int(kept.iterations.sum())


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("drop_share", [0.2, 1.0])
def test_nan_or_inf_in_one_sample_marks_only_that_sample(
    solver: str, bad: float, drop_share: float
) -> None:
    problem = relu_active_set()
    clean = layer(problem.cell, solver, tolerance=1e-8).solve(problem.x)
    x = problem.x.clone()
    x[1, 2] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        solution = layer(problem.cell, solver, tolerance=1e-8, drop_share=drop_share).solve(x)
    assert solution.status.tolist() == [0, eq.Status.DIVERGED, 0, 0]
    others = [0, 2, 3]
    torch.testing.assert_close(solution.state[others], clean.state[others], rtol=0, atol=1e-13)
    assert solution.state.isfinite().all()
    assert "check the input" in solution.message(1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_map_that_is_not_contractive_is_reported(solver: str) -> None:
    cell = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(3 * torch.eye(3)), "relu")
    with pytest.warns(eq.ConvergenceWarning, match="bound the norm of W"):
        solution = layer(cell, solver, max_iterations=500).eval().solve(torch.ones(2, 3))
    # An extrapolating solver may reach the repelling fixed point of the linear piece, which is not
    # a minimum.
    assert (solution.status != eq.Status.CONVERGED).all()
    assert solution.state.isfinite().all()
    assert "contractive" in solution.message(0) or "bound the norm" in solution.message(0)


def near_isometry(solver: str, tolerance: float) -> eq.EquilibriumLayer:
    """A layer in float32 whose map contracts by no more than 0.98."""
    torch.manual_seed(0)
    W = torch.randn(40, 40)
    W *= 0.99 / torch.linalg.matrix_norm(W, 2)
    cell = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(W), "tanh")
    return layer(cell, solver, tolerance=tolerance, max_iterations=2000).eval()


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_tolerance_below_the_precision_is_raised_and_reported(solver: str) -> None:
    run = near_isometry(solver, 1e-30)
    with pytest.warns(eq.ConvergenceWarning, match=r"1.0e-30 is below .* solves end at 4.8e-07"):
        solution = run.solve(torch.randn(3, 40))
    assert solution.tolerance == 4 * torch.finfo(torch.float32).eps
    assert bool(solution.converged.all())
    assert bool((solution.residual <= solution.tolerance).all())


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.filterwarnings("ignore:the tolerance 1.0e-30 is below")
def test_below_the_precision_the_status_does_not_depend_on_the_batch(solver: str) -> None:
    run = near_isometry(solver, 1e-30)
    x = torch.randn(33, 40)
    together = run.solve(x).status
    for size in (1, 2, 7):
        parts = torch.cat([run.solve(part).status for part in x[:7].split(size)])
        assert torch.equal(parts, together[:7])


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_iteration(solver: str) -> None:
    problem = PROBLEMS["tanh"]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        solution = layer(problem.cell, solver, max_iterations=1).solve(problem.x)
    assert (solution.status == eq.Status.OUT_OF_ITERATIONS).all()
    assert solution.iterations.tolist() == [1] * 4
    assert solution.evaluations == 1
    # A solve starts at T(0), which is known without an evaluation: one iteration gives T(T(0)).
    twice = problem.cell.step(problem.x.tanh(), problem.cell.inject(problem.x))
    torch.testing.assert_close(solution.state, twice)
    assert "raise max_iterations" in solution.message(0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_empty_batch(solver: str) -> None:
    problem = relu_active_set()
    solution = layer(problem.cell, solver).solve(problem.x[:0])
    assert solution.state.shape == (0, 6)
    assert solution.status.shape == solution.residual.shape == (0,)
    assert solution.share_converged == 1


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_constant_map_converges_in_two_iterations(solver: str) -> None:
    """The residual after the first step is exactly zero: the Anderson system is singular."""
    cell = eq.EnergyCell(eq.Input(Identity()), "identity")
    run = layer(cell, solver, tolerance=1e-12)
    x = torch.randn(3, 4, dtype=torch.float64)
    solution = run.solve(x, torch.zeros_like(x))
    assert solution.converged.all()
    assert (solution.iterations == 2).all()
    assert (run.solve(x).iterations == 1).all()


def test_a_singular_anderson_system_falls_back_to_a_plain_step() -> None:
    """One-dimensional linear problems make all residuals parallel: the Gram matrix has rank one."""
    cell = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(0.9 * torch.eye(1)), "identity")
    for ridge in (0.0, 1e-8):
        solution = layer(cell, eq.Anderson(ridge=ridge, tolerance=1e-6, memory=5)).solve(
            torch.ones(2, 1)
        )
        assert solution.converged.all(), solution.summary()
        torch.testing.assert_close(solution.state, torch.full((2, 1), 1 / 0.19), rtol=1e-4, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_warm_start(solver: str) -> None:
    problem = PROBLEMS["tanh"]()
    run = layer(problem.cell, solver, tolerance=1e-9, max_iterations=2000)
    cold = run.solve(problem.x)
    warm = run.solve(problem.x, start=cold.state)
    assert (warm.iterations <= 2).all()
    assert (cold.iterations > 5).all()
    torch.testing.assert_close(warm.state, cold.state, rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match=r"start has shapes \[\(3, 5\)\]"):
        run.solve(problem.x, start=cold.state[:3])


def test_a_coupled_batch_is_one_problem() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    solution = layer(CoupledMean(), tolerance=1e-12).solve(x)
    assert solution.status.shape == (1,)
    torch.testing.assert_close(solution.state, x + x.mean(dim=0), rtol=1e-9, atol=1e-9)
    empty = layer(CoupledMean()).solve(x[:0])
    assert empty.status.shape == (0,)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_trace_covers_all_iterations_and_is_nan_after_the_end(solver: str) -> None:
    problem = relu_active_set()
    run = layer(problem.cell, solver, tolerance=1e-7, drop_share=0.25, check_minimum=False)
    solution = run.solve(problem.x, trace=True)
    trace = solution.trace
    assert trace is not None
    assert trace.residual.shape == (solution.evaluations, 4)
    for i in range(4):
        n = int(solution.iterations[i])
        assert trace.residual[:n, i].isfinite().all()
        assert trace.residual[n:, i].isnan().all()
        torch.testing.assert_close(trace.residual[:n, i].min(), solution.residual[i])
    with_states = run.solve(problem.x, trace="states").trace
    assert with_states is not None
    assert with_states.states is not None
    assert len(with_states.states) == solution.evaluations
    torch.testing.assert_close(with_states.states[-1], solution.state, rtol=0, atol=1e-12)
    start = problem.cell.step(problem.x.relu(), problem.cell.inject(problem.x))
    torch.testing.assert_close(with_states.states[0], start)
    assert run.solve(problem.x).trace is None


def test_picard_is_the_damped_iteration() -> None:
    problem = relu_active_set()
    for damping in (1.0, 0.5):
        y = torch.zeros_like(problem.x)
        context = problem.cell.inject(problem.x)
        for _ in range(6):
            image = problem.cell.step(y, context)
            y = y + damping * (image - y)
        solver = eq.Picard(damping=damping, tolerance=1e-30, max_iterations=7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eq.ConvergenceWarning)
            start = torch.zeros_like(problem.x)
            state = layer(problem.cell, solver).solve(problem.x, start).state
        torch.testing.assert_close(state, problem.cell.step(y, context), rtol=0, atol=1e-14)


@pytest.mark.parametrize("samples", [1, 3])
def test_the_last_iterate_is_that_of_the_plain_iteration(samples: int) -> None:
    """The residual of this map rises and falls, so that the best iterate is not the last."""
    turn = 0.95 * torch.tensor([[0.2, -3.0], [0.3, 0.2]], dtype=torch.float64)
    x = torch.linspace(1, 2, 2 * samples, dtype=torch.float64).reshape(samples, 2)
    layers = {
        iterate: eq.EquilibriumLayer(
            FunctionCell(lambda z, x: z @ turn.T + x),
            solver=eq.Picard(iterate=iterate, max_iterations=6, tolerance=1e-9),
        ).train()
        for iterate in ("best", "last")
    }
    points = [torch.zeros_like(x)]
    for _ in range(6):
        points.append(points[-1] @ turn.T + x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        best, last = (layers[name].solve(x, points[0]) for name in ("best", "last"))
    torch.testing.assert_close(last.state, points[-1])
    residual = (points[-1] - points[-2]).norm(dim=1) / points[-1].norm(dim=1)
    torch.testing.assert_close(last.residual, residual)
    assert torch.all(best.residual < last.residual)
    assert not last.converged.any()


def test_the_last_iterate_of_a_sample_that_converged_is_that_at_the_tolerance() -> None:
    cell = FunctionCell(lambda z, x: x * z + 1)
    factors = torch.tensor([[0.1], [0.9]], dtype=torch.float64)
    results = [
        eq.EquilibriumLayer(cell, solver=eq.Picard(iterate=iterate, tolerance=1e-4)).solve(factors)
        for iterate in ("best", "last")
    ]
    assert results[0].iterations.tolist() == results[1].iterations.tolist()
    torch.testing.assert_close(results[0].state, results[1].state)


OPTIONS = [
    (eq.Picard(damping=0.7), eq.Picard(damping=1.0)),
    (eq.Anderson(memory=2), eq.Anderson(memory=6)),
    (eq.Anderson(damping=0.5), eq.Anderson()),
    (eq.Anderson(damping=1.5), eq.Anderson()),
    (eq.Anderson(ridge=1e-1), eq.Anderson(ridge=1e-10)),
    (eq.Anderson(cap=1.01), eq.Anderson()),
    (eq.Anderson(restart_growth=1.01), eq.Anderson()),
    (eq.Anderson(tolerance=1e-2), eq.Anderson(tolerance=1e-6)),
    (eq.Anderson(max_iterations=3), eq.Anderson(max_iterations=300)),
    (eq.Anderson(drop_share=0.1), eq.Anderson(drop_share=1.0)),
    (eq.solvers.AndersonTypeOne(memory=1), eq.solvers.AndersonTypeOne(memory=6)),
    (eq.solvers.AndersonTypeOne(ridge=1e1), eq.solvers.AndersonTypeOne()),
    (eq.solvers.AndersonTypeOne(cap=1e-3), eq.solvers.AndersonTypeOne()),
    (eq.solvers.AndersonTypeOne(restart_growth=1.01), eq.solvers.AndersonTypeOne()),
    (eq.Broyden(rank=1), eq.Broyden(rank=6)),
    (eq.Broyden(restart_growth=1.01), eq.Broyden()),
]


@pytest.mark.parametrize(("first", "second"), OPTIONS, ids=str)
def test_every_option_changes_behavior(first: eq.solvers.Solver, second: eq.solvers.Solver) -> None:
    torch.manual_seed(1)
    W = torch.randn(12, 12, dtype=torch.float64)
    W *= 0.99 / torch.linalg.matrix_norm(W, 2)
    cell = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(W), "relu")
    x = 3 * torch.randn(9, 12, dtype=torch.float64)
    outcomes = []
    for solver in (first, second):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eq.ConvergenceWarning)
            solution = layer(cell, solver).solve(x)
        outcomes.append((solution.iterations.tolist(), solution.sample_evaluations))
    assert outcomes[0] != outcomes[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eq.Picard(tolerance=0.0), "tolerance"),
        (lambda: eq.Picard(tolerance=float("nan")), "tolerance"),
        (lambda: eq.Picard(max_iterations=0), "max_iterations"),
        (lambda: eq.Picard(damping=0.0), "damping"),
        (lambda: eq.Picard(drop_share=0.0), "drop_share"),
        (lambda: eq.Picard(iterate="first"), "iterate must be one of"),  # type: ignore[arg-type]
        (lambda: eq.Anderson(memory=0), "memory"),
        (lambda: eq.Anderson(damping=0.0), "damping"),
        (lambda: eq.Anderson(ridge=-1.0), "ridge"),
        (lambda: eq.solvers.AndersonTypeOne(memory=0), "memory"),
        (lambda: eq.solvers.AndersonTypeOne(cap=0.0), "cap"),
        (lambda: eq.Broyden(rank=0), "rank"),
        (lambda: eq.Broyden(restart_growth=1.0), "restart_growth"),
        (lambda: eq.solvers.get_solver("andersen"), "did you mean 'anderson'"),
    ],
)
def test_invalid_options_raise(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"'anderson'.*momentum"):
        eq.solvers.get_solver("anderson", momentum=0.9)
    with pytest.raises(TypeError, match="momentum"):
        eq.Anderson(momentum=0.9)  # type: ignore[call-arg]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeavyBall(eq.solvers.Solver[Memory]):
    """A solver of another package, in one class."""

    def begin(self, start: Tensor) -> Memory:
        return Memory()

    def propose(self, memory: Memory, point: Tensor, image: Tensor, change: Tensor) -> Tensor:
        return image + 0.1 * change


def test_a_third_party_can_add_a_solver() -> None:
    eq.solvers.register_solver("heavy_ball", HeavyBall, replace=True)
    try:
        problem = relu_active_set()
        solution = layer(problem.cell, "heavy_ball", tolerance=1e-9, max_iterations=999).solve(
            problem.x
        )
        torch.testing.assert_close(solution.state, problem.fixed_point, rtol=1e-6, atol=1e-6)
        with pytest.raises(ValueError, match="exists already"):
            eq.solvers.register_solver("heavy_ball", HeavyBall)
    finally:
        eq.solvers._solvers._factories.pop("heavy_ball")


def test_refresh_updates_the_context_and_the_gradient_is_that_of_the_final_map() -> None:
    class SignCell(eq.Cell):
        """y = ½ s·|y| + x with the sign s frozen after three iterations."""

        refresh_until = 3

        def inject(self, x: Tensor) -> Context:
            return Context(sample={"x": x, "s": torch.zeros_like(x)})

        def initial_state(self, x: Tensor, context: Context) -> Tensor:
            return torch.zeros_like(x)

        def step(self, state: Tensor, context: Context) -> Tensor:
            return 0.5 * context["s"] * state.abs() + context["x"]

        def refresh(self, state: Tensor, context: Context) -> Context:
            return context.with_sample(s=state.sign())

    x = torch.tensor([[1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    run = eq.EquilibriumLayer(cell=SignCell(), solver=eq.Picard(tolerance=1e-12))
    y = run(x)
    torch.testing.assert_close(y, torch.tensor([[2.0, -4.0]], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, 2.0))
    assert run.last_solution is not None
    assert run.last_solution.iterations.min() > 3


@given(
    norm=st.floats(0.05, 0.95),
    scale=st.floats(1e-6, 1e6),
    seed=st.integers(0, 2**16),
)
def test_the_solve_does_not_depend_on_the_scale_of_the_problem(
    norm: float, scale: float, seed: int
) -> None:
    """A ReLU equilibrium is homogeneous: scaling the input scales the state."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    W *= norm / torch.linalg.matrix_norm(W, 2)
    x = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    cell = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(W), "relu")
    for solver in SOLVERS:
        run = layer(cell, solver, tolerance=1e-6, max_iterations=3000)
        plain, scaled = run.solve(x), run.solve(scale * x)
        assert plain.converged.all()
        # Rounding may move a residual across the tolerance: one iteration more or less.
        assert ((plain.iterations - scaled.iterations).abs() <= 1).all()
        torch.testing.assert_close(scaled.state / scale, plain.state, rtol=1e-4, atol=1e-4)


@given(seed=st.integers(0, 2**16), norm=st.floats(0.1, 0.98))
def test_the_a_posteriori_error_bound_holds(seed: int, norm: float) -> None:
    """‖state − y*‖ ≤ q/(1−q)·‖T(y) − y‖ for a map with contraction factor q."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    W *= norm / torch.linalg.matrix_norm(W, 2)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    cell = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(W), "relu")
    truth = layer(cell, "anderson", tolerance=1e-13, max_iterations=9999).solve(x).state
    q = norm**2
    for solver in SOLVERS:
        solution = layer(cell, solver, tolerance=1e-2, max_iterations=999).solve(x)
        error = (solution.state - truth).norm(dim=1)
        assert (error <= q / (1 - q) * solution.absolute_residual + 1e-10).all()


def test_residuals_of_half_precision_states_are_in_float32() -> None:
    problem = relu_active_set().to(torch.bfloat16, torch.device("cpu"))
    solution = layer(problem.cell, tolerance=4e-2).solve(problem.x)
    assert solution.state.dtype == torch.bfloat16
    assert solution.residual.dtype == torch.float32
    assert solution.converged.all()


def test_a_problem_can_be_solved_without_a_layer() -> None:
    problem = PROBLEMS["tanh"]()
    fixed = FixedPointProblem(
        problem.cell.step, problem.cell.inject(problem.x), torch.zeros_like(problem.x)
    )
    solution = eq.Anderson(tolerance=1e-10).solve(fixed)
    torch.testing.assert_close(
        map_state(lambda t: t, solution.state), problem.fixed_point, rtol=1e-7, atol=1e-7
    )
    assert solution.raise_if_failed() is solution
    with pytest.raises(eq.ConvergenceError, match="4 of 4 samples"):
        eq.Picard(max_iterations=2).solve(fixed).raise_if_failed()


@pytest.mark.parametrize("solver", SOLVERS)
def test_autocast_applies_to_the_map_but_not_to_the_solver(solver: str) -> None:
    """With the products of Anderson's and Broyden's methods in bfloat16, solves do not converge."""

    class Elementwise(eq.Cell):
        """Autocast does not change elementwise maps, so the solve must be the same."""

        def inject(self, x: Tensor) -> Context:
            return Context(sample={"x": x})

        def initial_state(self, x: Tensor, context: Context) -> Tensor:
            return torch.zeros_like(x)

        def step(self, state: Tensor, context: Context) -> Tensor:
            inside.append(torch.is_autocast_enabled("cpu"))
            return 0.8 * torch.tanh(state) + context["x"]

    inside: list[bool] = []
    x = torch.linspace(-2, 2, 40).reshape(5, 8)
    plain = layer(Elementwise(), solver, tolerance=1e-5).solve(x)
    inside.clear()
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(Elementwise(), solver, tolerance=1e-5).solve(x)
    assert all(inside)
    assert torch.equal(half.iterations, plain.iterations)
    assert torch.equal(half.state, plain.state)


def test_anderson_accepts_residuals_computed_by_the_caller() -> None:
    """Loops outside of `Solver`, as in input optimization, compute T(y) − y themselves."""
    torch.manual_seed(0)
    A, c = 0.5 * torch.linalg.qr(torch.randn(5, 5))[0], torch.randn(3, 5)
    solver = eq.Anderson(memory=3)
    first, second = solver.begin(c), solver.begin(c)
    first.residuals.fill_(torch.nan)
    y = z = c
    for _ in range(6):
        y_image, z_image = y @ A + c, z @ A + c
        y = solver.propose(first, y, y_image, y_image - y)
        z = solver.propose(second, z, z_image, second.difference(z_image, z))
    torch.testing.assert_close(y, z)
    assert bool(torch.isfinite(y).all())


def test_anderson_damping_above_one_extrapolates_beyond_the_image() -> None:
    """A gradient step of 1/L on ½m‖y − c‖² is L/m times too short; damping L/m solves it."""
    c = torch.randn(3, 5, dtype=torch.float64)
    cell = FunctionCell(lambda y, x: y - (y - x) / 8)
    solver = eq.Anderson(damping=8.0, tolerance=1e-12)
    solution = layer(cell, solver).solve(c, torch.zeros_like(c))
    torch.testing.assert_close(solution.state, c, rtol=0, atol=1e-12)
    assert (solution.iterations == 2).all()


@pytest.mark.parametrize(
    "solver",
    [
        eq.Picard(),
        eq.Picard(damping=0.3),
        eq.Accelerated(),
        eq.Anderson(),
        eq.Anderson(damping=0.5),
        eq.Anderson(damping=1.4),
        eq.Anderson(damping=3.0),
        eq.Broyden(),
        eq.solvers.AndersonTypeOne(),
        eq.solvers.Auto(),
    ],
    ids=str,
)
def test_patience_waits_for_every_map_that_contracts(solver: eq.solvers.Solver[Memory]) -> None:
    """Until the first check of the pace, only a map that does not contract is given up."""
    patient = dataclasses.replace(solver, patience=9, max_iterations=9, tolerance=1e-6)
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        W = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
        start, b = torch.randn(2, 8, 6, generator=generator, dtype=torch.float64)
        for act in (torch.relu, torch.tanh, torch.clone, torch.neg):
            matrix = 0.95 * (torch.eye(6, dtype=torch.float64) if act is torch.neg else W)

            def step(y: State, context: Context) -> Tensor:
                assert isinstance(y, Tensor)
                return act(y @ matrix.T + context["b"])  # noqa: B023

            problem = FixedPointProblem(step, Context(sample={"b": b}), start)
            solution = patient.solve(problem)
            assert (solution.converged | (solution.iterations == 9)).all()


def test_longer_steps_of_a_monotone_map_must_reduce_the_residual_at_first() -> None:
    problem = FixedPointProblem(lambda y, _: 2 * y, Context(), torch.ones(1, 2))
    monotone = dataclasses.replace(problem, monotone=True)
    assert eq.Anderson(damping=1.3).starts_steady(monotone)
    assert not eq.Anderson(damping=1.3).starts_steady(problem)
    assert not eq.Anderson(damping=1.6).starts_steady(monotone)
    assert eq.Anderson(damping=1.3, patience=9).solve(monotone).iterations == 2
