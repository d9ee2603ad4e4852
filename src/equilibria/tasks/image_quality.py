"""How good drawn or restored images are: PSNR of pairs, the Fréchet distance between sets.

The published FID takes its features from an Inception network, which is a download and knows
photographs, not digits; here they come from a small classifier of the same data set.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

Matrix = NDArray[np.float64]
MOST_DECIBEL = 120.0
"""What counts as no difference at all between two pictures."""
FEATURES = 64


def psnr(images: Tensor, references: Tensor, *, peak: float = 1.0) -> Tensor:
    """10 log₁₀(peak² ÷ mean squared error) of each pair, in decibels; infinite where equal."""
    if images.shape != references.shape or images.dim() < 2:
        raise ValueError(
            f"expected two batches of one shape, not {tuple(images.shape)} and "
            f"{tuple(references.shape)}"
        )
    error = (images.double() - references.double()).square().flatten(1).mean(dim=1)
    return 10 * torch.log10(peak**2 / error)


def picture_psnr(images: Tensor, originals: Tensor) -> Tensor:
    """The PSNR of each image in decibel, as a viewer sees it: cut off to [0, 1], at most 120."""
    return psnr(images.clamp(0, 1), originals.clamp(0, 1)).clamp_max(MOST_DECIBEL)


def frechet_distance(features: Tensor, references: Tensor) -> float:
    """‖m₁ − m₂‖² + tr(C₁ + C₂ − 2 (C₁C₂)^½) of the Gaussians fitted to two sets of rows.

    The FID of Heusel et al. (2017), where the rows are features of images. With more columns than
    rows the covariances are singular; the distance is finite all the same. It falls as the number
    of rows grows, so compare only what was computed with equally many.
    """
    for rows in (features, references):
        if rows.dim() != 2 or len(rows) < 2:
            raise ValueError(
                f"expected at least two rows of features, not a tensor of {tuple(rows.shape)}"
            )
    fitted = []
    for rows in (features, references):
        array = rows.detach().cpu().double().numpy()
        fitted += [array.mean(axis=0), np.atleast_2d(np.cov(array, rowvar=False))]
    return gaussian_distance(*fitted)


def gaussian_distance(
    mean: Matrix, covariance: Matrix, other_mean: Matrix, other_covariance: Matrix
) -> float:
    """The squared Fréchet (2-Wasserstein) distance between two Gaussians, in double precision.

    tr (C₁C₂)^½ = tr (R C₂ R)^½ with R the symmetric root of C₁, so it is the sum of the roots of
    symmetric eigenvalues. Those within rounding of zero count as zero: the root of a rounding
    error of 1e-15 is 3e-8, and singular covariances would add up many of them.
    """
    values, vectors = _nonnegative_eigh(covariance)
    root = (vectors * np.sqrt(values)) @ vectors.T
    shared = float(np.sqrt(_nonnegative_eigh(root @ other_covariance @ root)[0]).sum())
    apart = float(np.square(mean - other_mean).sum())
    distance = apart + float(np.trace(covariance) + np.trace(other_covariance)) - 2 * shared
    return max(distance, 0.0)


def _nonnegative_eigh(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Eigenvalues and eigenvectors of a positive semi-definite matrix, free of rounding at zero."""
    values, vectors = np.linalg.eigh(matrix)
    rounding = len(values) * np.finfo(np.float64).eps * values[-1]
    return np.where(values > rounding, values, 0.0), vectors


class FeatureNetwork(nn.Module):
    """A convolutional classifier; its features are what its last, linear layer sees."""

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
        """One row of features an image."""
        return torch.cat([self._features(some) for some in torch.split(images, batch)])

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
    """A classifier of these images, in evaluation mode. The same seed gives the same one."""
    if num_classes < 2:
        raise ValueError(
            "a feature network is a classifier: it needs images of at least two labelled classes"
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
                chosen = indices.to(images.device)
                loss = F.cross_entropy(network(images[chosen]), labels[chosen])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
    return network.eval().requires_grad_(False)
