"""Training of the photo prior: patches, noise levels and the score."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria.tasks import PhotoPriorTask
from equilibria.training import load_recipe
from equilibria.training.experiment import Experiment


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
    evaluation = task.evaluate(model, [(images, torch.zeros(3))])
    assert evaluation.score > 20.2  # the PSNR of the noisy pictures


class Recorder(torch.nn.Module):
    """Model that records its inputs and changes the outermost pixels."""

    def __init__(self, spoiled: int) -> None:
        super().__init__()
        self.spoiled = spoiled
        self.inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, images: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        self.inputs.append((images, noise))
        output = images.clone()
        output[..., : self.spoiled, :] += 9.0
        output[..., :, -self.spoiled :] -= 9.0
        return output


def test_magnified_patches_are_smoother_and_have_the_same_size() -> None:
    torch.manual_seed(0)
    images = torch.rand(4, 3, 40, 50)
    rough = []
    for zoom in (1.0, 4.0):
        task = PhotoPriorTask(patch=32, edge=4, least=1e-6, most=2e-6, zoom=zoom, zoomed=1.0)
        model = Recorder(1)
        for _ in range(4):
            task.training_step(model, images, torch.zeros(4))
        patches = torch.cat([images for images, _ in model.inputs])
        assert patches.shape == (16, 3, 32, 32)
        assert patches.min() > -1e-3
        assert patches.max() < 1.001
        rough.append(float(patches.diff(dim=3).square().mean()))
    assert rough[1] < 0.7 * rough[0]


@pytest.mark.parametrize("gray", [0.0, 0.5, 1.0])
def test_share_of_batches_in_gray(gray: float) -> None:
    torch.manual_seed(0)
    model = Recorder(1)
    task = PhotoPriorTask(patch=20, edge=3, gray=gray, least=1e-6, most=2e-6)
    images = torch.rand(2, 3, 20, 20)
    for _ in range(40):
        task.training_step(model, images, torch.zeros(2))
    channels = [picture.shape[1] for picture, _ in model.inputs]
    assert channels.count(1) == 40 * gray if gray != 0.5 else 8 < channels.count(1) < 32
    if gray == 1:  # Pillow's luminance, of the patch or its transpose
        luminance = (images * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(dim=1)
        for patch, expected in zip(model.inputs[0][0][:, 0], luminance, strict=True):
            assert min(float((patch - e).abs().max()) for e in (expected, expected.T)) < 1e-4
    judged = Recorder(1)
    task.evaluate(judged, [(images, torch.zeros(2))])
    assert judged.inputs[0][0].shape[1] == (1 if gray else 3)


def test_small_photographs_are_magnified_to_a_patch() -> None:
    model = Recorder(1)
    task = PhotoPriorTask(patch=32, edge=4)
    task.training_step(model, torch.rand(2, 3, 20, 26), torch.zeros(2))
    assert model.inputs[0][0].shape == (2, 3, 32, 32)


def test_noise_levels_are_stratified_over_a_batch() -> None:
    model = Recorder(1)
    task = PhotoPriorTask(patch=20, edge=3, least=0.01, most=0.16)
    task.training_step(model, torch.rand(4, 3, 20, 20), torch.zeros(4))
    bounds = torch.tensor([0.01, 0.02, 0.04, 0.08, 0.16])
    noise = model.inputs[0][1]
    assert (noise >= bounds[:-1] * 0.999).all()
    assert (noise <= bounds[1:] * 1.001).all()


def test_edges_do_not_count() -> None:
    images, none = torch.rand(3, 3, 30, 30), torch.zeros(3)
    task = PhotoPriorTask(patch=30, edge=4, judged=0.1)
    scores = [task.evaluate(Recorder(edge), [(images, none)]).score for edge in (1, 4, 5)]
    assert abs(scores[0] - 20) < 0.5
    assert scores[1] == scores[0] > scores[2] + 3


@pytest.mark.parametrize(("edge", "side"), [(0, 20), (8, 12)])
def test_pictures_without_or_mostly_of_edges_are_evaluated(edge: int, side: int) -> None:
    task = PhotoPriorTask(patch=20, edge=edge, judged=0.1)
    model, images = torch.nn.Identity(), torch.rand(2, 3, side, side)
    model.forward = lambda images, noise: images  # type: ignore[method-assign]
    assert abs(task.evaluate(model, [(images, torch.zeros(2))]).score - 20) < 3


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"patch must be larger than 2·edge.*patch=12, edge=6"):
        PhotoPriorTask(patch=12, edge=6)
    with pytest.raises(ValueError, match="least must be in"):
        PhotoPriorTask(least=0.0)
    with pytest.raises(ValueError, match="zoom must be at least 1"):
        PhotoPriorTask(zoom=0.5)


def test_blind_model_gets_only_the_picture() -> None:
    shapes = []

    def record(*inputs: torch.Tensor) -> torch.Tensor:
        shapes.append([tuple(tensor.shape) for tensor in inputs])
        return inputs[0]

    model = torch.nn.Identity()
    model.forward = record  # type: ignore[method-assign, assignment]
    images, none = torch.rand(2, 1, 20, 20), torch.zeros(2)
    for blind in (True, False):
        PhotoPriorTask(patch=20, edge=3, blind=blind).training_step(model, images, none)
    assert shapes == [[(2, 1, 20, 20)], [(2, 1, 20, 20), (2,)]]


def test_single_noise_level() -> None:
    model = Recorder(1)
    task = PhotoPriorTask(patch=20, edge=3, least=0.1, most=0.1)
    task.training_step(model, torch.rand(4, 3, 20, 20), torch.zeros(4))
    torch.testing.assert_close(model.inputs[0][1], torch.full((4,), 0.1))


@pytest.mark.parametrize("name", ["photo-dncnn", "photo-deq-restorer"])
def test_networks_train_on_patches_in_gray(name: str, real_data: Path) -> None:
    recipe = load_recipe(name, ["threads=null"])
    experiment = Experiment.of(recipe)
    images, labels = experiment.training.fetch(torch.arange(2))
    assert images.shape[1] == 1
    step = experiment.task.training_step(experiment.model, images, labels)
    step.loss.backward()
    assert all(parameter.grad is not None for parameter in experiment.model.parameters())
