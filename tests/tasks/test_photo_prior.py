"""The training of the photo prior: its loss, and that a step of it helps."""

from __future__ import annotations

import pytest
import torch

import equilibria as eq
from equilibria.tasks import PhotoPriorTask


def test_training_lowers_the_loss_of_a_fixed_batch() -> None:
    torch.manual_seed(0)
    options = {"gradient": {"name": "implicit", "tolerance": 0.04}, "tolerance": 1e-3}
    model = eq.create_model("photo-denoiser", channels=8, kernel_size=3, **options)
    rough = torch.rand(3, 3, 5, 6)
    images = torch.nn.functional.interpolate(rough, size=(22, 26), mode="bilinear")
    task = PhotoPriorTask(patch=20, edge=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(12):
        torch.manual_seed(1)
        loss = task.training_step(model, images, torch.zeros(3)).values["loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    found = task.evaluate(model, [(images, torch.zeros(3))])
    assert found.score > 20.2  # Of the noisy pictures it is 20.2.


def test_a_bad_range_is_explained() -> None:
    with pytest.raises(ValueError, match="wider than its two edges"):
        PhotoPriorTask(patch=12, edge=6)
    with pytest.raises(ValueError, match="positive"):
        PhotoPriorTask(least=0.0)
