"""Equilibrium layers: cell, solver and gradient rule, warnings and errors."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.context import Context
from equilibria.operators import Identity
from tests.problems import linear_nonsymmetric, relu_active_set


def test_readme_example() -> None:
    @eq.energy_term
    def smoothness(y: Tensor, x: Tensor) -> Tensor:
        return (y[:, 1:] - y[:, :-1]).square().sum(dim=1)

    U, W = eq.Dense(8, 16), eq.Dense(12, 16, norm="bound", zeta=0.6)
    layer = eq.EquilibriumLayer(
        energy=eq.Input(U) + eq.Quadratic(W) + 0.1 * smoothness,
        activation="relu",
        solver=eq.Anderson(tolerance=1e-4),
        gradient=eq.Implicit(),
    )
    x = torch.randn(5, 8)
    y = layer(x)
    assert y.shape == (5, 16)
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    solution = layer.solve(x)
    assert solution.converged.all()
    torch.testing.assert_close(layer.output(solution), y, rtol=1e-3, atol=1e-3)
    start = torch.zeros_like(y)
    assert (layer.objective(x).value(y) < layer.objective(x).value(start)).all()


def test_state_has_the_shape_of_the_input_without_an_input_term() -> None:
    @eq.energy_term
    def attract(y: Tensor, x: Tensor) -> Tensor:
        return (0.25 * y.square() - x * y).sum(dim=1)

    x = torch.randn(3, 4, dtype=torch.float64)
    y = eq.EquilibriumLayer(attract, activation="identity", solver=eq.Picard(tolerance=1e-12))(x)
    torch.testing.assert_close(y, x / 1.5)


def test_first_argument_is_an_energy_a_cell_or_a_function() -> None:
    problem = linear_nonsymmetric()
    assert eq.EquilibriumLayer(problem.cell).cell is problem.cell
    with pytest.raises(ValueError, match="exactly one of energy and cell"):
        eq.EquilibriumLayer()
    with pytest.raises(ValueError, match="exactly one of energy and cell"):
        eq.EquilibriumLayer(eq.Quadratic(torch.eye(2)), cell=problem.cell)
    with pytest.raises(TypeError, match="got int"):
        eq.EquilibriumLayer(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must take the state and the inputs"):
        eq.EquilibriumLayer(torch.nn.Linear(2, 2))(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="unknown activation 'rellu'; did you mean"):
        eq.EquilibriumLayer(eq.Quadratic(torch.eye(2)), activation="rellu")


def steep_l1() -> eq.EquilibriumLayer:
    """Layer whose energy has kinks at which every solve stalls."""
    l1 = eq.energy_term(lambda y, x: y.abs().sum(dim=1))
    energy = eq.Input(eq.operators.Identity()) + 3 * l1
    return eq.EquilibriumLayer(energy, activation="identity", tolerance=1e-6)


def warnings_of(layer: eq.EquilibriumLayer, x: Tensor, times: int = 2) -> list[str]:
    """Return the convergence warnings of a few forward passes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            layer(x)
    return [str(w.message) for w in caught if w.category is eq.ConvergenceWarning]


def test_stalled_solves_warn_once_in_training() -> None:
    layer = steep_l1()
    assert layer.training
    (message,) = warnings_of(layer, torch.randn(4, 16))
    assert "4 of 4 samples (100%) did not converge" in message
    assert "stalled" in message


def test_diverged_solves_warn_once_in_training() -> None:
    layer = eq.EquilibriumLayer(lambda z, x: 3 * z + x, tolerance=1e-6, solver="picard")
    (message,) = warnings_of(layer, torch.ones(2, 3))
    assert "diverged" in message


@pytest.mark.parametrize(("tolerance", "count"), [(1e-1, 0), (1e-4, 1)])
def test_training_warns_only_of_residuals_far_above_the_tolerance(
    tolerance: float, count: int
) -> None:
    """Starting at zero, the relative residuals of z ← z/2 + x are 1, 1/3, 1/7, 1/15, 1/31."""
    solver = eq.Picard(tolerance=tolerance / 8, max_iterations=5)
    layer = eq.EquilibriumLayer(lambda z, x: z / 2 + x, solver=solver)
    assert len(warnings_of(layer, torch.ones(2, 3))) == count
    assert layer.last_solution is not None
    assert layer.last_solution.share_converged == 0
    layer.eval()
    assert len(warnings_of(layer, torch.ones(2, 3))) == 1 - count  # one warning per status


def test_each_status_is_reported_once() -> None:
    factor = torch.tensor(0.5)
    layer = eq.EquilibriumLayer(
        lambda z, x: factor * z + x, solver=eq.Picard(max_iterations=20, tolerance=1e-12)
    ).eval()
    with pytest.warns(eq.ConvergenceWarning, match="out of iterations"):
        layer(torch.ones(2, 3, dtype=torch.float64))
    factor.fill_(1e4)
    with pytest.warns(eq.ConvergenceWarning, match="diverged"):
        layer(torch.ones(2, 3, dtype=torch.float64))


