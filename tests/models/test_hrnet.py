"""HRNet: parameter count, branches and their exchange."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equilibria.models.baselines.hrnet import Fuse, HRNet


def tiny(num_classes: int = 4, in_channels: int = 3) -> HRNet:
    return HRNet(
        num_classes=num_classes,
        in_channels=in_channels,
        width=2,
        modules=(1, 2, 1),
        blocks=1,
        stem_channels=3,
        head_width=2,
        features=7,
    )


def test_parameter_count_and_shapes_of_branches() -> None:
    with torch.device("meta"):
        model = HRNet(num_classes=1000)
        assert sum(parameter.numel() for parameter in model.parameters()) == 21_299_004
        branches = model.branches(torch.empty(1, 3, 224, 224))
        features = model.neck(branches)
    assert [tuple(branch.shape[1:]) for branch in branches] == [
        (18, 56, 56),
        (36, 28, 28),
        (72, 14, 14),
        (144, 7, 7),
    ]
    assert features.shape == (1, 2048, 7, 7)


@pytest.mark.parametrize(("channels", "size"), [(3, (32, 32)), (1, (37, 50))])
def test_every_parameter_has_a_finite_gradient(
    channels: int, size: tuple[int, int], device: torch.device
) -> None:
    model = tiny(in_channels=channels).to(device)
    logits = model(torch.randn(4, channels, *size, device=device))
    assert logits.shape == (4, 4)
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 3], device=device)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert sum(float(p.grad.abs().sum()) for p in model.stem.parameters()) > 0


def test_evaluation_does_not_depend_on_the_batch() -> None:
    model = tiny().double()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    model(images)
    model.eval()
    images[2] *= 40
    together = model(images)
    for i in range(4):
        torch.testing.assert_close(model(images[i : i + 1])[0], together[i])
    assert model(images[:0]).shape == (0, 4)


def test_each_output_of_a_module_depends_on_all_branches() -> None:
    stage = tiny().double().eval().stages[-1]
    module = stage.exchange[0]  # type: ignore[index, union-attr]
    maps = [
        torch.randn(1, 2 * 2**level, 8 // 2**level, 8 // 2**level, dtype=torch.float64)
        for level in range(4)
    ]
    variables = [x.requires_grad_() for x in maps]
    for out in module(list(maps)):
        gradients = torch.autograd.grad(out.sum(), variables, retain_graph=True)
        assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_fuse_upsamples_and_downsamples() -> None:
    x = torch.randn(2, 4, 3, 3)
    up = Fuse(4, 2, steps=2).eval()
    like = torch.empty(2, 2, 12, 12)
    expected = up.layers(x).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    torch.testing.assert_close(up(x, like), expected)
    down = Fuse(4, 8, steps=-2).eval()
    fine = torch.randn(2, 4, 12, 12)
    assert down(fine, x).shape == (2, 8, 3, 3)
    convolutions = [m for m in down.modules() if isinstance(m, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.stride) for c in convolutions] == [
        (4, 4, (2, 2)),
        (4, 8, (2, 2)),
    ]
    assert sum(isinstance(m, nn.ReLU) for m in down.modules()) == 1
    assert torch.equal(Fuse(4, 4, steps=0)(x, x), x)


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        HRNet(width=0)
    with pytest.raises(ValueError, match="must be positive"):
        HRNet(modules=())
    with pytest.raises(ValueError, match="add a batch dimension"):
        tiny()(torch.randn(3, 32, 32))
