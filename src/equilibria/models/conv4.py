"""The network of four convolutions that few-shot learners adapt.

Vinyals et al. 2016; with strides and a mean at the end, as for Omniglot in Finn, Abbeel, Levine,
"Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.models.blocks import check_images
from equilibria.models.mdeq_layers import fitting_groups

Conv4Norm = Literal["batch", "group"]


class BatchStatisticsNorm(nn.Module):
    """Batch normalization by the batch at hand, always: nothing is remembered of other batches.

    What MAML does. Predictions for the queries of an episode then depend on one another.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, features: Tensor) -> Tensor:
        if not len(features):
            return features
        return F.batch_norm(features, None, None, self.weight, self.bias, training=True)


def norm_of_images(norm: Conv4Norm, channels: int, groups: int) -> nn.Module:
    """By the batch at hand, or by each image alone."""
    if norm == "batch":
        return BatchStatisticsNorm(channels)
    if norm == "group":
        return nn.GroupNorm(fitting_groups(channels, groups), channels)
    raise ValueError(f"norm must be 'batch' or 'group', not {norm!r}")


class StridedBlocks(nn.Sequential):
    """`depth` times a convolution that halves the resolution, a norm, ReLU."""

    def __init__(
        self, in_channels: int, channels: int, depth: int, *, norm: Conv4Norm, groups: int
    ) -> None:
        layers: list[nn.Module] = []
        for level in range(depth):
            width = channels if level else in_channels
            layers += [
                nn.Conv2d(width, channels, 3, stride=2, padding=1),
                norm_of_images(norm, channels, groups),
                nn.ReLU(),
            ]
        super().__init__(*layers)
        self.in_channels = in_channels

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.in_channels)
        features = images
        for layer in self:
            features = layer(features)
        return features


class Conv4(nn.Module):
    """Four times convolution (stride 2), norm, ReLU; the mean over pixels; a linear classifier."""

    def __init__(
        self, in_channels: int, channels: int, num_classes: int, *, norm: Conv4Norm, groups: int
    ) -> None:
        super().__init__()
        self.features = StridedBlocks(in_channels, channels, 4, norm=norm, groups=groups)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits; episodes, shape `(B, samples, C, H, W)`, are taken as B · samples images."""
        features = self.features(images.flatten(0, -4))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits


def conv4(
    *,
    num_classes: int = 5,
    in_channels: int = 3,
    channels: int = 64,
    norm: Conv4Norm = "batch",
    groups: int = 8,
) -> Conv4:
    """The explicit network of MAML, Reptile and iMAML; norm="group" keeps samples apart."""
    return Conv4(in_channels, channels, num_classes, norm=norm, groups=groups)
