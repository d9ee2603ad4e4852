"""Residual networks, as baselines and as extractors of OptEq's ImageNet models.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016; Zagoruyko and Komodakis,
"Wide Residual Networks", BMVC 2016. The stride of a bottleneck is in its 3×3 convolution (v1.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

from torch import Tensor, nn

from equilibria.models.blocks import (
    ImageLayers,
    ImageStem,
    PooledLinearHead,
    conv_norm,
    conv_norm_relu,
)
from equilibria.models.registry import with_options_of
from equilibria.registry import check_choice

Form = Literal["imagenet", "cifar"]
Kind = Literal["basic", "bottleneck"]

LAYOUTS: dict[int, tuple[Kind, tuple[int, ...]]] = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
}
"""Kind of block and number of blocks of each stage, by depth."""


class ResidualBlock(nn.Module):
    """Residual block relu(shortcut(x) + residual(x)).

    The shortcut is a 1×1 convolution if the shape changes, and the identity otherwise.

    Args:
        in_channels: Channels of the input.
        width: Channels of the convolutions.
        kind: "basic" (3×3, 3×3) or "bottleneck" (1×1, 3×3, 1×1 with 4 · width outputs).
        stride: Stride of the block.
        widening: Factor of the inner width of a bottleneck.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        kind: Kind = "basic",
        stride: int = 1,
        widening: int = 1,
    ) -> None:
        super().__init__()
        if kind == "basic":
            self.out_channels = width
            self.residual = nn.Sequential(
                conv_norm_relu(in_channels, width, 3, stride=stride),
                conv_norm(width, width, 3),
            )
        else:
            self.out_channels = 4 * width
            inner = widening * width
            self.residual = nn.Sequential(
                conv_norm_relu(in_channels, inner, 1),
                conv_norm_relu(inner, inner, 3, stride=stride),
                conv_norm(inner, self.out_channels, 1),
            )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != self.out_channels:
            self.shortcut = conv_norm(in_channels, self.out_channels, 1, stride=stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return y


class ResNetTrunk(nn.Module):
    """Stem and stages of residual blocks, from images to the feature map of the last stage.

    Every stage but the first halves the resolution.

    Args:
        in_channels: Channels of the images.
        kind: Kind of block, "basic" or "bottleneck".
        widths: Width of the blocks, one number per stage.
        blocks: Number of blocks, one number per stage.
        form: Stem: "imagenet" (7×7 convolution of stride 2 and max-pooling) or "cifar" (3×3
            convolutions).
        widening: Factor of the inner width of bottlenecks.
        stem_depth: Number of convolutions of a "cifar" stem.
        stem_strides: How many of the first convolutions of a "cifar" stem have stride 2.
    """

    def __init__(
        self,
        in_channels: int,
        *,
        kind: Kind,
        widths: Sequence[int],
        blocks: Sequence[int],
        form: Form = "imagenet",
        widening: int = 1,
        stem_depth: int = 1,
        stem_strides: int = 0,
    ) -> None:
        super().__init__()
        check_choice(get_args(Form), form=form)
        if kind == "basic" and widening != 1:
            raise ValueError(f"basic blocks cannot be widened; set widening=1, got {widening}")
        if not widths or len(widths) != len(blocks) or min(*widths, *blocks, widening) < 1:
            raise ValueError(
                "each stage needs a positive width and number of blocks, got "
                f"{tuple(widths)} and {tuple(blocks)} with widening={widening}"
            )
        channels = widths[0]
        if form == "imagenet":
            self.stem = ImageLayers(in_channels, conv_norm_relu(in_channels, channels, 7, stride=2))
            self.stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        else:
            self.stem = ImageStem(
                in_channels, channels, depth=stem_depth, strides=stem_strides, affine=True
            )
            self.stem.append(nn.ReLU(inplace=True))
        self.stages = nn.Sequential()
        for level, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            stage = nn.Sequential()
            for position in range(count):
                stride = 2 if level > 0 and position == 0 else 1
                block = ResidualBlock(channels, width, kind=kind, stride=stride, widening=widening)
                channels = block.out_channels
                stage.append(block)
            self.stages.append(stage)
        self.out_channels = channels
        initialize_he(self)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.stages(self.stem(images))
        return features


class ResNet(nn.Module):
    """Residual classifier logits = head(trunk(images)).

    Args:
        trunk: From images to features.
        head: From features to logits.

    Examples:
        >>> model = eq.create_model("resnet-small", in_channels=1)
        >>> from equilibria.models.baselines.resnet import ResNet
        >>> isinstance(model, ResNet)
        True
    """

    def __init__(self, trunk: ResNetTrunk, head: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """Return the feature map of the last stage."""
        features: Tensor = self.trunk(images)
        return features


def initialize_he(module: nn.Module) -> None:
    """Initialize convolutions in place with variance 2 / fan-out (He et al. 2015)."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def resnet_extractor(
    *,
    in_channels: int = 3,
    depth: int = 50,
    stages: int = 2,
    channels: int = 64,
    widening: int = 1,
    form: Form = "imagenet",
) -> ResNetTrunk:
    """Build the first stages of a residual network as a feature extractor.

    Two stages of ResNet-50 or Wide-ResNet-50 map 224×224×3 to 28×28×512 (OptEq Section 7.3.2).

    Args:
        in_channels: Channels of the images.
        depth: Depth of the full network: 18, 34, 50 or 101.
        stages: Number of stages.
        channels: Width of the first stage; it doubles from stage to stage.
        widening: Factor of the inner width of bottlenecks.
        form: Stem, "imagenet" or "cifar".
    """
    if depth not in LAYOUTS:
        raise ValueError(f"depth must be one of {', '.join(map(str, LAYOUTS))}, got {depth}")
    kind, blocks = LAYOUTS[depth]
    if not 1 <= stages <= len(blocks):
        raise ValueError(f"stages must be between 1 and {len(blocks)}, got {stages}")
    return ResNetTrunk(
        in_channels,
        kind=kind,
        widths=[channels * 2**level for level in range(stages)],
        blocks=blocks[:stages],
        form=form,
        widening=widening,
    )


@with_options_of(resnet_extractor)
def resnet(
    *,
    num_classes: int = 10,
    depth: int = 18,
    form: Form = "cifar",
    stages: int = 4,
    head_widths: Sequence[int] | None = None,
    **extractor: Any,
) -> ResNet:
    """Build a ResNet-18, -34, -50 or -101; depth=50 with widening=2 is Wide-ResNet-50-2.

    Args:
        num_classes: Number of classes.
        depth: Depth of the full network.
        form: Stem, "imagenet" or "cifar".
        stages: Number of stages, at most 4.
        head_widths: Widths of a `ConvolutionalHead`, as in "Extr. + Cls." of Table 7; by default
            the head is linear.
        extractor: Options of `resnet_extractor`.
    """
    trunk = resnet_extractor(depth=depth, form=form, stages=stages, **extractor)
    if head_widths is not None:
        return ResNet(trunk, ConvolutionalHead(trunk.out_channels, head_widths, num_classes))
    return ResNet(trunk, PooledLinearHead(trunk.out_channels, num_classes))


@with_options_of(ResNetTrunk, without=("kind", "widths", "form", "widening"))
def resnet_small(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    channels: Sequence[int] = (16, 32, 64),
    blocks: Sequence[int] = (1, 1, 1),
    **stem: Any,
) -> ResNet:
    """Build a CIFAR-style network of basic blocks, for images of 8×8 to 32×32.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        channels: Width of the blocks, one number per stage.
        blocks: Number of blocks, one number per stage.
        stem: Options stem_depth and stem_strides of `ResNetTrunk`.

    Examples:
        >>> from equilibria.models.baselines.resnet import resnet_small
        >>> resnet_small(in_channels=1)(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    trunk = ResNetTrunk(
        in_channels, kind="basic", widths=channels, blocks=blocks, form="cifar", **stem
    )
    return ResNet(trunk, PooledLinearHead(trunk.out_channels, num_classes))


class ConvolutionalHead(nn.Module):
    """OptEq's classification layer: 1×1 convolutions with ReLU and MaxPool, AvgPool, linear.

    This is "cls. layer" in Table 6.

    Args:
        channels: Channels of the feature.
        widths: Channels of the convolutions.
        num_classes: Number of classes.
    """

    def __init__(self, channels: int, widths: Sequence[int], num_classes: int) -> None:
        super().__init__()
        sizes = [channels, *widths]
        self.layers = nn.Sequential()
        for inputs, width in pairwise(sizes):
            self.layers.append(nn.Conv2d(inputs, width, 1))
            self.layers.append(nn.ReLU(inplace=True))
            # ceil_mode accepts maps of one pixel.
            self.layers.append(nn.MaxPool2d(2, ceil_mode=True))
        initialize_he(self.layers)
        self.classifier = PooledLinearHead(sizes[-1], num_classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.layers(features))
        return logits
