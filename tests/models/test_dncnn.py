"""DnCNN: residual, parameter count, training and errors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import equilibria as eq


def test_output_is_the_image_minus_the_predicted_noise(device: torch.device) -> None:
    model = eq.create_model("dncnn", in_channels=3, channels=8, depth=4).to(device)
    images = torch.rand(2, 3, 9, 12, device=device)
    assert torch.equal(model(images), images - model.noise(images))
    last = model.noise[-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.zero_()
    assert torch.equal(model(images), images)


def test_parameter_count_of_the_paper() -> None:
    """17 layers of 64 channels, 15 of them with batch norms instead of biases."""
    model = eq.create_model("dncnn")
    middle = 15 * (64 * 64 * 9 + 2 * 64)
    assert sum(p.numel() for p in model.parameters()) == (9 * 64 + 64) + middle + (64 * 9 + 1)


def test_training_halves_the_error() -> None:
    torch.manual_seed(0)
    model = eq.create_model("dncnn", channels=8, depth=3, norm="none")
    clean = torch.rand(32, 1, 3, 3).repeat_interleave(4, 2).repeat_interleave(4, 3)
    noisy = clean + 0.2 * torch.randn_like(clean)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = F.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert F.mse_loss(model(noisy), clean) < 0.5 * F.mse_loss(noisy, clean)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 1}, "depth must be at least 2"),
        ({"norm": "group"}, "norm must be one of batch, none"),
        ({"kernel_size": 4}, "kernel_size must be odd"),
    ],
)
def test_invalid_options_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eq.create_model("dncnn", **options)


def test_images_without_a_batch_dimension_raise() -> None:
    with pytest.raises(ValueError, match=r"images\[None\]"):
        eq.create_model("dncnn", channels=4, depth=2)(torch.zeros(1, 8, 8))
