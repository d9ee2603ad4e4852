"""The weight-untied network of OptEq's Eq. 1."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.models.baselines.plain import PlainNetwork

WIDTHS = (16, 32, 64, 128, 128)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_parameter_counts_against_deep_opteq() -> None:
    """With the widths of Deep OptEq it has 285 k parameters; 199 k need narrower layers."""
    shared = {"channels": 48, "stem_depth": 2, "pool": 1, "bias": False}
    with torch.device("meta"):
        deep_opteq = eq.create_model("deep-opteq-199k")
        same_widths = PlainNetwork(widths=WIDTHS, **shared)
        same_size = PlainNetwork(widths=(16, 32, 64, 96, 96), **shared)
    assert count(deep_opteq) == 199_162
    assert count(same_size) == 198_874
    kernels = 9 * sum(a * b for a, b in pairwise(WIDTHS))
    stem, inputs, head = 27 * 48 + 9 * 48 * 48, 48 * sum(WIDTHS), 128 * 10 + 10
    assert kernels == 244_224
    assert count(same_widths) == stem + kernels + inputs + head == 285_210
    assert count(same_widths.stem) == count(deep_opteq.stem)  # type: ignore[arg-type]


def test_layers_satisfy_eq_1() -> None:
    model = PlainNetwork(channels=4, widths=(3, 5, 2), activation="tanh").double().eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    x = model.stem(images)
    z = None
    for layer in model.layers:
        with torch.no_grad():
            layer.U.bias.normal_()  # type: ignore[union-attr]
        a = F.conv2d(x, layer.U.weight) + layer.U.bias[:, None, None]  # type: ignore
        if z is not None:
            a = a + F.conv2d(z, layer.W.weight, padding=1)  # type: ignore
        z = a.tanh()
    assert z is not None
    torch.testing.assert_close(model.features(images), z)
    torch.testing.assert_close(model(images), model.head(z))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 32])
def test_every_parameter_has_a_gradient(channels: int, size: int, device: torch.device) -> None:
    model = PlainNetwork(num_classes=3, in_channels=channels, channels=4, widths=(3, 5)).to(device)
    images = torch.randn(3, channels, size, size, device=device)
    F.cross_entropy(model(images), torch.tensor([0, 1, 2], device=device)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert model.eval()(images[:0]).shape == (0, 3)


def test_he_initialization_uses_the_total_fan_in() -> None:
    first, second = PlainNetwork(channels=32, widths=(64, 96)).layers
    assert first.U.weight.std().item() == pytest.approx(math.sqrt(2 / 32), rel=0.06)  # type: ignore
    for kernel in (second.W.weight, second.U.weight):  # type: ignore[union-attr]
        assert kernel.std().item() == pytest.approx(math.sqrt(2 / (9 * 64 + 32)), rel=0.06)  # type: ignore


def test_evaluation_does_not_depend_on_the_batch() -> None:
    model = PlainNetwork(channels=4, widths=(3, 5)).double()
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    model(images)
    model.eval()
    images[2] *= 40
    together = model(images)
    for i in range(4):
        torch.testing.assert_close(model(images[i : i + 1])[0], together[i])


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        PlainNetwork(widths=())
    with pytest.raises(ValueError, match="must be odd"):
        PlainNetwork(kernel_size=2)
    with pytest.raises(ValueError, match="add a batch dimension"):
        PlainNetwork()(torch.randn(3, 8, 8))
