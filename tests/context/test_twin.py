"""A module with other tensors, beside itself."""

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
    """Other values for all parameters."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: p.detach() * (1 + 0.2 * torch.rand(p.shape, generator=generator).to(p))
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("name", [*equilibrium_models(), *OTHERS])
def test_a_twin_is_the_module_with_other_tensors(name: str) -> None:
    """As torch's `functional_call`, which puts them into the module itself."""
    if name in OTHERS:
        torch.manual_seed(0)
        model = eq.create_model(name, in_channels=2, num_classes=3).double().eval()
    else:
        model = small_model(name, tolerance=1e-8).eval()
    x = images(2, size=8)
    model(x)  # A statistic that has seen nothing takes the first input.
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    given = shifted(model)
    ids = {id(own): given[key] for key, own in model.named_parameters()}
    other = twin(model, lambda held: ids.get(id(held), held))
    expected = functional_call(model, given, (x,))
    assert not torch.allclose(expected, model(x))
    torch.testing.assert_close(other(x), expected, rtol=1e-6, atol=1e-7)
    assert {key: value.tolist() for key, value in model.state_dict().items()} == {
        key: value.tolist() for key, value in kept.items()
    }
    other.train()
    assert not model.training


def test_what_is_shared_stays_shared() -> None:
    one = nn.Linear(3, 3)
    model = nn.Sequential(one, nn.Tanh(), one, nn.Linear(3, 3))
    model[3].weight = one.weight
    model.hidden = [one]
    other = twin(model, lambda tensor: tensor.detach().clone())
    assert other[0] is other[2]
    assert other[3].weight is other[0].weight
    assert other[0].weight is not one.weight
    assert not other[0].weight.requires_grad
    torch.testing.assert_close(other(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_attributes_count_too() -> None:
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
