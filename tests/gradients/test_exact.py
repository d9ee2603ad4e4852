"""The implicit gradient against closed forms, finite differences and unrolling, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

import equilibria as eq
from equilibria.context import Context
from equilibria.models import DeepOptEqCell, OptEqCell, UnitLayer
from equilibria.operators import Identity
from tests.problems import PROBLEMS, CoupledMean

SOLVER = eq.Anderson(tolerance=1e-13, max_iterations=3000)


def double_layer(cell: eq.Cell, **options: object) -> eq.EquilibriumLayer:
    options = {"gradient": eq.Implicit(tolerance=1e-12), "strict": True, **options}
    return eq.EquilibriumLayer(cell=cell.double(), solver=SOLVER, **options)  # type: ignore[arg-type]


class SmoothCoupling(eq.Energy):
    """A custom term with a parameter and without an explicit gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.2))

    def value(self, y: Tensor, context: Context) -> Tensor:
        return self.weight * (1 + (y[:, 1:] - y[:, :-1]).square()).sqrt().sum(dim=1)


def dense_cells() -> dict[str, eq.Cell]:
    """One small dense cell of each kind, with norm control active."""
    torch.manual_seed(0)

    def operators(width: int) -> tuple[eq.Dense, eq.Dense]:
        W = eq.Dense(3, width, norm="bound", zeta=0.9)
        with torch.no_grad():
            W.kernel.mul_(3)
        return W, eq.Dense(2, width)

    cells: dict[str, eq.Cell] = {}
    for activation in eq.activations.list_activations():
        W, U = operators(4)
        cells[f"opteq-{activation}"] = OptEqCell(W, U, activation=activation)
    W, U = operators(4)
    cells["opteq-mu-alpha"] = OptEqCell(W, U, activation="tanh", mu=1.3, alpha=0.7)
    W, U = operators(4)
    cells["custom-energy"] = eq.EnergyCell(
        eq.Input(U) + 0.9 * eq.Quadratic(W) + 0.5 * SmoothCoupling(), "softplus"
    )
    for layers, alpha, learnable in (
        (1, 0.8, False),
        (1, 1.0, True),
        (2, 0.8, True),
        (3, 1.0, False),
    ):
        units = [
            UnitLayer(*operators(w), activation="tanh", alpha=alpha, learnable_alpha=learnable)
            for w in (4, 2, 5)[:layers]
        ]
        cells[f"deep-{layers}-{alpha}-{learnable}"] = DeepOptEqCell(units)
    W, U = operators(4)
    cells["deep-relu-mu"] = DeepOptEqCell([UnitLayer(W, U, mu=1.2, alpha=0.6)])
    return cells


CELLS = list(dense_cells())


