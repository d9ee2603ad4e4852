"""Quality of generated or restored images: PSNR of pairs, Fréchet distance between sets.

The published FID uses features of an Inception network, which has to be downloaded and was trained
on photographs. Here the features come from a small classifier of the same data set.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

Matrix = NDArray[np.float64]
MAX_DECIBELS = 120.0
"""Largest reported PSNR; that of equal pictures."""
FEATURES = 64


def psnr(images: Tensor, references: Tensor, *, peak: float = 1.0) -> Tensor:
    """Return 10 log₁₀(peak² ÷ mean squared error) of each pair in decibels; infinite if equal."""
    if images.shape != references.shape or images.dim() < 2:
        raise ValueError(
            f"images and references must be batches of the same shape, got {tuple(images.shape)} "
            f"and {tuple(references.shape)}"
        )
    error = (images.double() - references.double()).square().flatten(1).mean(dim=1)
    return 10 * torch.log10(peak**2 / error)


def picture_psnr(images: Tensor, originals: Tensor) -> Tensor:
    """Return the PSNR of each image, clamped to [0, 1], in decibels; at most 120."""
    return psnr(images.clamp(0, 1), originals.clamp(0, 1)).clamp_max(MAX_DECIBELS)


def frechet_distance(features: Tensor, references: Tensor) -> float:
    """Return the squared Fréchet distance between Gaussians fitted to two sets of rows.

    It is ‖m₁ − m₂‖² + tr(C₁ + C₂ − 2 (C₁C₂)^½) with the means m and covariances C of the sets, the
    FID of Heusel et al. (2017) if the rows are features of images. It is finite even if the
    covariances are singular. It decreases with the number of rows, so compare only distances with
    equally many.
    """
    for rows in (features, references):
        if rows.dim() != 2 or len(rows) < 2:
            raise ValueError(
                "features must have shape (images, features) with at least two images, got "
                f"{tuple(rows.shape)}"
            )
    fitted = []
    for rows in (features, references):
        array = rows.detach().cpu().double().numpy()
        fitted += [array.mean(axis=0), np.atleast_2d(np.cov(array, rowvar=False))]
    return gaussian_distance(*fitted)


def gaussian_distance(
    mean: Matrix, covariance: Matrix, other_mean: Matrix, other_covariance: Matrix
) -> float:
    """Return the squared Fréchet (2-Wasserstein) distance between two Gaussians.

    tr (C₁C₂)^½ = tr (R C₂ R)^½ with R the symmetric root of C₁, which is the sum of the roots of
    the eigenvalues of a symmetric matrix.
    """
    # Eigenvalues that are zero up to rounding must be zero: the root of 1e-15 is 3e-8, and singular
    # covariances have many of them.
    values, vectors = _nonnegative_eigh(covariance)
    root = (vectors * np.sqrt(values)) @ vectors.T
    shared = float(np.sqrt(_nonnegative_eigh(root @ other_covariance @ root)[0]).sum())
    apart = float(np.square(mean - other_mean).sum())
    distance = apart + float(np.trace(covariance) + np.trace(other_covariance)) - 2 * shared
    return max(distance, 0.0)


def _nonnegative_eigh(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Return eigenvalues, with those within rounding of zero set to zero, and eigenvectors."""
    values, vectors = np.linalg.eigh(matrix)
    rounding = len(values) * np.finfo(np.float64).eps * values[-1]
    return np.where(values > rounding, values, 0.0), vectors


class FeatureNetwork(nn.Module):
    """Convolutional classifier whose features are the inputs of its last, linear layer."""

    def __init__(self, in_channels: int, num_classes: int, *, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise((in_channels, width, 2 * width, 4 * width)):
            convolution = nn.Conv2d(before, after, 3, stride=2, padding=1)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
        self.convolutions = nn.Sequential(*layers)
        self.hidden = nn.Linear(16 * width, FEATURES)
        self.classifier = nn.Linear(FEATURES, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self._features(images))
        return logits

    @torch.no_grad()
    def features(self, images: Tensor, *, batch: int = 256) -> Tensor:
        """Return the features of images, from which a Fréchet distance is computed.

        Args:
            images: Images, shape (B, C, H, W).
            batch: Number of images that are processed at once.

        Returns:
            Inputs of the last, linear layer, shape (B, 64).
        """
        return torch.cat([self._features(part) for part in torch.split(images, batch)])

    def _features(self, images: Tensor) -> Tensor:
        maps = F.adaptive_avg_pool2d(self.convolutions(images), 2)
        return F.relu(self.hidden(maps.flatten(1)))


def train_feature_network(
    images: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    epochs: int = 3,
    batch: int = 128,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> FeatureNetwork:
    """Train a classifier of images for its features; the result depends only on data and seed."""
    if num_classes < 2:
        raise ValueError(
            f"a feature network needs images of at least two labelled classes, got {num_classes}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = FeatureNetwork(images.shape[1], num_classes).to(images.device)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate)
    steps = epochs * -(-len(images) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.enable_grad():
        for _ in range(epochs):
            for indices in torch.split(torch.randperm(len(images), generator=generator), batch):
                rows = indices.to(images.device)
                loss = F.cross_entropy(network(images[rows]), labels[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
    return network.eval().requires_grad_(False)
