"""Inception-V2: the published size, the maps of its modules, and what its ways see."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equilibria.models import create_model
from equilibria.models.baselines.inception import Inception, InceptionModule, Widths
from equilibria.models.registry import parameter_count


def tiny(num_classes: int = 4, in_channels: int = 3) -> Inception:
    return Inception(num_classes=num_classes, in_channels=in_channels, channels=2)


def test_parameter_count_and_maps() -> None:
    """Published weights of BN-Inception have 11,295,240 parameters, with idle biases before the
    norms; ours have none.
    """
    with torch.device("meta"):
        model = create_model("inception-v2-imagenet")
        biases = sum(m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d))
        assert parameter_count(model) + biases == 11_295_240
        maps = [model.stem(torch.empty(1, 3, 224, 224))]
        for module in model.inceptions:
            maps.append(module(maps[-1]))
    assert [tuple(found.shape[1:]) for found in maps] == [
        (192, 28, 28),
        (256, 28, 28),
        (320, 28, 28),
        (576, 14, 14),
        (576, 14, 14),
        (576, 14, 14),
        (608, 14, 14),
        (608, 14, 14),
        (1056, 7, 7),
        (1024, 7, 7),
        (1024, 7, 7),
    ]


@pytest.mark.parametrize(("channels", "size"), [(3, (32, 32)), (1, (37, 50))])
def test_forward_and_backward(channels: int, size: tuple[int, int], device: torch.device) -> None:
    model = tiny(in_channels=channels).to(device)
    logits = model(torch.randn(4, channels, *size, device=device))
    assert logits.shape == (4, 4)
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 3], device=device)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("halves", [False, True])
def test_the_ways_of_a_module_stand_side_by_side(halves: bool) -> None:
    """Each is its own convolutions alone: 1×1, 3×3, two 3×3, and the pooled map."""
    widths = Widths(0, 2, 3, 2, 4, 0, "max") if halves else Widths(5, 2, 3, 2, 4, 6)
    module = InceptionModule(7, widths).double().eval()
    x = torch.randn(2, 7, 9, 9, dtype=torch.float64)
    y = module(x)
    reaches = [1, 2, 1] if halves else [0, 1, 2, 1]
    parts = [3, 4, 7] if halves else [5, 3, 4, 6]
    assert y.shape == (2, sum(parts), *((5, 5) if halves else (9, 9)))
    if halves:
        torch.testing.assert_close(y[:, -7:], F.max_pool2d(x, 3, 2, padding=1))
    for part, reach in zip(torch.split(torch.arange(sum(parts)), parts), reaches, strict=True):
        leaf = x.clone().requires_grad_()
        middle = 2 if halves else 4
        (seen,) = torch.autograd.grad(module(leaf)[:, part, middle, middle].sum(), leaf)
        rows = seen.abs().sum(dim=(0, 1, 3)).nonzero().flatten()
        assert rows.min() >= 4 - reach
        assert rows.max() <= 4 + reach


def test_evaluation_does_not_depend_on_the_batch() -> None:
    model = tiny().double()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    model(images)
    model.eval()
    images[2] *= 40
    together = model(images)
    for i in range(4):
        torch.testing.assert_close(model(images[i : i + 1])[0], together[i])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="channels must be at least 1"):
        Inception(channels=0)
    with pytest.raises(ValueError, match="add a batch dimension"):
        tiny()(torch.randn(3, 32, 32))
