"""HRNet for classification: branches of several resolutions that repeatedly exchange features.

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
"""Number of residual blocks of stage 1, and of each branch of a module in later stages."""


class Fuse(nn.Module):
    """Map from one branch to another.

    From a coarser branch it is a 1×1 convolution and nearest-neighbor upsampling; from a finer one
    it is a sequence of 3×3 convolutions of stride 2, of which the last changes the number of
    channels and has no ReLU.

    Args:
        source: Channels of the source.
        target: Channels of the target.
        steps: Number of levels by which the source is coarser; negative if it is finer.
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
    """Residual blocks in each branch, then a fusion in which each branch sums over all branches.

    Args:
        widths: Channels of each branch, the finest first.
        blocks: Residual blocks per branch.
    """

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
    """Map to a stage with one more branch, which has half the resolution of the coarsest one.

    Args:
        sources: Channels of each branch of the previous stage.
        widths: Channels of each branch of the next stage.
    """

    def __init__(self, sources: Sequence[int], widths: Sequence[int]) -> None:
        super().__init__()
        self.kept = nn.ModuleList(
            nn.Identity() if source == target else conv_norm_relu(source, target, 3)
            for source, target in zip(sources, widths, strict=False)
        )
        self.new = conv_norm_relu(sources[-1], widths[-1], 3, stride=2)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        converted = [layer(x) for layer, x in zip(self.kept, maps, strict=True)]
        return [*converted, self.new(maps[-1])]


class ClassificationNeck(nn.Module):
    """Neck from all branches to one map: bottlenecks, a sum from fine to coarse, a 1×1 convolution.

    Args:
        branches: Channels of each branch, the finest first.
        width: Width of the first bottleneck, which doubles from branch to branch; the outputs have
            four times as many channels.
        features: Channels of the output.
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
        total: Tensor = widened[0]
        for down, x in zip(self.down, widened[1:], strict=True):
            total = x + down(total)
        features: Tensor = self.final(total)
        return features


class HRNet(nn.Module):
    """HRNet classifier; the defaults are HRNet-W18.

    Images may have any size; the published network is for sides that are multiples of 32.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        width: Channels of the finest branch; they double from branch to branch.
        modules: Number of modules of stages 2, 3, …; each stage has one more branch.
        blocks: Residual blocks of stage 1, and of each branch of a module.
        stem_channels: Channels of the stem.
        head_width: Width of the neck's first bottleneck.
        features: Channels of the pooled map.
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
            raise ValueError(
                "widths and numbers of blocks and modules must be positive, got "
                f"width={width}, modules={tuple(modules)}, blocks={blocks}, "
                f"stem_channels={stem_channels}, head_width={head_width}, features={features}"
            )
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
        sources = [channels]
        self.stages = nn.Sequential()
        for level, count in enumerate(modules):
            widths = [width * 2**branch for branch in range(level + 2)]
            transition = Transition(sources, widths)
            exchange = nn.Sequential(*(HighResolutionModule(widths, blocks) for _ in range(count)))
            stage = OrderedDict[str, nn.Module](transition=transition, exchange=exchange)
            self.stages.append(nn.Sequential(stage))
            sources = widths
        self.neck = ClassificationNeck(sources, width=head_width, features=features)
        self.head = PooledLinearHead(features, num_classes)
        initialize_he(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits

    def branches(self, images: Tensor) -> list[Tensor]:
        """Return the map of every branch, the finest (1/4 of the image's sides) first."""
        maps: list[Tensor] = self.stages([self.stage_1(self.stem(images))])
        return maps

    def features(self, images: Tensor) -> Tensor:
        """Return the map that is pooled, at the coarsest resolution."""
        features: Tensor = self.neck(self.branches(images))
        return features