def test_strict_layers_raise_in_training() -> None:
    problem = relu_active_set()
    solver = eq.Picard(max_iterations=2, tolerance=1e-8)
    strict = eq.EquilibriumLayer(cell=problem.cell, solver=solver, strict=True)
    with pytest.raises(eq.ConvergenceError, match="raise max_iterations"):
        strict(problem.x)


def test_unrolled_iterations_do_not_warn_in_training() -> None:
    layer = eq.EquilibriumLayer(lambda z, x: z / 2 + x, gradient=eq.Unrolled(steps=3))
    assert warnings_of(layer, torch.ones(2, 3)) == []


def test_forward_warnings_point_at_the_caller() -> None:
    layer = steep_l1()
    model = torch.nn.Sequential(torch.nn.Identity(), layer)
    with pytest.warns(eq.ConvergenceWarning) as caught:
        model(torch.randn(2, 16))
    assert {warning.filename for warning in caught} == {__file__}


def test_backward_warnings_point_at_the_caller() -> None:
    problem = relu_active_set()
    gradient = eq.Implicit(max_iterations=1, tolerance=1e-12)
    layer = eq.EquilibriumLayer(cell=problem.cell, tolerance=1e-8, gradient=gradient)
    y = layer(problem.x.requires_grad_())
    with pytest.warns(eq.ConvergenceWarning, match="backward solve") as caught:
        y.sum().backward()
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_diverged_samples_are_nan_and_others_are_unaffected(training: bool) -> None:
    """z ← x·z + 1 contracts for |x| < 1."""
    layer = eq.EquilibriumLayer(lambda z, x: x * z + 1, solver="picard").train(training)
    x = torch.tensor([[0.5], [1e3], [torch.nan], [0.25]])
    expected = torch.tensor([[2.0], [torch.nan], [torch.nan], [4 / 3]])
    for output in (layer(x), layer.output(layer.solve(x))):
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=0, equal_nan=True)


def test_maps_that_normalize_a_tiny_input_converge() -> None:
    layer = eq.EquilibriumLayer(
        lambda z, x: (
            0.5 * z + x / x.norm(dim=1, keepdim=True) * (z.norm(dim=1, keepdim=True) > 0) + x
        )
    )
    solution = layer.solve(torch.full((1, 4), 1e-12))
    assert bool(solution.converged.all())
    torch.testing.assert_close(solution.state, torch.ones(1, 4), rtol=1e-3, atol=0)


@pytest.mark.parametrize("call", ["forward", "solve"])
def test_float16_on_a_cpu_raises(call: str) -> None:
    layer = eq.EquilibriumLayer(eq.Input(torch.eye(2))).half()
    with pytest.raises(NotImplementedError, match=r"float16 on a CPU.*model\.float\(\)"):
        getattr(layer, call)(torch.ones(1, 2, dtype=torch.float16))


def test_inject_runs_once_per_solve_and_step_once_per_iteration() -> None:
    problem = relu_active_set()
    calls = {"inject": 0, "step": 0}

    class Counting(eq.EnergyCell):
        def inject(self, x: Tensor) -> Context:
            calls["inject"] += 1
            return super().inject(x)

        def step(self, state: eq.State, context: Context) -> eq.State:
            calls["step"] += 1
            return super().step(state, context)

    cell = Counting(problem.cell.energy)  # type: ignore[attr-defined]
    layer = eq.EquilibriumLayer(cell=cell)
    layer(problem.x.requires_grad_()).sum().backward()
    assert layer.last_solution is not None
    # The backward pass evaluates one more step.
    assert calls == {"inject": 1, "step": layer.last_solution.evaluations + 1}


def test_stored_solutions_have_no_state() -> None:
    problem = relu_active_set()
    layer = eq.EquilibriumLayer(cell=problem.cell)
    layer(problem.x.requires_grad_()).sum().backward()
    assert layer.last_solution is not None
    assert layer.last_backward is not None
    assert layer.last_solution.state.numel() == 0  # type: ignore[union-attr]
    assert layer.last_solution.context.tensors() == []
    assert layer.last_backward.value.numel() == 0
    copy.deepcopy(layer)


def test_contraction_bound() -> None:
    W = 0.5 * torch.eye(3)
    x = torch.zeros(1, 3)
    energy = eq.Input(Identity()) + 2.0 * eq.Quadratic(W)
    layer = eq.EquilibriumLayer(energy, activation="relu")
    assert layer.contraction_bound(x) == pytest.approx(0.5)
    quarter = eq.EquilibriumLayer(energy, activation="sigmoid")
    assert quarter.contraction_bound(x) == pytest.approx(0.125)
    relaxed = eq.EquilibriumLayer(cell=eq.EnergyCell(energy, "relu", alpha=0.5))
    assert relaxed.contraction_bound(x) == pytest.approx(0.75)
    unknown = eq.EquilibriumLayer(energy + (lambda y, x: y.cos().sum(dim=1)))
    assert unknown.contraction_bound(x) is None
    assert eq.EquilibriumLayer(cell=linear_nonsymmetric().cell).contraction_bound(x) is None


