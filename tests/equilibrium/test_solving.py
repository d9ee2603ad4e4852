"""Solver settings of layers, and `solving` blocks that change them temporarily."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.solvers import Iterate, StoppingCriterion


def layer(**options: object) -> eq.EquilibriumLayer:
    torch.manual_seed(0)
    W = eq.Dense(4, 6, norm="bound", zeta=0.8).double()
    energy = eq.Input(eq.Dense(3, 6).double()) + eq.Quadratic(W)
    return eq.EquilibriumLayer(energy, **options)  # type: ignore[arg-type]


def inputs(samples: int = 5) -> Tensor:
    return torch.randn(samples, 3, dtype=torch.float64)


def test_settings_accept_names_objects_and_limits() -> None:
    settings = eq.Solving("anderson", {"name": "phantom", "steps": 3}, tolerance=1e-7)
    assert settings.solver == eq.Anderson(tolerance=1e-7)
    assert settings.gradient == eq.Phantom(steps=3)
    assert (settings.tolerance, settings.max_iterations) == (1e-7, eq.Anderson().max_iterations)
    assert eq.Solving(eq.Picard(max_iterations=7)).max_iterations == 7
    assert eq.Solving(eq.Picard(), tolerance=1e-3).solver == eq.Picard(tolerance=1e-3)


def test_changed_settings() -> None:
    settings = eq.Solving("anderson", tolerance=1e-6, max_iterations=50)
    assert settings.changed(solver="picard").solver == eq.Picard(tolerance=1e-6, max_iterations=50)
    assert settings.changed(solver=eq.Picard()).solver == eq.Picard()
    assert settings.changed(tolerance=1e-2).solver == eq.Anderson(tolerance=1e-2, max_iterations=50)
    assert settings.changed(gradient="one_step", strict=True).strict
    assert settings.changed() == settings


def test_blocks_change_only_the_solves_inside() -> None:
    run, x = layer(), inputs()
    before = dict(run.__dict__)
    settings = {"solver": "picard", "tolerance": 1e-9, "gradient": "one_step"}
    with eq.solving(run, **settings, record=True) as record:  # type: ignore[arg-type]
        assert run.solver == eq.Picard(tolerance=1e-9, max_iterations=100)
        assert isinstance(run.gradient, eq.OneStep)
        run(x)
        run.solve(x)
    assert [solution.solver for solution in record.solutions] == ["Picard", "Picard"]
    assert all((solution.residual <= 1e-9).all() for solution in record.solutions)
    assert run.solver == run.solving.solver == eq.Auto()
    run(x)
    assert len(record.solutions) == 2
    changed = {name for name, value in run.__dict__.items() if before[name] is not value}
    assert changed <= {"last_solution"}


def test_exceptions_end_a_block() -> None:
    run = layer()
    with pytest.raises(RuntimeError, match="stop"), eq.solving(run, tolerance=0.1):
        raise RuntimeError("stop")
    assert run.solver.tolerance == eq.Auto().tolerance


def test_inner_blocks_take_precedence_and_all_blocks_record() -> None:
    run, x = layer(), inputs()
    with eq.solving(run, solver="picard", tolerance=1e-3, record=True) as outer:
        with eq.solving(run, tolerance=1e-8, record=True) as inner:
            run(x)
        run(x)
    assert [solution.tolerance for solution in outer.solutions] == [1e-8, 1e-3]
    assert [solution.tolerance for solution in inner.solutions] == [1e-8]
    assert {solution.solver for solution in outer.solutions} == {"Picard"}


def test_private_blocks_are_hidden_from_enclosing_blocks() -> None:
    run, x = layer(), inputs()
    start = torch.ones(5, 6, dtype=torch.float64)
    with eq.solving(run, tolerance=1e-3, start={run: start}, record=True) as outer:
        with eq.solving(run, private=True, record=True) as inner:
            assert run.solver.tolerance == 1e-3  # settings of the outer block still apply
            cold = run.solve(x)
        run.solve(x)
    assert (len(inner.solutions), len(outer.solutions)) == (1, 1)
    assert torch.equal(cold.iterations, run.solve(x, solver=eq.Auto(tolerance=1e-3)).iterations)


def test_threads_do_not_see_each_others_blocks() -> None:
    run = layer()
    inside, done = threading.Event(), threading.Event()
    tolerances: list[float] = []

    def other() -> None:
        inside.wait(60)
        tolerances.append(run.solver.tolerance)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with eq.solving(run, tolerance=0.5):
        inside.set()
        assert done.wait(60)
        assert run.solver.tolerance == 0.5
    thread.join()
    assert tolerances == [eq.Auto().tolerance]


def test_blocks_apply_only_to_layers_of_the_model() -> None:
    first, second = layer(), layer()
    model = nn.Sequential(first)
    with eq.solving(model, tolerance=0.5):
        assert (first.solver.tolerance, second.solver.tolerance) == (0.5, 1e-4)


def test_backward_solves_are_recorded_even_after_the_block() -> None:
    run = layer()
    with eq.solving(run, record=True) as record:
        value = run(inputs().requires_grad_()).sum()
        assert not record.backward
    value.backward()
    assert len(record.backward) == 1
    assert bool(record.backward[0].converged.all())


def test_equilibria_are_recorded_in_the_graph() -> None:
    run, x = layer(), inputs().requires_grad_()
    with eq.solving(run, record="equilibria") as record:
        feature = run(x)
    (equilibrium,) = record.equilibria
    assert equilibrium.layer is run
    assert torch.equal(run.cell.output(equilibrium.state, equilibrium.context), feature)
    assert equilibrium.state.requires_grad


def test_iterates_are_recorded_on_request() -> None:
    run, x = layer(solver=eq.Picard(tolerance=1e-6)), inputs()
    with eq.solving(run, record="iterates") as record:
        run(x)
    (solution,) = record.solutions
    assert solution.trace is not None
    assert solution.trace.states is not None
    assert len(solution.trace.states) == solution.evaluations
    torch.testing.assert_close(solution.trace.states[-1], solution.state)


def test_solves_start_at_the_previous_result_with_start_last() -> None:
    run, x = layer(solver=eq.Picard(tolerance=1e-10)), inputs()
    with eq.solving(run, start="last", record=True) as record:
        run(x)
        run(x)
    first, second = record.solutions
    assert (first.iterations > 5).all()
    assert (second.iterations <= 1).all()


def test_strict_blocks_raise_for_forward_and_backward_solves() -> None:
    run, x = layer(), inputs().requires_grad_()
    hard = eq.solving(run, solver="picard", tolerance=1e-12, max_iterations=2)
    with eq.solving(run, strict=True), hard, pytest.raises(eq.ConvergenceError):
        run(x)
    with eq.solving(run, strict=True, gradient=eq.Implicit(tolerance=1e-12, max_iterations=1)):
        value = run(x).square().sum()
    with pytest.raises(eq.ConvergenceError):
        value.backward()


def test_settings_of_a_layer_are_read_only() -> None:
    run = layer()
    for name in ("solver", "gradient", "strict"):
        with pytest.raises(AttributeError):
            setattr(run, name, "picard")


class LargestEntry(StoppingCriterion):
    """Stops a sample when an entry of its state exceeds a level, whatever its residual."""

    def __init__(self, level: float) -> None:
        self.level = level

    def reached(self, iterate: Iterate) -> Tensor:
        state = iterate.problem.unpack(iterate.image)
        assert isinstance(state, Tensor)
        return state.amax(dim=1) > self.level


@pytest.mark.filterwarnings("ignore:.*did not converge")
@pytest.mark.parametrize("solver", ["picard", "anderson", "auto"])
def test_custom_criteria_stop_each_sample_separately(solver: str) -> None:
    run = layer()
    x = inputs(12) * torch.logspace(-2, 1, 12, dtype=torch.float64)[:, None]
    plain = run.solve(x, solver=eq.solvers.get_solver(solver, tolerance=1e-10))
    criterion = LargestEntry(0.5)
    solution = run.solve(x, solver=eq.solvers.get_solver(solver, stop=criterion, tolerance=1e-10))
    largest = plain.state.amax(dim=1)  # type: ignore[union-attr]
    # Iterates increase towards the equilibrium, because the map is nearly monotone.
    clear = (largest < 0.45) | (largest > 0.6)
    assert torch.equal(solution.converged[clear], (largest > 0.5)[clear])
    assert (solution.iterations[largest > 0.6] <= plain.iterations[largest > 0.6]).all()


def test_summaries_report_the_residual_with_custom_criteria() -> None:
    run, x = layer(), inputs(3)
    solution = run.solve(x, solver=eq.Picard(stop=LargestEntry(-1.0), tolerance=1e-10))
    assert bool(solution.converged.all())
    assert f"converged to {float(solution.residual.max()):.1e}" in solution.summary()


def modulated(y: Tensor, x: Tensor, shift: Tensor) -> Tensor:
    return 0.1 * (y - shift).square().sum(dim=1) + 0 * x.sum(dim=1)


class Scaled(eq.Cell):
    """Cell y = tanh(a·x + W y) with two inputs: x, and a scale a per sample."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.W = nn.Parameter(0.1 * torch.randn(4, 4, generator=generator, dtype=torch.float64))

    def inject(self, x: Tensor, scale: Tensor) -> eq.Context:
        return eq.Context(sample={"c": scale[:, None] * x})

    def initial_state(self, x: Tensor, scale: Tensor, context: eq.Context) -> Tensor:
        return torch.zeros_like(x)

    def step(self, state: eq.State, context: eq.Context) -> eq.State:
        assert isinstance(state, Tensor)
        return torch.tanh(context["c"] + state @ self.W)


