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


def test_a_state_shape_with_none_follows_the_input() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * z + nn.functional.conv2d(x, weight, padding=1))

    layer = eq.EquilibriumLayer(FunctionCell(f, (4, None, None)), tolerance=1e-9).eval()
    for height, width in ((5, 7), (9, 9), (5, 7)):
        x = torch.randn(2, 3, height, width, dtype=torch.float64)
        z = layer(x)
        assert z.shape == (2, 4, height, width)
        torch.testing.assert_close(f(z, x), z, rtol=0, atol=1e-8)


def test_an_input_of_another_size_than_the_state_raises_with_the_remedy() -> None:
    layer = eq.EquilibriumLayer(FunctionCell(lambda z, x: z / 2 + x.sum(1), (5, 7)))
    layer(torch.ones(2, 3, 5, 7))
    with pytest.raises(ValueError, match=r"state_shape=\(5, 7\) fixes this shape; None"):
        layer(torch.ones(2, 3, 9, 9))
    follows = eq.EquilibriumLayer(FunctionCell(lambda z, x: z / 2 + x.sum(1), (None, None)))
    with pytest.raises(ValueError, match=r"as many entries as the shape of an input.*\(3, 9, 9\)"):
        follows(torch.ones(2, 3, 9, 9))


def test_the_remedy_for_a_function_does_not_mention_weights_that_it_does_not_have() -> None:
    layer = eq.EquilibriumLayer(lambda z, x: 3 * z + x, solver="picard").eval()
    with pytest.warns(eq.ConvergenceWarning, match="damp the iteration") as caught:
        layer(torch.ones(1, 2))
    assert "norm of W" not in str(caught[0].message)


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
