"""Fully convolutional networks for segmentation: stem, head, and the plain baseline.

Shelhamer, Long and Darrell, "Fully Convolutional Networks for Semantic Segmentation", TPAMI 2017;
the baseline of OptEq's Section 7.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.models.baselines.resnet import initialize_he
from equilibria.models.blocks import ImageStem, check_images, check_odd, conv_norm_relu
from equilibria.models.registry import nearest_width, parameter_count
from equilibria.registry import check_at_least_one, check_below_one


class SegmentationStem(ImageStem):
    """An `ImageStem` with 1/stride of the resolution, for images of any size.

    It replicates the right and lower edges until both sides are multiples of stride · multiple, so
    that the upsampled logits cover the image. `crop_to` removes the padding.

    Args:
        in_channels: Channels of the images.
        channels: Channels of the output.
        stride: Factor from the output to the image, a power of 2.
        depth: Number of convolutions; by default one per halving of the resolution.
        multiple: Required divisor of the sides of the output.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        stride: int = 4,
        depth: int | None = None,
        multiple: int = 1,
    ) -> None:
        halvings = stride.bit_length() - 1
        if stride < 1 or stride != 2**halvings:
            raise ValueError(f"stride must be a power of 2, got {stride}")
        check_at_least_one(multiple=multiple)
        depth = max(halvings, 1) if depth is None else depth
        super().__init__(in_channels, channels, depth=depth, strides=halvings)
        self.stride = stride
        self.multiple = multiple

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.in_channels)
        divisor = self.stride * self.multiple
        below, right = (-side % divisor for side in images.shape[2:])
        if below or right:
            images = F.pad(images, (0, right, 0, below), mode="replicate")
        return super().forward(images)


class FCNHead(nn.Module):
    """FCN's head: 3×3 convolution, BatchNorm, ReLU, dropout, 1×1 convolution, upsampling.

    Args:
        channels: Channels of the feature.
        width: Channels of the 3×3 convolution.
        num_classes: Number of classes.
        stride: Factor of the upsampling.
        dropout: Dropout rate.
    """

    def __init__(
        self, channels: int, width: int, num_classes: int, *, stride: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        check_at_least_one(head_width=width)
        check_below_one(dropout=dropout)
        self.convolution = conv_norm_relu(channels, width, 3)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        self.stride = stride
        initialize_he(self.convolution)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.dropout(self.convolution(features)))
        if self.stride == 1:
            return logits
        return F.interpolate(logits, scale_factor=self.stride, mode="bilinear", align_corners=False)


def crop_to(logits: Tensor, images: Tensor) -> Tensor:
    """Remove the logits of pixels that a `SegmentationStem` padded.

    Args:
        logits: Logits, shape (B, classes, H', W').
        images: Images, shape (B, C, H, W).
    """
    return logits[:, :, : images.shape[2], : images.shape[3]]


class FCN(nn.Module):
    """Segmentation network logits = head(backbone(stem(image))), one vector of logits per pixel.

    Args:
        stem: From images to maps of 1/stride of the resolution.
        backbone: From maps to features.
        head: From features to logits.
    """

    def __init__(self, stem: SegmentationStem, backbone: nn.Module, head: FCNHead) -> None:
        super().__init__()
        self.stem = stem
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        return crop_to(self.head(self.features(images)), images)

    def features(self, images: Tensor) -> Tensor:
        """Return the feature map of the backbone."""
        features: Tensor = self.backbone(self.stem(images))
        return features


def fcn(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    channels: int = 32,
    widths: Sequence[int] = (32, 64, 64),
    kernel_size: int = 3,
    stem_depth: int | None = None,
    stride: int = 4,
    head_width: int = 32,
    dropout: float = 0.1,
    parameters: int | None = None,
) -> FCN:
    """Build a plain convolutional segmentation network.

    Stem and head are those of `deep_opteq_segmentation`.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        channels: Channels of the stem.
        widths: Channels of the layers of the backbone, each with BatchNorm and ReLU.
        kernel_size: Side of the kernels of the backbone.
        stem_depth: Convolutions of the stem; by default one per halving of the resolution.
        stride: Factor from the maps of the backbone to the image, a power of 2.
        head_width: Channels of the head.
        dropout: Dropout rate of the head.
        parameters: Target number of parameters. `widths` are scaled by one factor to come as near
            as possible, for a baseline "with a similar number of parameters".
    """
    if not widths:
        raise ValueError("widths is empty; an FCN needs at least one layer")
    check_odd(kernel_size=kernel_size)

    def network(sizes: Sequence[int]) -> FCN:
        stem = SegmentationStem(in_channels, channels, stride=stride, depth=stem_depth)
        layers = [conv_norm_relu(a, b, kernel_size) for a, b in pairwise([channels, *sizes])]
        backbone = nn.Sequential(*layers)
        initialize_he(backbone)
        head = FCNHead(sizes[-1], head_width, num_classes, stride=stride, dropout=dropout)
        return FCN(stem, backbone, head)

    if parameters is None:
        return network(widths)

    # The search is over the number of channels of the widest layer.
    def scaled(widest: int) -> list[int]:
        return [max(1, round(widest * width / max(widths))) for width in widths]

    def count(widest: int) -> int:
        with torch.device("meta"):
            return parameter_count(network(scaled(widest)))

    remedy = "use fewer layers or channels, or a smaller head_width"
    return network(scaled(nearest_width(count, parameters, remedy=remedy)))
