"""Approximate gradient rules: their series, errors and costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.operators import Identity
from tests.problems import PROBLEMS, linear_nonsymmetric, relu_active_set


def gradient(rule: eq.gradients.GradientRule, x: Tensor, cell: eq.Cell) -> Tensor:
    solver = eq.Anderson(tolerance=1e-12, max_iterations=2000)
    layer = eq.EquilibriumLayer(cell=cell, solver=solver, gradient=rule)
    x = x.clone().requires_grad_()
    (result,) = torch.autograd.grad(layer(x).sum(), x)
    return result


@pytest.mark.parametrize("damping", [1.0, 0.6])
@pytest.mark.parametrize("steps", [1, 4])
def test_phantom_is_the_truncated_neumann_series(steps: int, damping: float) -> None:
    problem = linear_nonsymmetric()
    A = problem.cell.A.detach()  # type: ignore[union-attr]
    damped = damping * A + (1 - damping) * torch.eye(5, dtype=torch.float64)
    series = sum(torch.linalg.matrix_power(damped, k) for k in range(steps)) * damping
    expected = torch.ones(1, 5, dtype=torch.float64) @ series
    result = gradient(eq.Phantom(steps=steps, damping=damping), problem.x, problem.cell)
    torch.testing.assert_close(result, expected.expand(4, 5), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["relu_active_set", "tanh", "linear_nonsymmetric"])
def test_phantom_error_is_bounded_by_the_contraction(name: str) -> None:
    problem = PROBLEMS[name]()
    exact = gradient(eq.Implicit(tolerance=1e-12), problem.x, problem.cell)
    q = 0.9 if name != "relu_active_set" else 0.81
    damping = 0.8
    for steps in (1, 5, 20, 80):
        result = gradient(eq.Phantom(steps=steps, damping=damping), problem.x, problem.cell)
        bound = (1 - damping + damping * max(q, 0.9025)) ** steps
        error = (result - exact).norm(dim=1)
        # The remainder of the series: a power of J applied to the exact gradient.
        assert (error <= bound * exact.norm(dim=1).clamp_min(1) * 3).all()


def test_one_step_is_the_derivative_of_one_step() -> None:
    problem = relu_active_set()
    y = problem.fixed_point
    expected = problem.cell.symmetry_weight(y, problem.cell.inject(problem.x))
    torch.testing.assert_close(gradient(eq.OneStep(), problem.x, problem.cell), expected)
    torch.testing.assert_close(
        gradient(eq.Phantom(steps=1, damping=1.0), problem.x, problem.cell), expected
    )


def test_unrolled_is_the_iteration_and_its_gradient() -> None:
    problem = PROBLEMS["tanh"]()
    x = problem.x.clone().requires_grad_()
    y = torch.zeros_like(x)
    context = problem.cell.inject(x)
    for _ in range(7):
        y = problem.cell.step(y, context)
    (expected,) = torch.autograd.grad(y.sum(), x)
    for checkpoint in (None, 1, 3, 50):
        layer = eq.EquilibriumLayer(
            cell=problem.cell, gradient=eq.Unrolled(steps=7, checkpoint=checkpoint)
        )
        x_copy = problem.x.clone().requires_grad_()
        output = layer(x_copy)
        (result,) = torch.autograd.grad(output.sum(), x_copy)
        torch.testing.assert_close(output, y)
        torch.testing.assert_close(result, expected)
        with torch.no_grad():
            torch.testing.assert_close(layer(x_copy), y)
        assert layer.last_solution is not None
        assert (layer.last_solution.iterations == 7).all()
        assert (layer.last_solution.status == eq.Status.OUT_OF_ITERATIONS).all()


def test_checkpointing_saves_fewer_tensors() -> None:
    problem = PROBLEMS["tanh"]()
    saved = {}
    for checkpoint in (None, 8):
        layer = eq.EquilibriumLayer(
            cell=problem.cell, gradient=eq.Unrolled(steps=33, checkpoint=checkpoint)
        )
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layer(problem.x.clone().requires_grad_())
        saved[checkpoint] = count
    assert saved[8] < saved[None] / 3


def test_divergence_of_unrolled_iterations_is_reported() -> None:
    cell = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(1e3 * torch.eye(2)), "relu")
    layer = eq.EquilibriumLayer(cell=cell, gradient=eq.Unrolled(steps=40)).eval()
    with pytest.warns(eq.ConvergenceWarning, match="diverged"):
        layer(torch.ones(2, 2))


def test_more_steps_reduce_the_error_of_the_gradient() -> None:
    problem = relu_active_set()
    exact = gradient(eq.Implicit(tolerance=1e-12), problem.x, problem.cell)
    for rules in (
        [eq.Phantom(steps=k) for k in (1, 5, 25)],
        [eq.Unrolled(steps=k) for k in (4, 16, 64)],
    ):
        errors = [(gradient(r, problem.x, problem.cell) - exact).norm().item() for r in rules]
        assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_rules_declare_whether_they_are_exact() -> None:
    exact = {name: eq.gradients.get_gradient(name).exact for name in eq.gradients.list_gradients()}
    expected = {"one_step": False, "phantom": False, "unrolled": False}
    assert exact == {"implicit": True, "auto": True, **expected}
    for name in eq.gradients.list_gradients():
        if not exact[name]:
            assert "**Approximate**" in (type(eq.gradients.get_gradient(name)).__doc__ or "")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: eq.Phantom(steps=0), ValueError, "steps"),
        (lambda: eq.Phantom(damping=0.0), ValueError, "damping"),
        (lambda: eq.Unrolled(steps=0), ValueError, "steps"),
        (lambda: eq.Unrolled(checkpoint=0), ValueError, "checkpoint"),
        (lambda: eq.Implicit(tolerance=-1.0), ValueError, "tolerance"),
        (lambda: eq.Implicit(max_iterations=0), ValueError, "max_iterations"),
        (lambda: eq.Implicit(method="lu"), ValueError, "method"),  # type: ignore[arg-type]
        (lambda: eq.gradients.get_gradient("implict"), ValueError, "did you mean 'implicit'"),
        (lambda: eq.gradients.get_gradient("phantom", step=2), TypeError, "step"),
    ],
)
def test_invalid_options_raise(make: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()  # type: ignore[operator]


class Counted(eq.Cell):
    """y ← rate·y + x with one rate per sample; counts its steps."""

    def __init__(self, rates: Tensor) -> None:
        super().__init__()
        self.rates = rates
        self.steps = 0

    def inject(self, x: Tensor) -> eq.Context:
        return eq.Context(sample={"x": x, "rate": self.rates[:, None]})

    def initial_state(self, x: Tensor, context: eq.Context) -> Tensor:
        return torch.zeros_like(x)

    def step(self, state: eq.State, context: eq.Context) -> Tensor:
        assert isinstance(state, Tensor)
        self.steps += 1
        return context["rate"] * state + context["x"]


@pytest.mark.parametrize(
    ("rates", "blocks", "extra"),
    [
        ([0.3, 0.3, 0.3, 0.3], 1, 0),
        # One sample converges before the others and stays in the batch.
        ([0.1, 0.3, 0.3, 0.3], 1, 0),
        # Three samples converge and are dropped from the batch.
        ([0.6, 0.1, 0.1, 0.1], 1, 1),
        # Four blocks are solved together, five are not.
        ([0.3, 0.3, 0.3, 0.3], 4, 0),
        ([0.3, 0.3, 0.3, 0.3, 0.3], 5, 1),
    ],
)
def test_one_step_records_the_last_evaluation_of_the_solve(
    rates: list[float], blocks: int, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from equilibria.solvers import _cpu

    cell = Counted(torch.tensor(rates, dtype=torch.float64))
    layer = eq.EquilibriumLayer(cell, solver=eq.Picard(tolerance=1e-3), gradient="one_step")
    x = torch.rand(len(rates), 3, dtype=torch.float64) + 1
    monkeypatch.setattr(_cpu, "BLOCK_BYTES", x.nbytes // blocks)
    solved = layer.solve(x)
    cell.steps = 0
    x.requires_grad_()
    output = layer(x)
    solves = blocks if blocks > 4 else 1
    assert cell.steps == solves * solved.evaluations + extra
    exact = x.detach() / (1 - cell.rates[:, None])
    assert ((output.detach() - exact).norm(dim=1) <= 2e-3 * exact.norm(dim=1)).all()
    if not extra:
        # The output has the derivative of the last step but the state of the solve.
        assert isinstance(solved.state, Tensor)
        torch.testing.assert_close(output.detach(), solved.state, rtol=1e-14, atol=1e-14)
    (result,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(result, torch.ones_like(x))


@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_one_step_of_a_failed_solve_is_evaluated_at_its_best_state() -> None:
    cell = Counted(torch.tensor([0.99, 0.5], dtype=torch.float64))
    layer = eq.EquilibriumLayer(
        cell, solver=eq.Picard(tolerance=1e-6, max_iterations=40, drop_share=1), gradient="one_step"
    ).train()
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    output = layer(x)
    assert cell.steps == 41
    assert bool(output.isfinite().all())
    (result,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(result, torch.ones_like(x))
