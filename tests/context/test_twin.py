"""Twins of modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import equilibria as eq
from equilibria.context.twin import twin
from tests.models.small import equilibrium_models, images, small_model

OTHERS = ("resnet-small", "dnn-small", "node-small")


def shifted(model: nn.Module) -> dict[str, Tensor]:
    """Return other values for all parameters."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: p.detach() * (1 + 0.2 * torch.rand(p.shape, generator=generator).to(p))
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("name", [*equilibrium_models(), *OTHERS])
def test_a_twin_computes_the_same_as_functional_call(name: str) -> None:
    """In contrast to `functional_call`, the module itself is not modified."""
    if name in OTHERS:
        torch.manual_seed(0)
        model = eq.create_model(name, in_channels=2, num_classes=3).double().eval()
    else:
        model = small_model(name, tolerance=1e-8).eval()
    x = images(2, size=8)
    model(x)  # initializes running statistics
    before = {key: value.clone() for key, value in model.state_dict().items()}
    values = shifted(model)
    values_by_id = {id(parameter): values[key] for key, parameter in model.named_parameters()}
    other = twin(model, lambda tensor: values_by_id.get(id(tensor), tensor))
    expected = functional_call(model, values, (x,))
    assert not torch.allclose(expected, model(x))
    torch.testing.assert_close(other(x), expected, rtol=1e-6, atol=1e-7)
    assert {key: value.tolist() for key, value in model.state_dict().items()} == {
        key: value.tolist() for key, value in before.items()
    }
    other.train()
    assert not model.training


def test_shared_modules_and_parameters_stay_shared() -> None:
    linear = nn.Linear(3, 3)
    model = nn.Sequential(linear, nn.Tanh(), linear, nn.Linear(3, 3))
    model[3].weight = linear.weight
    model.hidden = [linear]
    other = twin(model, lambda tensor: tensor.detach().clone())
    assert other[0] is other[2]
    assert other[3].weight is other[0].weight
    assert other[0].weight is not linear.weight
    assert not other[0].weight.requires_grad
    torch.testing.assert_close(other(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_tensors_and_methods_in_attributes_are_replaced() -> None:
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.scale = torch.tensor(2.0, requires_grad=True) * 1
            self.inner = inner
            object.__setattr__(self, "same", inner.forward)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.scale * self.same(x)
            return result

    model = Scaled(nn.Linear(2, 2))
    other = twin(model, lambda tensor: tensor.detach())
    assert not other(torch.ones(1, 2)).requires_grad
    assert model(torch.ones(1, 2)).requires_grad