def as_function(layer: eq.EquilibriumLayer) -> tuple[object, list[Tensor]]:
    """Return the layer as a function of its input and parameters, with arguments for it."""
    names = [name for name, _ in layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    return function, [x, *values]


def test_a_replaced_step_has_gradients_for_its_parameters() -> None:
    """The function refers to the original cell, so the backward pass must not use a copy."""
    problem = PROBLEMS["linear_nonsymmetric"]()
    gradients = []
    for replaced in (False, True):
        step = problem.cell.step
        if replaced:
            problem.cell.step = lambda state, context, step=step: step(state, context)  # type: ignore[method-assign, misc]
        layer = eq.EquilibriumLayer(cell=problem.cell, solver=SOLVER)
        gradients += torch.autograd.grad(layer(problem.x).square().sum(), layer.parameters())
    torch.testing.assert_close(gradients[1], gradients[0])
    assert gradients[0].any()


@pytest.mark.parametrize("method", ["auto", "gmres", "bicgstab"])
@pytest.mark.parametrize("name", list(PROBLEMS))
def test_agrees_with_the_closed_form(name: str, method: str, float64_device: torch.device) -> None:
    problem = PROBLEMS[name]().to(torch.float64, float64_device)
    layer = eq.EquilibriumLayer(
        cell=problem.cell,
        solver=SOLVER,
        gradient=eq.Implicit(tolerance=1e-12, method=method),
        strict=True,
    )
    x = problem.x.clone().requires_grad_()
    output = layer(x)
    for i in range(output.shape[1]):
        (gradient,) = torch.autograd.grad(output[:, i].sum(), x, retain_graph=True)
        torch.testing.assert_close(gradient, problem.jacobian[:, i], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CELLS)
def test_first_derivatives_against_finite_differences(name: str) -> None:
    function, arguments = as_function(double_layer(dense_cells()[name]))
    assert gradcheck(function, arguments, eps=1e-6, atol=1e-7, rtol=1e-6, fast_mode=False)


@pytest.mark.parametrize("name", CELLS)
def test_second_derivatives_against_finite_differences(name: str) -> None:
    function, arguments = as_function(double_layer(dense_cells()[name]))
    assert gradgradcheck(function, arguments, eps=1e-6, atol=1e-6, rtol=1e-5, fast_mode=True)


def test_third_derivative() -> None:
    """y = tanh(w²y + x) in one dimension, against finite differences of the second derivative."""
    cell = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(torch.tensor([[0.8]])), "tanh")
    layer = double_layer(cell)

    def derivatives(at: float) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.tensor([[at]], dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second.sum(), x)
        return first, second, third

    step = 1e-4
    numerical = (derivatives(0.3 + step)[1] - derivatives(0.3 - step)[1]) / (2 * step)
    torch.testing.assert_close(derivatives(0.3)[2], numerical.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("method", ["auto", "gmres", "bicgstab"])
def test_agrees_with_two_hundred_unrolled_steps(name: str, method: str) -> None:
    cell = dense_cells()[name].double()
    x = torch.randn(3, 2, dtype=torch.float64)
    parameters = list(cell.parameters())
    implicit = double_layer(cell, gradient=eq.Implicit(tolerance=1e-12, method=method))
    unrolled = double_layer(cell, gradient=eq.Unrolled(steps=200), strict=False)
    gradients = [
        torch.autograd.grad(layer(x).square().sum(), parameters) for layer in (implicit, unrolled)
    ]
    for exact, iterated in zip(*gradients, strict=True):
        torch.testing.assert_close(exact, iterated, rtol=1e-8, atol=1e-8)


def test_a_convolutional_layer_against_finite_differences() -> None:
    torch.manual_seed(0)
    W = eq.Conv2d(2, 3, 3, norm="bound", zeta=0.9)
    with torch.no_grad():
        W.kernel.mul_(3)
    layer = double_layer(OptEqCell(W, eq.Conv2d(2, 3, 1), activation="tanh"))
    names = [name for name, _ in layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert gradcheck(function, (x, *values), eps=1e-6, atol=1e-7, rtol=1e-6, fast_mode=True)
    assert gradgradcheck(function, (x, *values), eps=1e-6, atol=1e-6, rtol=1e-5, fast_mode=True)


def test_the_gradient_outside_of_the_active_set_is_exact() -> None:
    """Conjugate gradients must also be exact where S is zero (u + r, no division by S)."""
    problem = PROBLEMS["relu_active_set"]()
    weight = problem.cell.symmetry_weight(problem.fixed_point, problem.cell.inject(problem.x))
    assert (weight == 0).any()
    assert (weight == 1).any()
    y = problem.fixed_point
    gradient = torch.randn_like(y)
    layer = double_layer(problem.cell)
    x = problem.x.requires_grad_()
    (exact,) = torch.autograd.grad(layer(x), x, gradient)
    expected = torch.einsum("bij,bi->bj", problem.jacobian, gradient)
    torch.testing.assert_close(exact, expected, rtol=1e-9, atol=1e-9)
    assert layer.last_backward is not None
    assert layer.last_backward.method == "conjugate gradients"


def test_the_weight_is_evaluated_at_the_pre_activation() -> None:
    """With a skip connection an inactive unit can have a positive state."""
    problem = PROBLEMS["relu_active_set"]()
    cell = eq.EnergyCell(problem.cell.energy, "relu", alpha=0.5)  # type: ignore[attr-defined]
    # A loose tolerance leaves positive iterates where the equilibrium is zero.
    start = torch.ones_like(problem.x)
    layer = eq.EquilibriumLayer(
        cell=cell, solver=eq.Picard(tolerance=1e-3, max_iterations=500), gradient=eq.Implicit()
    )
    x = problem.x.clone().requires_grad_()
    output = layer(x, start)
    inactive = problem.fixed_point == 0
    assert (output[inactive] > 0).all()
    weight = cell.symmetry_weight(output.detach(), cell.inject(x))
    assert (weight[inactive] == 0).all()
    (gradient,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(gradient, problem.jacobian.sum(dim=1), rtol=1e-4, atol=1e-4)


def test_a_coupled_batch_is_differentiated_as_one_problem() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    layer = double_layer(CoupledMean())
    weights = torch.randn(5, 3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weights * layer(x)).sum(), x)
    torch.testing.assert_close(gradient, weights + weights.mean(dim=0), rtol=1e-9, atol=1e-9)
    assert layer.last_backward is not None
    assert layer.last_backward.status.shape == (1,)


def test_a_parameter_used_in_inject_and_in_step_gets_the_full_derivative() -> None:
    """The local graph must be cut, because the context also depends on the parameter."""

    class Shared(eq.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(0.4))

        def inject(self, x: Tensor) -> Context:
            return Context(sample={"c": x * self.w})

        def initial_state(self, x: Tensor, context: Context) -> Tensor:
            return torch.zeros_like(x)

        def step(self, state: Tensor, context: Context) -> Tensor:
            return self.w * state + context["c"]

    cell = Shared()
    layer = double_layer(cell)
    x = torch.tensor([[2.0]], dtype=torch.float64)
    (first,) = torch.autograd.grad(layer(x).sum(), cell.w, create_graph=True)
    # y* = x w/(1−w):  dy*/dw = x/(1−w)²,  d²y*/dw² = 2x/(1−w)³.
    torch.testing.assert_close(first.item(), 2.0 / 0.6**2)
    (second,) = torch.autograd.grad(first, cell.w)
    torch.testing.assert_close(second.item(), 4.0 / 0.6**3)
