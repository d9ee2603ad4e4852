"""Fixed points of functions and modules z = f(z, x)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.equilibrium import FunctionCell
from equilibria.inputs import L2Ball


class Net(nn.Module):
    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size, dtype=torch.float64)
        with torch.no_grad():
            self.inner.weight *= 0.5 / torch.linalg.matrix_norm(self.inner.weight, 2)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + x)

    def other(self, z: Tensor, x: Tensor) -> Tensor:
        return self(z, 2 * x)


def random_input(seed: int = 0, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=generator, dtype=torch.float64)


TIGHT = {"tolerance": 1e-12, "gradient": eq.Implicit(tolerance=1e-12)}


def test_fixed_point_of_a_function() -> None:
    W = 0.1 * torch.ones(5, 5, dtype=torch.float64)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ W + x)

    z = eq.fixed_point(f, random_input(), tolerance=1e-12)
    torch.testing.assert_close(f(z, random_input()), z, rtol=0, atol=1e-11)


def test_gradients_reach_inputs_and_parameters() -> None:
    net = Net()
    x = random_input().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: eq.fixed_point(net, x, **TIGHT), (x,))
    layer = eq.EquilibriumLayer(net, **TIGHT)  # type: ignore[arg-type]
    layer(x).sum().backward()
    implicit = net.inner.weight.grad
    net.inner.weight.grad = None
    unrolled = torch.zeros_like(x)
    for _ in range(80):
        unrolled = net(unrolled, x)
    unrolled.sum().backward()
    assert implicit is not None
    torch.testing.assert_close(implicit, net.inner.weight.grad, rtol=1e-9, atol=1e-9)


def test_methods_of_a_module_are_maps_and_copies_use_their_copied_module() -> None:
    net = Net()
    layer = eq.EquilibriumLayer(net.other, **TIGHT)  # type: ignore[arg-type]
    torch.testing.assert_close(
        layer(random_input()), eq.EquilibriumLayer(net, **TIGHT)(2 * random_input())
    )  # type: ignore[arg-type]
    assert len(list(layer.parameters())) == 2
    twin = copy.deepcopy(layer)
    before = layer(random_input())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(layer(random_input()), before)
    assert not torch.allclose(twin(random_input()), before)


def test_several_inputs_and_a_state_of_another_shape() -> None:
    U = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)

    def f(z: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        return scale * torch.tanh(0.3 * z + x @ U)

    scale = torch.full((3, 1), 0.5, dtype=torch.float64)
    layer = eq.EquilibriumLayer(FunctionCell(f, state_shape=(3,)), tolerance=1e-10)
    z = layer((random_input(), scale))
    torch.testing.assert_close(f(z, random_input(), scale), z, rtol=0, atol=1e-9)
    start = torch.ones(3, 3, dtype=torch.float64)
    from_start = eq.fixed_point(f, (random_input(), scale), start=start, tolerance=1e-10)
    torch.testing.assert_close(from_start, z, rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="state_shape"):
        eq.fixed_point(f, (random_input(), scale))


def test_tensors_whose_gradient_would_be_lost_raise() -> None:
    W = (0.1 * torch.ones(5, 5, dtype=torch.float64)).requires_grad_()
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        eq.fixed_point(lambda z, x: torch.tanh(z @ W + x), random_input())


def test_invalid_maps_raise() -> None:
    with pytest.raises(TypeError, match="Energy, a Cell or a function"):
        eq.EquilibriumLayer(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exactly one of energy and cell"):
        eq.EquilibriumLayer()
    with pytest.raises(ValueError, match="to str"):
        eq.fixed_point(lambda z, x: "z", random_input())  # type: ignore[arg-type, return-value]


def test_maps_without_a_fixed_point_warn() -> None:
    with pytest.warns(eq.ConvergenceWarning, match="did not converge"):
        eq.fixed_point(lambda z, x: z + 1 + x.square(), random_input(), solver="picard")


def test_inputs_of_a_function_layer_can_be_optimized() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Identity(), nn.Identity()
            self.layer = eq.EquilibriumLayer(Net().other, tolerance=1e-9)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    model, x = Model(), random_input()
    result = eq.optimize_input(model, lambda z: z.sum(dim=1), x, constraint=L2Ball(x, 0.5))
    with torch.no_grad():
        assert (model(result.x).sum(dim=1) < model(x).sum(dim=1)).all()
