"""Normalization as the first layer of models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.models.blocks import Normalize

MEAN, STD = (0.3, 0.4, 0.5), (0.2, 0.3, 0.1)
MODELS = ("opteq-small", "mdeq-small", "resnet-small", "node-small", "dnn-small")


def test_normalized_channels_have_mean_zero_and_deviation_one() -> None:
    images = torch.rand(10, 3, 8, 8, dtype=torch.float64)
    mean = images.mean(dim=(0, 2, 3)).tolist()
    std = images.std(dim=(0, 2, 3), correction=0).tolist()
    normal = Normalize(mean, std).double()(images)
    assert float(normal.mean(dim=(0, 2, 3)).abs().max()) < 1e-6
    assert float((normal.std(dim=(0, 2, 3), correction=0) - 1).abs().max()) < 1e-6


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """Build a model without and with normalization, with the same weights."""
    plain = eq.create_model(name, in_channels=3).double().eval()
    model = eq.create_model(name, in_channels=3, normalize=(MEAN, STD)).double().eval()
    assert set(model.state_dict()) - set(plain.state_dict()) == {"normalize.mean", "normalize.std"}
    model.load_state_dict(plain.state_dict(), strict=False)
    return plain, model


def normalized(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(v).double()[:, None, None] for v in (MEAN, STD))
    return (images - mean) / std


@pytest.mark.parametrize("name", MODELS)
def test_normalizing_model_takes_pixels(name: str) -> None:
    plain, model = pair(name)
    images = torch.rand(2, 3, 8, 8).double()
    expected = plain(normalized(images))
    torch.testing.assert_close(model(images), expected)
    torch.testing.assert_close(copy.deepcopy(model)(images), expected)


def test_stem_and_solve_include_the_normalization() -> None:
    plain, model = pair("opteq-small")
    images = torch.rand(2, 3, 8, 8).double()
    torch.testing.assert_close(model.stem(images), plain.stem(normalized(images)))
    torch.testing.assert_close(model.solve(images).state, plain.solve(normalized(images)).state)


def test_copies_have_independent_constants() -> None:
    _, model = pair("opteq-small")
    images = torch.rand(2, 3, 8, 8).double()
    before = model(images)
    other = copy.deepcopy(model)
    other.normalize.mean.add_(1)
    assert torch.equal(model(images), before)
    assert not torch.equal(other(images), before)


def test_invalid_constants_and_images_raise() -> None:
    with pytest.raises(ValueError, match="std must be positive"):
        Normalize((0.5,), (0.0,))
    with pytest.raises(ValueError, match="one value per channel each, got 2 and 1"):
        Normalize((0.5, 0.5), (0.1,))
    with pytest.raises(ValueError, match="1 channels"):
        Normalize((0.5,), (0.1,))(torch.rand(1, 3, 2, 2))
