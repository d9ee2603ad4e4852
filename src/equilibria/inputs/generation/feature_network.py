"""Features to compare sets of images by, from a small classifier trained on the same data set.

The Inception network of the published FID is a download, and knows photographs, not digits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES = 64


class FeatureNetwork(nn.Module):
    """A convolutional classifier; its features are what its last, linear layer sees."""

    def __init__(self, in_channels: int, num_classes: int, *, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = in_channels
        for after in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after)]
            layers.append(nn.ReLU())
            before = after
        self.convolutions = nn.Sequential(*layers)
        self.hidden = nn.Linear(4 * before, FEATURES)
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
