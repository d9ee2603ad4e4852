"""A weight shared by two terms of an energy stays shared."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.models import image_classifier, registry
from equilibria.training import EpochMetrics


class Classifying(eq.EnergyCell):
    """Cell with the feature Wᵀy, like OptEq."""

    def output(self, state: eq.State, context: eq.Context) -> Tensor:
        assert isinstance(state, Tensor)
        quadratic = self.energy["quadratic"]  # type: ignore[index]
        return quadratic.W.adjoint(state, context.parts["quadratic"].weights("W"))


def sharing(
    *,
    as_parameter: bool = False,
    num_classes: int = 10,
    in_channels: int = 1,
    solving: Any = None,
) -> nn.Module:
    """Create a model of −½‖Wᵀy‖² + 0.1·L2(Wᵀy) with a shared operator or a shared parameter W."""
    W = other = eq.Conv2d(6, 8, 3, norm="bound", zeta=0.8)
    if as_parameter:
        other = eq.Conv2d.from_tensor(W.kernel, norm="bound", zeta=0.8)
    regularizer = eq.FeatureRegularizer(other, "l2", 0.1)
    energy = eq.Input(eq.Conv2d(6, 8, 3)) + eq.Quadratic(W) + regularizer
    return image_classifier(
        Classifying(energy),
        6,
        num_classes=num_classes,
        in_channels=in_channels,
        pool=4,
        solving=solving,
    )


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the models during a test."""
    monkeypatch.setattr(registry._models, "_factories", dict(registry._models._factories))
    monkeypatch.setattr(registry, "_cards", dict(registry._cards))
    eq.register_model("sharing", sharing)
    eq.register_model("sharing-parameter", sharing, as_parameter=True)


NAMES = ["sharing", "sharing-parameter"]
IMAGES = torch.rand(3, 1, 8, 8)


def fresh(name: str) -> nn.Module:
    model = eq.create_model(name, in_channels=1)
    return model.eval()


def kernels(model: Any) -> tuple[nn.Parameter, nn.Parameter]:
    energy = model.layer.cell.energy
    return energy["quadratic"].W.kernel, energy["feature_regularizer"].W.kernel


def assert_shared(model: nn.Module) -> None:
    first, second = kernels(model)
    assert first is second
    assert sum(parameter is first for parameter in model.parameters()) == 1


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    assert torch.equal(kernels(first)[0], kernels(second)[0])
    with torch.no_grad():
        assert torch.equal(first(IMAGES), second(IMAGES))


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_state_dicts_keep_the_weight_shared(name: str) -> None:
    model = fresh(name)
    assert_shared(model)
    twin = copy.deepcopy(model)
    assert_shared(twin)
    assert kernels(twin)[0] is not kernels(model)[0]
    assert_equal(model, twin)

    loaded = fresh(name)
    loaded.load_state_dict(model.state_dict())
    assert_shared(loaded)
    assert_equal(model, loaded)

    assigned = fresh(name)
    assigned.load_state_dict(model.state_dict(), assign=True)
    assert_shared(assigned)
    assert_equal(model, assigned)
    energy = assigned.layer.cell.energy
    energy.load_state_dict(fresh(name).layer.cell.energy.state_dict(), assign=True)
    assert_shared(assigned)

    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    read = fresh(name)
    read.load_state_dict(torch.load(buffer, weights_only=True))
    assert_shared(read)
    assert_equal(model, read)

    for changed in (model.double(), model.bfloat16(), model.float()):
        assert_shared(changed)


@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_updates_the_shared_weight(name: str) -> None:
    model = fresh(name).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IMAGES.double()).square().sum().backward()
    before = kernels(model)[0].detach().clone()
    optimizer.step()
    assert_shared(model)
    assert not torch.equal(kernels(model)[1], before)


def train(name: str, folder: Path, **options: Any) -> nn.Module:
    recipe = folder.parent / "recipe.yaml"
    recipe.write_text(
        f"model: {{name: {name}}}\n"
        "data: {name: digits}\n"
        "training: {epochs: 2, batch_size: 250, learning_rate: 0.02, tolerance: 1.0e-2}\n"
    )
    return eq.train(recipe, output=folder, **options)


@pytest.mark.parametrize("name", NAMES)
def test_resumed_and_loaded_models_share_the_weight(name: str, tmp_path: Path) -> None:
    whole = train(name, tmp_path / "whole")
    assert_shared(whole)

    def stop(metrics: EpochMetrics) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(name, tmp_path / "parts", on_epoch=stop)
    resumed = train(name, tmp_path / "parts", resume=True)
    for model in (resumed, eq.load(tmp_path / "whole"), eq.load(tmp_path / "parts")):
        assert_shared(model)
        assert_equal(model, whole)
    assert eq.evaluate(tmp_path / "parts").accuracy == eq.evaluate(whole, "digits").accuracy
