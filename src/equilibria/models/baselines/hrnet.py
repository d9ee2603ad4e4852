"""HRNet for classification: parallel branches of several resolutions that keep exchanging features.

Wang, Sun et al., "Deep High-Resolution Representation Learning for Visual Recognition", TPAMI 2021.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.models.baselines.resnet import ResidualBlock, initialize_he
from equilibria.models.blocks import ImageLayers, PooledLinearHead, conv_norm, conv_norm_relu

BLOCKS = 4
"""Residual blocks of stage 1, and of each branch of a module of the later stages."""


class Fuse(nn.Module):
    """What a branch takes over from another: the same, upsampled, or downsampled.

    From a branch `steps` > 0 levels coarser: a 1×1 convolution and nearest-neighbor upsampling;
    from a finer one: |steps| 3×3 convolutions of stride 2, only the last of which changes the width
    and has no ReLU.
    """

    def __init__(self, source: int, target: int, steps: int) -> None:
        super().__init__()
        if steps == 0:
            self.layers = nn.Sequential()
        elif steps > 0:
            self.layers = conv_norm(source, target, 1)
        else:
            halvings = [conv_norm_relu(source, source, 3, stride=2) for _ in range(-steps - 1)]
            self.layers = nn.Sequential(*halvings, conv_norm(source, target, 3, stride=2))

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        size = like.shape[-2:]
        return y if y.shape[-2:] == size else F.interpolate(y, size=size, mode="nearest")


class HighResolutionModule(nn.Module):
    """Residual blocks in each branch, then every branch takes the sum over all branches."""

    def __init__(self, widths: Sequence[int], blocks: int = BLOCKS) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width, width) for _ in range(blocks))) for width in widths
        )
        self.fuse = nn.ModuleList(
            nn.ModuleList(Fuse(source, target, j - i) for j, source in enumerate(widths))
            for i, target in enumerate(widths)
        )

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        maps = [branch(x) for branch, x in zip(self.branches, maps, strict=True)]
        fused = []
        for like, row in zip(maps, self.fuse, strict=True):
            assert isinstance(row, nn.ModuleList)
            total = sum(fuse(x, like) for fuse, x in zip(row, maps, strict=True))
            assert isinstance(total, Tensor)
            fused.append(F.relu(total))
        return fused


class Transition(nn.Module):
    """Into a stage with one branch more: a new one of half the resolution, from the coarsest."""

    def __init__(self, before: Sequence[int], widths: Sequence[int]) -> None:
        super().__init__()
        self.kept = nn.ModuleList(
            nn.Identity() if source == target else conv_norm_relu(source, target, 3)
            for source, target in zip(before, widths, strict=False)
        )
        self.new = conv_norm_relu(before[-1], widths[-1], 3, stride=2)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        kept = [layer(x) for layer, x in zip(self.kept, maps, strict=True)]
        return [*kept, self.new(maps[-1])]


class ClassificationNeck(nn.Module):
    """Widen every branch by a bottleneck, gather them from fine to coarse, widen once more.

    The branches get 4·`width`, 8·`width`, … channels; the sum runs down through 3×3 convolutions of
    stride 2; a 1×1 convolution makes the `features` that are pooled.
    """

    def __init__(self, branches: Sequence[int], *, width: int, features: int) -> None:
        super().__init__()
        self.widen = nn.ModuleList(
            ResidualBlock(channels, width * 2**level, kind="bottleneck")
            for level, channels in enumerate(branches)
        )
        wide = [4 * width * 2**level for level in range(len(branches))]
        self.down = nn.ModuleList(
            conv_norm_relu(fine, coarse, 3, stride=2, bias=True) for fine, coarse in pairwise(wide)
        )
        self.final = conv_norm_relu(wide[-1], features, 1, bias=True)

    def forward(self, maps: list[Tensor]) -> Tensor:
        widened = [widen(x) for widen, x in zip(self.widen, maps, strict=True)]
        gathered: Tensor = widened[0]
        for down, x in zip(self.down, widened[1:], strict=True):
            gathered = x + down(gathered)
        features: Tensor = self.final(gathered)
        return features


class HRNet(nn.Module):
    """Stem, stage 1 of bottlenecks, later stages of ever more branches, neck, linear classifier.

    HRNet-W18 and its like: `width` is that of the finest branch, doubled from one to the next.
    `modules` are the numbers of modules of stages 2, 3, 4, each with a branch more than the last.
    Images may have any size; the published network is meant for multiples of 32.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        width: int = 18,
        modules: Sequence[int] = (1, 4, 3),
        blocks: int = BLOCKS,
        stem_channels: int = 64,
        head_width: int = 32,
        features: int = 2048,
    ) -> None:
        super().__init__()
        if min(width, blocks, stem_channels, head_width, features, *modules) < 1 or not modules:
            raise ValueError("widths and numbers of blocks and modules must be positive")
        halvings = (
            conv_norm_relu(width, stem_channels, 3, stride=2)
            for width in (in_channels, stem_channels)
        )
        self.stem = ImageLayers(in_channels, halvings)
        self.stage_1 = nn.Sequential()
        channels = stem_channels
        for _ in range(blocks):
            block = ResidualBlock(channels, stem_channels, kind="bottleneck")
            self.stage_1.append(block)
            channels = block.out_channels
        before = [channels]
        self.stages = nn.Sequential()
        for level, count in enumerate(modules):
            widths = [width * 2**branch for branch in range(level + 2)]
            transition = Transition(before, widths)
            exchange = nn.Sequential(*(HighResolutionModule(widths, blocks) for _ in range(count)))
            stage = OrderedDict[str, nn.Module](transition=transition, exchange=exchange)
            self.stages.append(nn.Sequential(stage))
            before = widths
        self.neck = ClassificationNeck(before, width=head_width, features=features)
        self.head = PooledLinearHead(features, num_classes)
        initialize_he(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits

    def branches(self, images: Tensor) -> list[Tensor]:
        """The feature map of every resolution, the finest (a quarter of the image) first."""
        maps: list[Tensor] = self.stages([self.stage_1(self.stem(images))])
        return maps

    def features(self, images: Tensor) -> Tensor:
        """The feature map that is pooled, at the coarsest resolution."""
        features: Tensor = self.neck(self.branches(images))
        return features
