"""Residual networks: explicit baselines, and the extractors of OptEq's ImageNet models.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016; Zagoruyko and Komodakis,
"Wide Residual Networks", BMVC 2016. Bottlenecks stride in their 3×3 convolution (version 1.5).
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
"""The blocks of each stage, by depth."""


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + residual(x)); the shortcut is a 1×1 convolution where the shape changes.

    kind="basic": 3×3, 3×3. kind="bottleneck": 1×1, 3×3, 1×1 with four times as many outputs, its
    inner convolutions `widening` times as wide.
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
    """A stem and stages of residual blocks: images to the feature map of the last stage.

    form="imagenet": a 7×7 stem of stride 2 and max-pooling; form="cifar": `stem_depth` 3×3
    convolutions, of which the first `stem_strides` halve the resolution. Every stage but the first
    halves it again.
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
            raise ValueError(f"only bottlenecks can be widened, not basic blocks by {widening}")
        if not widths or len(widths) != len(blocks) or min(*widths, *blocks, widening) < 1:
            raise ValueError(
                "each stage needs a positive width and number of blocks, "
                f"not {tuple(widths)}, {tuple(blocks)}, widened by {widening}"
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
    """logits = head(trunk(images)).

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
        """The feature map of the last stage."""
        features: Tensor = self.trunk(images)
        return features


def initialize_he(module: nn.Module) -> None:
    """Convolutions of variance 2 ÷ fan-out (He et al. 2015)."""
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
    """The first `stages` stages of a residual network, as a feature extractor.

    Two stages of ResNet-50 or Wide-ResNet-50 take 224×224×3 to 28×28×512 (OptEq Section 7.3.2).
    `channels` is the width of the first stage.
    """
    if depth not in LAYOUTS:
        raise ValueError(f"depth must be one of {', '.join(map(str, LAYOUTS))}, not {depth}")
    kind, blocks = LAYOUTS[depth]
    if not 1 <= stages <= len(blocks):
        raise ValueError(f"stages must be between 1 and {len(blocks)}, not {stages}")
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
    """ResNet-18, -34, -50 or -101; depth=50 with widening=2 is Wide-ResNet-50-2.

    With fewer `stages` it is a truncated network: an extractor and a linear classifier, or with
    `head_widths` that of `opteq_imagenet`, which makes Table 7's "Extr. + Cls.".
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
    """A CIFAR-style network of basic blocks with free widths, for images of 8×8 to 32×32.

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
    """Table 6's "cls. layer": 1×1 convolutions, each with ReLU and MaxPool; AvgPool; linear."""

    def __init__(self, channels: int, widths: Sequence[int], num_classes: int) -> None:
        super().__init__()
        sizes = [channels, *widths]
        self.layers = nn.Sequential()
        for before, width in pairwise(sizes):
            self.layers.append(nn.Conv2d(before, width, 1))
            self.layers.append(nn.ReLU(inplace=True))
            # ceil_mode: a map of one pixel stays one.
            self.layers.append(nn.MaxPool2d(2, ceil_mode=True))
        initialize_he(self.layers)
        self.classifier = PooledLinearHead(sizes[-1], num_classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.layers(features))
        return logits