def test_missing_methods_of_a_cell_raise() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(TypeError, match="must define inject"):
        eq.EquilibriumLayer(cell=eq.Cell())(x)
    with pytest.raises(TypeError, match="no hidden objective"):
        eq.EquilibriumLayer(cell=linear_nonsymmetric().cell).objective(torch.zeros(1, 5).double())
    with pytest.raises(TypeError, match="without a symmetry_weight"):
        eq.gradients.capabilities.symmetry_weight(eq.Cell(), x, Context())
    with pytest.raises(TypeError, match="define output"):
        eq.Cell().output((x, x), Context())


def test_errors_name_wrong_shapes() -> None:
    layer = eq.EquilibriumLayer(eq.Input(eq.Dense(3, 4)) + eq.Quadratic(eq.Dense(2, 4)))
    with pytest.raises(ValueError, match=r"expected an input of shape \(B, …, 3\), got \(B, 5\)"):
        layer(torch.zeros(2, 5))
    mismatched = eq.EquilibriumLayer(eq.Input(eq.Dense(3, 4)) + eq.Quadratic(eq.Dense(2, 5)))
    with pytest.raises(ValueError, match=r"expected an output of shape \(B, …, 5\), got \(B, 4\)"):
        mismatched(torch.zeros(2, 3))


def test_random_masks_in_the_context_are_constant_during_a_solve() -> None:

    class Dropout(eq.EnergyCell):
        def inject(self, x: Tensor) -> Context:
            mask = torch.bernoulli(torch.full_like(x, 0.5))
            return Context(sample={"mask": mask}, parts={"energy": super().inject(x)})

        def initial_state(self, x: Tensor, context: Context) -> eq.State:
            return torch.zeros_like(x)

        def step(self, state: eq.State, context: Context) -> eq.State:
            image = super().step(state, context.parts["energy"])
            assert isinstance(image, Tensor)
            return context["mask"] * image

    cell = Dropout(eq.Input(Identity()) + eq.Quadratic(0.8 * torch.eye(20)))
    cell.symmetry = eq.gradients.Symmetry.NONE
    layer = eq.EquilibriumLayer(cell=cell, strict=True)
    x = torch.rand(4, 20, requires_grad=True)
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    active = y != 0
    assert 0 < active.sum() < active.numel()
    assert (gradient[~active] == 0).all()
    torch.testing.assert_close(gradient[active], torch.full_like(gradient[active], 1 / 0.36))


@pytest.mark.parametrize("name", eq.gradients.list_gradients())
def test_every_gradient_rule_works_with_every_solver(name: str) -> None:
    problem = relu_active_set()
    for solver in [name for name in eq.solvers.list_solvers() if name != "sam"]:
        layer = eq.EquilibriumLayer(
            cell=problem.cell,
            solver=eq.solvers.get_solver(solver, tolerance=1e-9, max_iterations=999),
            gradient=eq.Unrolled(steps=60) if name == "unrolled" else name,
        )
        x = problem.x.clone().requires_grad_()
        output = layer(x)
        torch.testing.assert_close(output, problem.fixed_point, rtol=1e-5, atol=1e-5)
        (gradient,) = torch.autograd.grad(output.sum(), x)
        cosine = torch.nn.functional.cosine_similarity(
            gradient.flatten(), problem.jacobian.sum(dim=1).flatten(), dim=0
        )
        assert cosine > (0.5 if name == "one_step" else 0.95)


def test_overridden_steps_are_the_ones_that_are_differentiated() -> None:
    """EnergyCell.linearize must not bypass a redefined step."""

    class Halved(eq.EnergyCell):
        def step(self, state: eq.State, context: Context) -> eq.State:
            image = super().step(state, context)
            assert isinstance(image, Tensor)
            return 0.5 * image

    energy = eq.Input(Identity()) + eq.Quadratic(0.6 * torch.eye(2, dtype=torch.float64))
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    patched = eq.EnergyCell(energy)
    plain = patched.step
    patched.step = lambda state, context: 0.5 * plain(state, context)  # type: ignore[method-assign, operator]
    for cell in (Halved(energy), patched):
        layer = eq.EquilibriumLayer(cell=cell, solver=eq.Picard(tolerance=1e-12))
        (gradient,) = torch.autograd.grad(layer(x).sum(), x)
        torch.testing.assert_close(gradient, torch.full_like(x, 0.5 / (1 - 0.18)))


def test_starts_are_converted_to_the_memory_format_of_the_input() -> None:
    """The solver's buffer takes the format of the start."""
    layer = eq.EquilibriumLayer(
        eq.Input(eq.Conv2d(2, 3, 3)) + eq.Quadratic(eq.Conv2d(3, 3, 3, norm="bound"))
    )
    is_channels_last: list[bool] = []
    step = layer.cell.step

    def recorded(state: eq.State, context: eq.Context) -> eq.State:
        assert isinstance(state, torch.Tensor)
        is_channels_last.append(state.is_contiguous(memory_format=torch.channels_last))
        return step(state, context)

    layer.cell.step = recorded  # type: ignore[method-assign]
    layer.solve(torch.rand(4, 2, 6, 6), start=torch.zeros(4, 3, 6, 6))
    assert set(is_channels_last) == {True}
