"""Energy terms: `descent` is minus the gradient of `value` in every grad mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import equilibria as eq
from equilibria.context import Context
from equilibria.context.state import Packing
from equilibria.energies import DataFidelity, RidgePrior
from equilibria.energies.adaptive import AdaptiveRidgePrior
from equilibria.energies.compose import Scaled, Sum
from equilibria.energies.function import FunctionEnergy
from equilibria.operators import GraphConv, Identity, Incidence
from tests.operators.bank import EDGES


class Bump(eq.Energy):
    """Custom term that defines only `value`, with a parameter and the input."""

    def __init__(self) -> None:
        super().__init__()
        self.width = nn.Parameter(torch.tensor(1.3))

    def value(self, y: Tensor, context: Context) -> Tensor:
        return -torch.exp(-self.width * (y - context["x"]).square()).flatten(1).sum(dim=1)


class Spread(eq.Energy):
    """Term that couples the samples of a batch."""

    facts = eq.energies.Facts(couples_batch=True)

    def value(self, y: Tensor, context: Context) -> Tensor:
        return 0.1 * (y - y.mean(dim=0)).pow(4).sum()


def smoothness(y: Tensor, x: Tensor) -> Tensor:
    return (y[:, 1:] - y[:, :-1]).square().flatten(1).sum(dim=1)


def adaptive_ridge() -> AdaptiveRidgePrior:
    term = AdaptiveRidgePrior(width=4, depth=2, channels=12, kernel_size=3, noise=0.5)
    nn.init.normal_(term.network[-1].weight, std=0.2)  # zero at first
    return term


VECTOR, IMAGE, SEQUENCE, TOKENS, NODES = (5,), (2, 4, 4), (2, 7), (4, 3), (6, 3)
ODD_IMAGE = (2, 5, 6)

TERMS: dict[str, tuple[tuple[int, ...], Callable[[], eq.Energy]]] = {
    "input": (VECTOR, lambda: eq.Input(eq.Dense(5, 5))),
    "input-conv": (IMAGE, lambda: eq.Input(eq.Conv2d(2, 2, 3))),
    "quadratic": (VECTOR, lambda: eq.Quadratic(eq.Dense(3, 5))),
    "quadratic-wide": (VECTOR, lambda: eq.Quadratic(eq.Dense(9, 5))),
    "quadratic-conv": (IMAGE, lambda: eq.Quadratic(eq.Conv2d(3, 2, 3, norm="bound", zeta=0.5))),
    "quadratic-strided": (IMAGE, lambda: eq.Quadratic(eq.Conv2d(3, 2, 3, stride=2))),
    "input-sequence": (SEQUENCE, lambda: eq.Input(eq.Conv1d(2, 2, 3))),
    "input-tokens": (TOKENS, lambda: eq.Input(eq.Dense(3, 3))),
    "quadratic-sequence": (SEQUENCE, lambda: eq.Quadratic(eq.Conv1d(3, 2, 5))),
    "quadratic-tokens": (TOKENS, lambda: eq.Quadratic(eq.Dense(4, 3, norm="bound", zeta=0.5))),
    "quadratic-graph": (NODES, lambda: eq.Quadratic(GraphConv(EDGES, 4, 3))),
    "laplacian": (NODES, lambda: -0.5 * eq.Quadratic(Incidence(EDGES).T)),
    "ridge": (ODD_IMAGE, lambda: RidgePrior(12, 3, noise=0.5)),
    "ridge-adaptive": ((1, 5, 6), adaptive_ridge),
    "ridge-convex": (ODD_IMAGE, lambda: RidgePrior(5, 2, concavity=0, noise=0.5)),
    "fidelity": (ODD_IMAGE, DataFidelity),
    "fidelity-blur": (ODD_IMAGE, lambda: DataFidelity(eq.operators.Blur(0.5), box=0.4)),
    "fidelity-function": (ODD_IMAGE, lambda: DataFidelity(torch.tanh)),
    "bump": (VECTOR, Bump),
    "bump-image": (IMAGE, Bump),
    "function": (IMAGE, lambda: FunctionEnergy(smoothness)),
    "spread": (VECTOR, Spread),
    "sum": (
        VECTOR,
        lambda: eq.Input(eq.Dense(5, 5)) + 0.3 * Bump() - 0.5 * eq.Quadratic(eq.Dense(4, 5)),
    ),
    "sum-coupled": (VECTOR, lambda: eq.Input(eq.Dense(5, 5)) + 2 * Spread()),
    "learnable-multiple": (VECTOR, lambda: nn.Parameter(torch.tensor(0.4)) * Bump()),
}


def case(name: str) -> tuple[eq.Energy, Tensor, Context]:
    shape, make = TERMS[name]
    torch.manual_seed(0)
    energy = make().double()
    x = torch.randn(3, *shape, dtype=torch.float64)
    y = torch.randn(3, *shape, dtype=torch.float64)
    context = energy.complete(energy.inject(x), Packing.of(y).layout)
    return energy, y, context


@pytest.mark.parametrize("name", list(TERMS))
def test_descent_is_minus_the_gradient_of_the_value(name: str) -> None:
    energy, y, context = case(name)
    leaf = y.clone().requires_grad_()
    value = energy.value(leaf, context)
    assert value.shape == (() if energy.facts.couples_batch else (3,))
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    torch.testing.assert_close(energy.descent(y, context), -gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(TERMS))
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"]
)
def test_descent_without_gradients(name: str, mode: Callable[[], object]) -> None:
    energy, y, context = case(name)
    expected = energy.descent(y, context).detach()
    with mode():  # type: ignore[attr-defined]
        inside = 1 * energy.descent(y.clone(), context)
        context_inside = energy.complete(energy.inject(y), Packing.of(y).layout)
        energy.descent(y.clone(), context_inside)
    assert not inside.requires_grad
    torch.testing.assert_close(inside.clone(), expected)


@pytest.mark.parametrize("name", list(TERMS))
def test_descent_trains_with_second_order_terms(name: str) -> None:
    energy, y, _ = case(name)
    shape, _ = TERMS[name]
    x = torch.randn(3, *shape, dtype=torch.float64)
    names = [n for n, _ in energy.named_parameters()]
    parameters = [p.detach().clone().requires_grad_() for p in energy.parameters()]

    class Descent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = energy

        def forward(self, y: Tensor) -> Tensor:
            context = self.energy.complete(self.energy.inject(x), Packing.of(y).layout)
            return self.energy.descent(y, context)

    module = Descent()

    def descent(y: Tensor, *values: Tensor) -> Tensor:
        named = {f"energy.{n}": v for n, v in zip(names, values, strict=True)}
        return torch.func.functional_call(module, named, (y,))

    arguments = (y.requires_grad_(), *parameters)
    assert gradcheck(descent, arguments, fast_mode=True)
    assert gradgradcheck(descent, arguments, fast_mode=True)


def test_outer_saved_tensor_hooks_do_not_see_the_inner_graph() -> None:
    """Activation checkpointing installs such hooks; unpacking would recompute the forward."""
    energy, y, context = case("bump")

    def fail(_: object) -> Tensor:
        raise AssertionError("an outer hook received a tensor of the inner graph")

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, fail):
        energy.descent(y, context)
        with torch.no_grad():
            energy.descent(y, context)


@pytest.mark.parametrize("name", list(TERMS))
def test_curvature_bound_is_an_upper_bound(name: str) -> None:
    energy, y, context = case(name)
    bound = energy.bounds(context, Packing.of(y).layout).curvature
    if bound is None:
        assert any(word in name for word in ("bump", "function", "spread", "sum", "multiple"))
        return
    hessian = torch.autograd.functional.hessian(
        lambda v: energy.value(v.view_as(y[:1]), context.keep(torch.tensor([0]))).sum(),
        y[0].flatten(),
    )
    first = bound.detach().expand(len(y))[0]  # a scalar, or one number per sample
    assert torch.linalg.matrix_norm(hessian, 2) <= first * (1 + 1e-9)


@given(a=st.floats(-3, 3), b=st.floats(-3, 3), seed=st.integers(0, 2**16))
def test_sums_and_multiples_are_linear(a: float, b: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    first, second = eq.Quadratic(W), FunctionEnergy(smoothness)
    combined = a * first + b * second
    layout = Packing.of(y).layout
    contexts = [t.complete(t.inject(x), layout) for t in (first, second, combined)]
    torch.testing.assert_close(
        combined.value(y, contexts[2]),
        a * first.value(y, contexts[0]) + b * second.value(y, contexts[1]),
    )
    torch.testing.assert_close(
        combined.descent(y, contexts[2]),
        a * first.descent(y, contexts[0]) + b * second.descent(y, contexts[1]),
    )


def test_sums_name_their_terms_and_multiples_are_scaled() -> None:
    quadratic, bump = eq.Quadratic(torch.eye(3)), Bump()
    nested = (quadratic + bump) + (0.5 * quadratic + smoothness)
    assert isinstance(nested, Sum)
    assert [name for name, _ in nested.named_terms()] == [
        "quadratic",
        "bump",
        "quadratic_2",
        "smoothness",
    ]
    assert nested["bump"] is bump
    assert isinstance(-quadratic, Scaled)
    assert isinstance(quadratic * 2, Scaled)
    assert sum([quadratic, bump]).facts.couples_batch is False  # type: ignore[union-attr]
    assert (quadratic + 0.1 * Spread()).facts.couples_batch is True
    with pytest.raises(TypeError, match="cannot add"):
        quadratic + 3  # type: ignore[operator]
    with pytest.raises(TypeError, match="multiplied only by a number"):
        "a" * quadratic  # type: ignore[operator]
    with pytest.raises(ValueError, match="a tensor with one entry"):
        torch.ones(3) * quadratic


def test_energy_term_decorator_returns_an_energy() -> None:
    @eq.energy_term
    def ridge(y: Tensor, x: Tensor) -> Tensor:
        return 0.5 * y.square().sum(dim=1)

    @eq.energy_term(couples_batch=True)
    def spread(y: Tensor, x: Tensor) -> Tensor:
        return y.var(dim=0).sum()

    assert isinstance(ridge, eq.Energy)
    assert isinstance(spread, eq.Energy)
    assert spread.facts.couples_batch
    y = torch.randn(2, 3)
    torch.testing.assert_close(ridge.descent(y, ridge.inject(y)), -y)
    assert "ridge" in repr(ridge)


def test_descent_is_zero_for_a_term_that_ignores_the_state() -> None:
    term = FunctionEnergy(lambda y, x: x.sum(dim=1))
    y = torch.randn(2, 3)
    assert torch.equal(term.descent(y, term.inject(y)), torch.zeros(2, 3))


def test_values_of_wrong_shape_raise() -> None:
    y = torch.randn(2, 3)
    for function, shape in ((lambda y, x: y, r"\(2, 3\)"), (lambda y, x: y.sum(), r"\(\)")):
        term = FunctionEnergy(function)
        with pytest.raises(ValueError, match=rf"shape \(2,\), got {shape}.*one number per sample"):
            term.descent(y, term.inject(y))
    with pytest.raises(TypeError, match="without a `value` method"):
        eq.Energy().value(y, Context())


def test_input_options() -> None:
    assert eq.Input(eq.Dense(2, 3)).bias is not None
    assert eq.Input(eq.Dense(2, 3), bias=False).bias is None
    assert eq.Input(eq.operators.Identity()).bias is None
    bias = nn.Parameter(torch.ones(3))
    term = eq.Input(eq.Dense(2, 3), bias=bias)
    assert term.bias is bias
    x = torch.zeros(1, 2)
    assert torch.equal(term.inject(x)["c"], torch.ones(1, 3))
    with pytest.raises(ValueError, match="pass the bias as a tensor"):
        eq.Input(eq.operators.Identity(), bias=True)
    with pytest.raises(KeyError, match="the context has no tensor 'z'; it has"):
        term.inject(x)["z"]


@pytest.mark.parametrize(
    "energy",
    [
        eq.Input(Identity()) + eq.Quadratic(eq.Dense(3, 4)),
        eq.Quadratic(eq.Dense(3, 4)) + eq.Input(Identity()),
        eq.Quadratic(Identity()) + eq.Input(Identity()),
        eq.Input(Identity()) + eq.Quadratic(Identity()) + eq.Quadratic(eq.Dense(3, 4)),
        eq.Input(Identity()) + 0.5 * eq.Quadratic(eq.Dense(3, 4)) + eq.Quadratic(eq.Dense(3, 4)),
    ],
    ids=lambda energy: " ".join(energy.terms),
)
def test_sums_modify_neither_state_nor_context(energy: eq.Energy) -> None:
    """Without a graph, terms are added in place."""
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    state = y.clone()
    context = energy.complete(energy.inject(x), ((4,),))
    before = [tensor.clone() for tensor in context.tensors()]
    with torch.no_grad():
        in_place = [energy.descent(state, context) for _ in range(2)]
    recorded = energy.descent(state, context)
    assert torch.equal(state, y)
    for tensor, original in zip(context.tensors(), before, strict=True):
        assert torch.equal(tensor, original)
    assert isinstance(recorded, Tensor)
    for descent in in_place:
        assert isinstance(descent, Tensor)
        torch.testing.assert_close(descent, recorded.detach(), rtol=0, atol=0)
