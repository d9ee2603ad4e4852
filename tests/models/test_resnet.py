"""Residual networks: parameter counts, structure and options."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equilibria.models.baselines.resnet import (
    ResidualBlock,
    resnet,
    resnet_extractor,
    resnet_small,
)

TINY: list[dict[str, Any]] = [
    {"depth": 18, "form": "cifar", "channels": 2},
    {"depth": 34, "form": "imagenet", "channels": 2},
    {"depth": 50, "form": "imagenet", "channels": 1},
    {"depth": 50, "form": "cifar", "channels": 1, "widening": 2, "stages": 2},
]


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("options", "published"),
    [
        ({"depth": 18}, 11_689_512),
        ({"depth": 34}, 21_797_672),
        ({"depth": 50}, 25_557_032),
        ({"depth": 101}, 44_549_160),
        ({"depth": 50, "widening": 2}, 68_883_240),
    ],
)
def test_parameter_counts_of_imagenet(options: dict[str, Any], published: int) -> None:
    with torch.device("meta"):
        model = resnet(num_classes=1000, form="imagenet", **options)
    assert count(model) == published


@pytest.mark.parametrize(("depth", "published"), [(18, 11_173_962), (50, 23_520_842)])
def test_parameter_counts_of_cifar(depth: int, published: int) -> None:
    with torch.device("meta"):
        assert count(resnet(depth=depth)) == published


@pytest.mark.parametrize(("widening", "parameters"), [(1, 1_444_928), (2, 4_126_528)])
def test_two_stages_map_to_28x28x512(widening: int, parameters: int) -> None:
    """OptEq Section 7.3.2."""
    with torch.device("meta"):
        trunk = resnet_extractor(depth=50, stages=2, widening=widening)
        assert trunk(torch.empty(2, 3, 224, 224)).shape == (2, 512, 28, 28)
        whole = resnet(depth=50, widening=widening, form="imagenet", stages=2)
    assert trunk.out_channels == 512
    assert count(trunk) == parameters
    assert count(whole) == parameters + 512 * 10 + 10


def test_resolution_of_the_features() -> None:
    with torch.device("meta"):
        imagenet = resnet(depth=18, form="imagenet")
        cifar = resnet(depth=18, form="cifar")
        assert imagenet.features(torch.empty(1, 3, 224, 224)).shape == (1, 512, 7, 7)
        assert cifar.features(torch.empty(1, 3, 32, 32)).shape == (1, 512, 4, 4)


@pytest.mark.parametrize("options", TINY)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_parameter_has_a_finite_gradient(
    options: dict[str, Any], channels: int, device: torch.device
) -> None:
    model = resnet(num_classes=4, in_channels=channels, **options).to(device)
    images = torch.randn(4, channels, 33, 40, device=device)
    logits = model(images)
    assert logits.shape == (4, 4)
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 3], device=device)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert sum(float(p.grad.abs().sum()) for p in model.trunk.stem.parameters()) > 0
    assert model.eval()(images[:0]).shape == (0, 4)


@pytest.mark.parametrize("options", TINY)
def test_evaluation_does_not_depend_on_the_batch(options: dict[str, Any]) -> None:
    model = resnet(**options).double()
    images = torch.randn(5, 3, 32, 32, dtype=torch.float64)
    model(images)  # changes the running statistics
    model.eval()
    images[3] *= 40
    together = model(images)
    for i in range(5):
        torch.testing.assert_close(model(images[i : i + 1])[0], together[i])


def test_residual_block_satisfies_its_formula() -> None:
    """Version 1.5: only the 3×3 convolution of a bottleneck has the stride."""
    block = ResidualBlock(8, 3, kind="bottleneck", stride=2, widening=2).double().eval()
    assert [m.stride for m in block.residual.modules() if isinstance(m, nn.Conv2d)] == [
        (1, 1),
        (2, 2),
        (1, 1),
    ]
    assert [m.out_channels for m in block.residual.modules() if isinstance(m, nn.Conv2d)] == [
        6,
        6,
        12,
    ]
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    before = x.clone()
    y = block(x)
    torch.testing.assert_close(y, (block.shortcut(x) + block.residual(x)).relu())
    assert torch.equal(x, before), "the block changed its input"
    same = ResidualBlock(8, 8).double().eval()
    assert isinstance(same.shortcut, nn.Identity)
    torch.testing.assert_close(same(x), (x + same.residual(x)).relu())


def test_he_initialization() -> None:
    model = resnet(depth=18, form="cifar", channels=16)
    for module in model.trunk.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 2000:
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)


def test_copies_are_equal() -> None:
    model = resnet(**TINY[0]).eval()
    images = torch.randn(2, 3, 16, 16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images), model(images))


@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize("channels", [1, 3])
def test_small_network_has_the_requested_stages(size: int, channels: int) -> None:
    model = resnet_small(in_channels=channels, channels=(3, 5, 6), blocks=(1, 2, 1))
    assert [len(stage) for stage in model.trunk.stages] == [1, 2, 1]
    features = model.features(torch.randn(2, channels, size, size))
    assert features.shape == (2, 6, size // 4, size // 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 20}, "depth must be one of 18, 34, 50, 101, got 20"),
        ({"form": "mnist"}, "form must be one of imagenet, cifar"),
        ({"stages": 5}, "stages must be between 1 and 4"),
        ({"stages": 0}, "stages must be between 1 and 4"),
        ({"depth": 18, "widening": 2}, "basic blocks cannot be widened"),
        ({"channels": 0}, "positive width"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resnet(**options)


def test_stages_of_different_lengths_raise() -> None:
    with pytest.raises(ValueError, match="each stage needs"):
        resnet_small(channels=(4, 8), blocks=(1,))


def test_invalid_images_raise() -> None:
    model = resnet_small(channels=(2,), blocks=(1,))
    with pytest.raises(ValueError, match="add a batch dimension"):
        model(torch.randn(3, 8, 8))
    with pytest.raises(ValueError, match=r"expected images of shape \(batch, 3, height, width\)"):
        model(torch.randn(2, 1, 8, 8))
    with pytest.raises(ValueError, match="floating-point images"):
        model(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
