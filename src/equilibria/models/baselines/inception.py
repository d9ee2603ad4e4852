"""Inception-V2 (BN-Inception), an explicit baseline.

It is GoogLeNet with batch norms, and with two 3×3 convolutions in place of a 5×5.

Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal
Covariate Shift", ICML 2015, Figure 5.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from equilibria.models.baselines.resnet import initialize_he
from equilibria.models.blocks import ImageLayers, PooledLinearHead, conv_norm_relu
from equilibria.registry import check_at_least_one

FIRST_WIDTH = 64


class Widths(NamedTuple):
    """A line of Figure 5; a module without a 1×1 convolution and a projection halves the map."""

    one: int
    three_reduce: int
    three: int
    double_reduce: int
    double: int
    projection: int
    pooling: Literal["avg", "max"] = "avg"


MODULES = (
    Widths(64, 64, 64, 64, 96, 32),
    Widths(64, 64, 96, 64, 96, 64),
    Widths(0, 128, 160, 64, 96, 0, "max"),
    Widths(224, 64, 96, 96, 128, 128),
    Widths(192, 96, 128, 96, 128, 128),
    Widths(160, 128, 160, 128, 160, 128),
    Widths(96, 128, 192, 160, 192, 128),
    Widths(0, 128, 192, 192, 256, 0, "max"),
    Widths(352, 192, 320, 160, 224, 128),
    Widths(352, 192, 320, 192, 224, 128, "max"),
)
"""3a to 3c, 4a to 4e, 5a and 5b. Lines 4c and 4d make 608 channels, where the figure says 576;
these are the widths that it prints, and those of published weights."""


class InceptionModule(nn.Module):
    """Four ways side by side: 1×1; 1×1, 3×3; 1×1, 3×3, 3×3; pooling, 1×1. Their maps are joined."""

    def __init__(self, in_channels: int, widths: Widths) -> None:
        super().__init__()
        one, three_reduce, three, double_reduce, double, projection, pooling = widths
        halves = one == 0
        stride = 2 if halves else 1
        kind = nn.MaxPool2d if pooling == "max" else nn.AvgPool2d
        pooled = nn.Sequential(kind(3, stride=stride, padding=1))
        if not halves:
            pooled.append(conv_norm_relu(in_channels, projection, 1))
        self.ways = nn.ModuleList([conv_norm_relu(in_channels, one, 1)] if one else [])
        self.ways.extend(
            [
                nn.Sequential(
                    conv_norm_relu(in_channels, three_reduce, 1),
                    conv_norm_relu(three_reduce, three, 3, stride=stride),
                ),
                nn.Sequential(
                    conv_norm_relu(in_channels, double_reduce, 1),
                    conv_norm_relu(double_reduce, double, 3),
                    conv_norm_relu(double, double, 3, stride=stride),
                ),
                pooled,
            ]
        )
        self.out_channels = one + three + double + (in_channels if halves else projection)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in self.ways], dim=1)


class Inception(nn.Module):
    """Inception-V2 for images of about 224×224, of which the last map is a 32nd.

    channels: the width of the first convolution, 64 in the paper; all others are in proportion.
    """

    def __init__(
        self, *, num_classes: int = 10, in_channels: int = 3, channels: int = FIRST_WIDTH
    ) -> None:
        super().__init__()
        check_at_least_one(channels=channels)

        def scaled(width: int) -> int:
            return -(-width * channels // FIRST_WIDTH)

        width = scaled(192)
        self.stem = ImageLayers(
            in_channels,
            [
                conv_norm_relu(in_channels, channels, 7, stride=2),
                nn.MaxPool2d(3, stride=2, padding=1),
                conv_norm_relu(channels, channels, 1),
                conv_norm_relu(channels, width, 3),
                nn.MaxPool2d(3, stride=2, padding=1),
            ],
        )
        self.inceptions = nn.Sequential()
        for *widths, pooling in MODULES:
            module = InceptionModule(width, Widths._make([*map(scaled, widths), pooling]))
            self.inceptions.append(module)
            width = module.out_channels
        self.head = PooledLinearHead(width, num_classes)
        initialize_he(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """The map of the last module."""
        features: Tensor = self.inceptions(self.stem(images))
        return features