def test_gradients_reach_each_of_several_inputs() -> None:
    run = eq.EquilibriumLayer(
        Scaled(),
        solver=eq.Anderson(tolerance=1e-13, max_iterations=300),
        gradient=eq.Implicit(tolerance=1e-13),
    )
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(6, dtype=torch.float64).add(0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda *both: run(both), (x, scale))
    together = run.solve((x, scale))
    for i in range(6):
        alone = run.solve((x[i : i + 1], scale[i : i + 1]))
        torch.testing.assert_close(alone.state[0], together.state[i])  # type: ignore[index]


def test_every_term_of_a_sum_gets_all_inputs() -> None:
    """Here y* = relu(c + 0.2·shift)/1.2."""
    torch.manual_seed(0)
    U = eq.Dense(3, 4).double()
    run = eq.EquilibriumLayer(
        eq.Input(U) + eq.energy_term(modulated), solver=eq.Anderson(tolerance=1e-12)
    )
    x = torch.randn(5, 3, dtype=torch.float64)
    shift = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    feature = run((x, shift))
    torch.testing.assert_close(feature, ((U(x) + 0.2 * shift) / 1.2).relu())
    (gradient,) = torch.autograd.grad(feature.sum(), shift)
    torch.testing.assert_close(gradient, (feature > 0).double() * 0.2 / 1.2, rtol=1e-4, atol=1e-6)


def test_input_terms_select_an_input_by_index() -> None:
    U, V = eq.Dense(3, 4).double(), eq.Dense(2, 4).double()
    run = eq.EquilibriumLayer(eq.Input(U) + eq.Input(V, of=1), tolerance=1e-12)
    x, other = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    torch.testing.assert_close(run((x, other)), (U(x) + V(other)).relu())
    with pytest.raises(ValueError, match=r"Input\(of=1\) does not exist: the layer got 1 inputs"):
        run(x)


def test_contraction_bound_has_one_entry_per_sample() -> None:
    torch.manual_seed(0)
    kernel = eq.energies.PolynomialKernel(eq.Dense(3, 6).double(), 2, form="printed")
    run = eq.EquilibriumLayer(
        kernel + eq.Quadratic(eq.Dense(2, 6, norm="bound", zeta=0.5).double())
    )
    x = inputs(4) * torch.tensor([0.1, 1.0, 2.0, 3.0], dtype=torch.float64)[:, None]
    bound = run.contraction_bound(x)
    assert bound is not None
    assert bound.shape == (4,)
    for i in range(4):
        alone = run.contraction_bound(x[i : i + 1])
        assert alone is not None
        torch.testing.assert_close(alone[0], bound[i])
