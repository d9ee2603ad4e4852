"""Models whose inputs are optimized: classifiers and decoders for MNIST, trained in minutes.

All norms are group norms, so samples do not depend on each other. Trained models are stored in the
cache folder, if there is one, and loaded from it later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.data import load_dataset
from equilibria.equilibrium import EquilibriumLayer, jacobian_penalty
from equilibria.models import EquilibriumClassifier, MDEQCell
from equilibria.models.mdeq.cell import unpack_branches
from equilibria.models.mdeq.model import MDEQStem
from equilibria.models.opteq.cells import OptEqCell
from equilibria.operators import Conv2d

LATENT = 64
SIZE = 14
"""Height and width of the features; images have twice that."""
MDEQ_CHANNELS = (16, 32)
OPTEQ_CHANNELS = 32
BATCH = 32
GRADIENT_LIMIT = 50.0
INJECTION_SCALE = 2.0
LEARNING_RATE = 5e-3
PENALTY = 0.1
"""Weight of ‖J‖²_F ÷ size in the training of MDEQ, whose map has no norm bound."""


@dataclass(frozen=True)
class Images:
    """MNIST in memory, with values between 0 and 1."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load_images(root: str | None, train: int, test: int, image_set: int = 1) -> Images:
    """Load the training images, which are always the same, and one set of test images."""
    # Image sets 0 and 3 are for development: the defaults of the engines depend on them.
    learned = load_dataset("mnist", root, train_samples=train).train
    held_out = load_dataset("mnist", root, test_samples=test, subset_seed=image_set).test
    images, labels = learned.fetch(torch.arange(len(learned)))
    test_images, test_labels = held_out.fetch(torch.arange(len(held_out)))
    return Images(images, labels, test_images, test_labels)


class Unflattened(nn.Module):
    """Linear map from a latent vector to feature maps: the injection of a decoder."""

    def __init__(self, latent: int, channels: int, size: int) -> None:
        super().__init__()
        self.shape = (channels, size, size)
        self.linear = nn.Linear(latent, channels * size * size)
        # With the usual scale, a short training learns little more than the mean image.
        nn.init.normal_(self.linear.weight, std=INJECTION_SCALE / latent**0.5)

    def forward(self, latents: Tensor) -> Tensor:
        return self.linear(latents).reshape(-1, *self.shape)


class ImageHead(nn.Module):
    """Map the branches to an image of twice the resolution of the finest branch."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.channels = channels
        self.convolutions = nn.ModuleList(nn.Conv2d(c, 16, 1) for c in channels)
        self.last = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        branches = unpack_branches(features, self.channels)
        joined = self.convolutions[0](branches[0])
        for i, (branch, convolution) in enumerate(
            zip(branches[1:], self.convolutions[1:], strict=True), start=1
        ):
            joined = joined + F.interpolate(convolution(branch), scale_factor=2**i)
        return torch.sigmoid(F.pixel_shuffle(self.last(F.relu(joined)), 2))


def opteq_cell(bias: float = 0.0, zeta: float = 0.95) -> OptEqCell:
    """Return an OptEq cell. A larger bias activates more units and slows the contraction."""
    channels = OPTEQ_CHANNELS
    W = Conv2d(channels, channels, 3, norm="bound", zeta=zeta)
    initial = torch.full((channels, 1, 1), bias)
    return OptEqCell(W, Conv2d(channels, channels, 3), bias=initial)


def linear_head(channels: int, pool: int = 1) -> nn.Module:
    """Linear classifier of features that are pooled to half of `SIZE` in height and width."""
    features = channels * (SIZE // 2) ** 2
    return nn.Sequential(nn.AvgPool2d(pool), nn.Flatten(), nn.Linear(features, 10))


def opteq_classifier() -> EquilibriumClassifier:
    stem = nn.Sequential(
        nn.Conv2d(1, OPTEQ_CHANNELS, 3, 2, padding=1), nn.GroupNorm(8, OPTEQ_CHANNELS), nn.ReLU()
    )
    return EquilibriumClassifier(
        stem, EquilibriumLayer(opteq_cell(bias=1.0, zeta=0.99)), linear_head(OPTEQ_CHANNELS, pool=2)
    )


def mdeq_classifier() -> EquilibriumClassifier:
    """MDEQ-small with a linear head, which learns in a short training."""
    stem = MDEQStem(1, MDEQ_CHANNELS[0], downsample=2, norm="group", groups=8)
    packed = 4 * MDEQ_CHANNELS[0] + MDEQ_CHANNELS[1]
    return EquilibriumClassifier(
        stem, EquilibriumLayer(MDEQCell(MDEQ_CHANNELS)), linear_head(packed)
    )


def mdeq_decoder() -> EquilibriumClassifier:
    return EquilibriumClassifier(
        Unflattened(LATENT, MDEQ_CHANNELS[0], SIZE),
        EquilibriumLayer(MDEQCell(MDEQ_CHANNELS)),
        ImageHead(MDEQ_CHANNELS),
    )


def opteq_decoder() -> EquilibriumClassifier:
    return EquilibriumClassifier(
        Unflattened(LATENT, OPTEQ_CHANNELS, SIZE),
        EquilibriumLayer(opteq_cell()),
        ImageHead((OPTEQ_CHANNELS,)),
    )


def encoder() -> nn.Module:
    """Encoder that provides the latents for training a decoder."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 49, LATENT),
    )


MODELS: dict[str, Callable[[], EquilibriumClassifier]] = {
    "MDEQ classifier": mdeq_classifier,
    "OptEq classifier": opteq_classifier,
    "MDEQ decoder": mdeq_decoder,
    "OptEq decoder": opteq_decoder,
}


def trained(name: str, images: Images, steps: int, cache: Path | None) -> EquilibriumClassifier:
    """Return a model of `MODELS` after `steps` updates, from the cache if it is there."""
    torch.manual_seed(0)
    model = MODELS[name]()
    file = None if cache is None else cache / f"{name.replace(' ', '-').lower()}-{steps}.pt"
    if file is not None and file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
    else:
        train(model, images, steps, decoder="decoder" in name)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), file)
    return model.eval().requires_grad_(requires_grad=False)


def train(model: EquilibriumClassifier, images: Images, steps: int, *, decoder: bool) -> None:
    """Train with Adam and a one-cycle rate. A decoder is trained with an encoder."""
    front = encoder() if decoder else nn.Identity()
    parameters = [*model.parameters(), *front.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1
    )
    penalizes = isinstance(model.layer.cell, MDEQCell)
    model.train()
    for index in batches(len(images.train), BATCH, steps):
        batch, labels = images.train[index], images.train_labels[index]
        # A loose tolerance is enough for training.
        with eq.solving(model, tolerance=1e-2, record="equilibria") as record:
            outputs = model(front(batch))
        loss = (
            (outputs - batch).square().sum(dim=(1, 2, 3)).mean()
            if decoder
            else F.cross_entropy(outputs, labels)
        )
        for visited in record.equilibria if penalizes else ():
            penalty = jacobian_penalty(visited.layer.cell, visited.state, visited.context).mean()
            loss = loss + PENALTY * penalty
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, GRADIENT_LIMIT if decoder else 1.0)
        optimizer.step()
        schedule.step()


def batches(count: int, size: int, steps: int) -> Iterator[Tensor]:
    """Yield the indices of `steps` batches, shuffled anew in every epoch."""
    done = 0
    while True:
        for index in torch.randperm(count).split(size):
            if done == steps:
                return
            done += 1
            yield index
