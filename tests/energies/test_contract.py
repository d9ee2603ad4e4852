"""Properties of all energies: descent, symmetric Hessian, and gradients of the layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import equilibria as eq
from equilibria.context.state import Packing, state_tensors
from equilibria.energies import Branches, HeritageDiversity
from equilibria.operators import AveragePool, GraphConv, Incidence, Sparse
from tests.operators.bank import EDGES, scattered

pytestmark = pytest.mark.filterwarnings("ignore::equilibria.equilibrium.BatchCouplingWarning")

Case = tuple[tuple[int, ...], Callable[[], eq.Energy]]


def recurrence(channels: int, width: int) -> eq.LinearOperator:
    return eq.Conv2d(channels, width, 3, norm="bound", zeta=0.8)


def injection(channels: int, width: int, scale: int = 1) -> eq.LinearOperator:
    return eq.Conv2d(channels, width, 3) @ AveragePool(scale)


def branches(scales: tuple[int, ...], widths: tuple[int, ...]) -> Branches:
    return Branches([eq.Input(injection(2, w, s)) for w, s in zip(widths, scales, strict=True)])


def mopteq(scales: tuple[int, ...] = (1, 1, 1), **options: object) -> Callable[[], eq.Energy]:
    widths = tuple(2 + i % 2 for i in range(len(scales)))

    def make() -> eq.Energy:
        coupling = HeritageDiversity(
            [recurrence(3, w) for w in widths], scales=scales, **{"diversity": 0.05, **options}
        )
        return branches(scales, widths) + coupling

    return make


def with_kernel(kernel: type[eq.Energy]) -> Callable[[], eq.Energy]:
    """HH&D with another kernel for the input (GEQ Table 5)."""

    def make() -> eq.Energy:
        inputs = Branches([kernel(injection(2, 3, s)) for s in (1, 2)])
        coupling = HeritageDiversity([recurrence(3, 3)] * 2, scales=(1, 2), diversity=0.05)
        return inputs + coupling

    return make


def gaussian(
    *,
    gamma: str | float = "running",
    patch: int | None = 2,
    channel_split: int = 1,
    hidden: int | None = 3,
    scale: int = 1,
) -> Callable[[], eq.Energy]:
    def make() -> eq.Energy:
        size = None if patch is None else channel_split * patch**2
        projection = None
        if hidden is not None and size is not None:
            projection = eq.Dense(size, hidden, norm="bound", zeta=1.0)
        return eq.GaussianKernel(
            injection(2, 2, scale),
            recurrence(3, 2),
            projection,
            channel_split=channel_split,
            patch=patch,
            gamma=gamma,
        )

    return make


def over_time(channels: int, width: int) -> eq.LinearOperator:
    return eq.Conv1d(channels, width, 3, norm="bound", zeta=0.8)


def branches_over_time() -> eq.Energy:
    inputs = [eq.Input(eq.Conv1d(2, 2, 3) @ AveragePool(s, directions=1)) for s in (1, 2)]
    coupling = [over_time(2, 2), over_time(2, 2)]
    return Branches(inputs) + HeritageDiversity(coupling, scales=(1, 2), diversity=0.05)


def regularized(regularizer: eq.energies.Regularizer) -> Callable[[], eq.Energy]:
    def make() -> eq.Energy:
        W = recurrence(4, 3)
        term = eq.FeatureRegularizer(W, regularizer, 0.02, step="gradient")
        return eq.Input(injection(2, 3)) + eq.Quadratic(W) + term

    return make


CASES: dict[str, Case] = {
    "opteq": ((2, 4, 4), lambda: eq.Input(injection(2, 3)) + eq.Quadratic(recurrence(4, 3))),
    "popteq": (
        (2, 4, 4),
        lambda: Branches(
            [eq.Input(injection(2, 3, s)) + eq.Quadratic(recurrence(2, 3)) for s in (1, 2)],
        ),
    ),
    "mopteq": ((2, 4, 4), mopteq()),
    "mopteq-one-branch": ((2, 4, 4), mopteq((1,))),
    "mopteq-two-scales": ((2, 4, 4), mopteq((1, 2))),
    "mopteq-four-scales": ((2, 8, 8), mopteq((1, 2, 4, 8))),
    "mopteq-up-and-down": ((2, 4, 4), mopteq((2, 1, 4))),
    "mopteq-frozen": ((2, 4, 4), mopteq((1, 2, 2), sign="freeze")),
    "mopteq-without-diversity": ((2, 4, 4), mopteq((1, 2), diversity=0.0)),
    "mopteq-without-heritage": ((2, 4, 4), mopteq((1, 2), heritage=False)),
    "mopteq-polynomial": ((2, 4, 4), with_kernel(eq.energies.PolynomialKernel)),
    "mopteq-sigmoid": ((2, 4, 4), with_kernel(eq.energies.SigmoidKernel)),
    "polynomial": (
        (2, 4, 4),
        lambda: eq.energies.PolynomialKernel(injection(2, 3)) + eq.Quadratic(recurrence(3, 4).T),
    ),
    "sigmoid": (
        (2, 4, 4),
        lambda: eq.energies.SigmoidKernel(injection(2, 3)) + eq.Quadratic(recurrence(3, 4).T),
    ),
    "geq": ((2, 4, 4), gaussian()),
    "geq-whole-map": ((2, 4, 4), gaussian(patch=None, channel_split=1, hidden=None)),
    "geq-per-sample": ((2, 4, 4), gaussian(gamma="per-sample")),
    "geq-two-scales": (
        (2, 4, 4),
        lambda: Branches([gaussian(scale=s)() for s in (1, 2)]),
    ),
    "sequence": (
        (2, 6),
        lambda: eq.Input(eq.Conv1d(2, 3, 3)) + eq.Quadratic(over_time(4, 3)),
    ),
    "sequence-regularized": (
        (2, 6),
        lambda: (
            eq.Input(eq.Conv1d(2, 3, 3))
            + eq.FeatureRegularizer(over_time(4, 3), eq.energies.Incay(), 0.02)
        ),
    ),
    "sequence-geq": (
        (2, 6),
        lambda: eq.GaussianKernel(
            eq.Conv1d(2, 2, 3),
            over_time(3, 2),
            eq.Dense(4, 3, norm="bound", zeta=1.0),
            channel_split=2,
            patch=2,
        ),
    ),
    "sequence-mopteq": ((2, 4), branches_over_time),
    "tokens": (
        (3, 2),
        lambda: eq.Input(eq.Dense(2, 3)) + eq.Quadratic(eq.Dense(4, 3, norm="bound", zeta=0.8)),
    ),
    "tokens-geq": (
        (3, 2),
        lambda: eq.GaussianKernel(
            eq.Dense(2, 2), eq.Dense(3, 2, norm="bound", zeta=0.8), patch=None
        ),
    ),
    "graph": (
        (6, 2),
        lambda: (
            eq.Input(GraphConv(EDGES, 2, 3))
            + eq.Quadratic(GraphConv(EDGES, 2, 3, norm="bound", zeta=0.7))
            - 0.05 * eq.Quadratic(Incidence(EDGES).T)
        ),
    ),
    "graph-trained": (
        (6, 2),
        lambda: (
            eq.Input(eq.Dense(2, 2))
            + eq.Quadratic(Sparse(scattered(6, 5), trainable=True, norm="bound", zeta=0.8))
        ),
    ),
    "l2": ((2, 4, 4), regularized(eq.energies.L2())),
    "incay": ((2, 4, 4), regularized(eq.energies.Incay())),
    "decorrelation": ((2, 4, 4), regularized(eq.energies.Decorrelation())),
    "hsic": ((2, 4, 4), regularized(eq.energies.HSIC())),
    "mopteq-without-both": ((2, 4, 4), mopteq((1, 2), diversity=0.0, heritage=False)),
}


def layer_of(name: str, activation: str = "relu") -> tuple[eq.EquilibriumLayer, Tensor]:
    shape, make = CASES[name]
    torch.manual_seed(0)
    layer = eq.EquilibriumLayer(
        cell=Concatenating(make(), activation),
        solver=eq.Anderson(tolerance=1e-13, max_iterations=2000),
        gradient=eq.Implicit(tolerance=1e-13),
        strict=True,
    ).double()
    x = torch.randn(3, *shape, dtype=torch.float64)
    layer.eval()  # keeps running statistics (GEQ's γ) at their value for the first batch
    with torch.no_grad():
        layer(x)
    return layer, x


class Concatenating(eq.EnergyCell):
    """Energy cell whose output is the whole state."""

    def output(self, state: eq.State, context: eq.Context) -> Tensor:
        return torch.cat([tensor.flatten(1) for tensor in state_tensors(state)], dim=1)


def random_state(cell: eq.Cell, x: Tensor, context: eq.Context) -> tuple[Packing, Tensor]:
    packing = Packing.of(cell.initial_state(x, context), cell.couples_batch)
    flat = packing.pack(cell.initial_state(x, context))
    generator = torch.Generator().manual_seed(2)
    return packing, torch.rand(flat.shape, generator=generator, dtype=flat.dtype)


@pytest.mark.parametrize("name", list(CASES))
def test_descent_is_minus_the_gradient_of_the_value(name: str) -> None:
    layer, x = layer_of(name)
    energy = layer.cell.energy
    context = layer.cell.inject(x)
    packing, flat = random_state(layer.cell, x, context)
    leaf = flat.requires_grad_()
    value = energy.value(packing.unpack(leaf), context)
    assert value.shape == (() if energy.facts.couples_batch else (3,))
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    descent = packing.pack(energy.descent(packing.unpack(flat), context))
    torch.testing.assert_close(descent, -gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", list(CASES))
def test_values_do_not_depend_on_the_batch(name: str) -> None:
    layer, x = layer_of(name)
    energy = layer.cell.energy
    if energy.facts.couples_batch:
        pytest.skip("couples the batch")
    context = layer.cell.inject(x)
    packing, flat = random_state(layer.cell, x, context)
    together = energy.value(packing.unpack(flat), context)
    for i in range(3):
        alone = layer.cell.inject(x[i : i + 1])
        state = Packing.of(layer.cell.initial_state(x[:1], alone)).unpack(flat[i : i + 1])
        torch.testing.assert_close(energy.value(state, alone)[0], together[i])


@pytest.mark.parametrize("name", list(CASES))
def test_hessian_is_symmetric(name: str) -> None:
    layer, x = layer_of(name)
    x = x if layer.cell.couples_batch else x[:1]
    context = layer.cell.inject(x)
    packing, flat = random_state(layer.cell, x, context)

    def descent(v: Tensor) -> Tensor:
        return packing.pack(layer.cell.energy.descent(packing.unpack(v), context))

    jacobian = torch.autograd.functional.jacobian(descent, flat).reshape(flat.numel(), -1)
    torch.testing.assert_close(jacobian, jacobian.mT, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", list(CASES))
def test_input_gradient_matches_a_dense_adjoint_solve(name: str) -> None:
    layer, x = layer_of(name)
    cell = layer.cell
    x = x if cell.couples_batch else x[:1]
    x.requires_grad_()
    output = layer(x)
    g = torch.randn_like(output)
    (gradient,) = torch.autograd.grad(output, x, g)
    assert layer.last_backward is not None
    assert layer.last_backward.method == "conjugate gradients"

    solution = layer.solve(x)
    context = cell.inject(x)
    packing = Packing.of(solution.state, cell.couples_batch)
    flat = packing.pack(solution.state)

    def step(v: Tensor) -> Tensor:
        # Frozen signs are those of the solve.
        constants = solution.context if cell.refresh_until else context
        return packing.pack(cell.step(packing.unpack(v), constants))

    jacobian = torch.autograd.functional.jacobian(step, flat).reshape(flat.numel(), -1)
    identity = torch.eye(flat.numel(), dtype=flat.dtype)
    order = packing.pack(packing.unpack(g.reshape(flat.shape)))
    adjoint = torch.linalg.solve(identity - jacobian.mT, order.flatten()).reshape(flat.shape)
    if cell.refresh_until:
        context = cell.refresh(solution.state, cell.inject(x))
        context = _with_signs_of(context, solution.context)
    image = packing.pack(cell.step(packing.unpack(flat), context))
    (expected,) = torch.autograd.grad(image, x, adjoint)
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-10)


def _with_signs_of(context: eq.Context, other: eq.Context) -> eq.Context:
    """Return `context` with the signs of `other`, whose coupling part has no trained entries."""
    return context.with_part("heritage_diversity", other.parts["heritage_diversity"])


Output = Callable[..., Tensor]


def function_of_parameters(name: str, activation: str) -> tuple[Output, tuple[Tensor, ...]]:
    """Return the layer as a function of input and parameters, and arguments for it."""
    layer, x = layer_of(name, activation)
    names = [n for n, _ in layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def output(x: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, named, (x,))

    return output, (x.requires_grad_(), *values)


@pytest.mark.parametrize("activation", ["relu", "softplus"])
@pytest.mark.parametrize("name", list(CASES))
def test_gradcheck_of_the_layer(name: str, activation: str) -> None:
    assert gradcheck(*function_of_parameters(name, activation), fast_mode=True)


def second_derivatives() -> list[object]:
    """Cases of the second-derivative test; all but the smallest MOptEq are marked as slow."""
    names = [name for name in CASES if name != "mopteq-four-scales"]
    slow = [n for n in names if n.startswith("mopteq") and n != "mopteq-two-scales"]
    return [pytest.param(n, marks=pytest.mark.slow) if n in slow else n for n in names]


@pytest.mark.parametrize("name", second_derivatives())
def test_gradgradcheck_of_the_layer(name: str) -> None:
    assert gradgradcheck(*function_of_parameters(name, "softplus"), fast_mode=True)


def test_all_parameters_of_a_coupled_energy_get_a_gradient() -> None:
    layer, x = layer_of("mopteq-two-scales")
    layer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
